// Transport over TCP and Unix sockets: tagged messages between any two ranks of a group, within a
// host and between hosts.
//
// Sends and receives complete in the background. Messages of one sender with one tag match receives
// in order. A message that no receive matches yet is buffered if it is small or belongs to a
// collective, whose receiver is about to post the receive. Of another one larger than kEagerBytes,
// only an announcement (a frame with size and tag) is sent until the receive is posted.
//
// A message larger than kStripeBytes is divided into stripes, one per connection
// (TcpOptions::connections), after an announcement on the first one. A stripe that arrives before
// its announcement stays unread.
//
// A connection that ends without a kBye frame means that the peer is lost: every request that needs
// it fails with an error that names the peer. Data that a peer sent before it left is received all
// the same.
//
// Connections carry messages in one direction. Two threads of the device serve those of all groups:
// one receives on connections that peers opened, the other sends on connections opened here. A
// thread that queues a frame sends it, or begins to, before it returns (flush_queued), unless
// another thread is sending on that connection or the connection waits for room. The thread of the
// connection sends the rest.
//
// One lock guards everything except copies of bodies (request.h). Copying without the lock is safe
// because:
//
// - On a connection, one thread sends at a time (Connection::flush), and only its own thread
//   receives and closes it. Other threads may queue frames, or take the memory away
//   (Connection::release_requests), which the copying thread notices before its next system call.
//   The connection itself lives as long as somebody has a pointer to it.
// - A request does not finish while its memory is copied (request.h), and abort() and close() wait
//   until no copy is in progress. The copies are calls of the kernel that never block, so those
//   waits are short.
// - Only copies release the lock: in flush_queued() and complete_message(), and in flush() and
//   receive() of a connection. These calls come last in their callers, or the callers re-examine
//   all state after them. All frames of a message are queued before the lock is released, so
//   announcements are sent in the order of their numbers.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "connection.h"
#include "inbox.h"
#include "tcp_device.h"
#include "transport.h"

namespace fsccl {

// Transport of one group. Any thread may call.
class TcpTransport final : public Transport, private ConnectionOwner, private EventLoop::Handler {
 public:
  // Above this size, the sender of a message that is not part of a collective waits for kClear.
  static constexpr size_t kEagerBytes = 64 << 10;
  // Above this size, a message between hosts is divided over the connections.
  static constexpr size_t kStripeBytes = 256 << 10;

  explicit TcpTransport(std::shared_ptr<TcpDevice> device);
  ~TcpTransport() override;

  std::string address() const override;
  void set_peers(Peers peers) override;
  RequestPtr send(int peer, uint64_t tag, BufferList memory,
                  const CollectiveFingerprint& fingerprint = {}) override;
  RequestPtr recv(int peer, uint64_t tag, BufferList memory,
                  const CollectiveFingerprint& fingerprint = {}) override;
  void notify(const RequestPtr& request, std::function<void()> callback) override;
  void raise_transport_error() override;
  void listen() override;
  void ensure_connection(int rank) override;
  void abort(const Error& error) override;
  std::vector<Traffic> sent_traffic() override;
  uint64_t progress_count() const override { return events_.load(std::memory_order_relaxed); }
  void close() override;

 private:
  using ConnectionPtr = std::shared_ptr<Connection>;
  // State of one peer.
  struct PeerState {
    std::vector<ConnectionPtr> out;
    Inbox inbox;
    PendingReceives receives;
    std::map<uint64_t, RequestPtr> waiting_for_clear;  // sends that wait for kClear
    uint64_t next_message = 0, sent_bytes = 0;
    uint64_t expected_incoming = 0, closed_incoming = 0;
    uint64_t connections_opened = 0;  // number of connections to it so far
    uint64_t accepted_mask = 0;       // indices of the connections that it has opened, one bit each
    bool has_stalled = false;         // some of its connections may be stalled
    // Set if it will be lost once all data that it has sent is received.
    std::unique_ptr<Error> pending_loss;
    std::unique_ptr<Error> loss;
    bool received_bye = false;
  };

  Decision on_frame(Connection& connection, const Frame& frame, Body* body) override;
  void on_body(Connection& connection, const Frame& frame, LockHold& hold) override;
  Decision on_stripe(Connection& connection, const Frame& frame, Body* body);
  void on_clear(Connection& connection, const Frame& frame);
  void on_question(Connection& connection, const Frame& frame);
  void on_answer(const Frame& frame);
  RequestPtr query_awaited_rank(int rank) override;
  Decision on_announced(Connection& connection, const Frame& frame, Body* body);
  bool buffer_is_full(const PeerState& from, const Incoming& m) const;
  void check_collective_order(int from, const Incoming& m);
  bool has_stale_message(int from, Request& r);
  void resume(int rank);
  Body body_target(Connection& connection, Incoming& m, Interval range);
  void count_received(PeerState& state, const Frame& frame, LockHold& hold);
  void check_match(Incoming& m);
  RequestPtr take_receive(int peer, uint64_t tag);
  void complete_message(PeerState& state, uint64_t message, LockHold& hold);

  PeerState& peer_state(int rank) { return peer_states_[static_cast<size_t>(rank)]; }
  void abort_locked(const Error& error, const Connection* source);
  void send_abort(const ConnectionPtr& connection);
  Body abort_text_body(Connection& connection, size_t bytes);
  // Opens as many connections as a message of `bytes` is divided over. Returns false if the peer
  // cannot be reached.
  bool ensure_connections(int rank, size_t bytes = 0);
  void open_connection(int rank, bool same_host);
  void accept_arrivals();
  void send_stripes(PeerState& to, uint64_t message, const RequestPtr& request);
  void queue(const ConnectionPtr& connection, const Frame& frame, Body body = {});
  void flush_queued(LockHold& hold);
  ConnectionPtr shared_pointer_to(const Connection& connection) const {
    return connections_.at(connection.fd());
  }
  void update_polling(Connection& connection);
  void close_connection(Connection& connection);
  Error loss_reason(const Connection& connection) const;
  void mark_lost(int rank, const Error& error);
  void mark_lost_when_drained(int rank, const Error& error);
  void note_error(const Request& request, const Error& error);
  void note_error(const Error& error, Connection::Clock::time_point from);
  void check_drained_peers();
  void check_connections();
  bool any_peer_alive() const;
  void start_threads();
  void on_events(int fd, uint32_t events) override;
  void handle(const ConnectionPtr& connection, uint32_t events, LockHold& hold);
  void on_wake() override;
  void run_callbacks();
  void on_tick() override;
  void detach_from_device();
  void drop_everything();

  const std::shared_ptr<TcpDevice> device_;
  const pid_t process_;
  const std::chrono::milliseconds check_interval_;
  EventLoop::Id receiving_id_, sending_id_;  // in the device's loops
  uint64_t token_ = 0;
  TransportLock lock_;                  // guards all below
  std::vector<PeerState> peer_states_;  // by rank
  PendingReceives any_source_receives_;
  std::unordered_map<int, ConnectionPtr> connections_;  // by descriptor
  std::vector<ConnectionPtr> flush_list_;               // connections for flush_queued()
  uint64_t next_order_ = 0;
  // Questions to other ranks, which rank they wait for, in progress; the answer becomes the
  // request's `peer`.
  std::map<uint64_t, RequestPtr> questions_;
  std::unique_ptr<Error> failure_;
  std::unique_ptr<Error> error_;
  Connection::Clock::time_point error_from_;
  std::atomic<bool> has_error_{false};
  std::atomic<uint64_t> events_{0};
  bool threads_started_ = false, closed_ = false;
  Connection::Clock::time_point last_check_ = Connection::Clock::now();
  std::vector<std::function<void()>> callbacks_;  // of notify(), to be called without the lock
  std::unique_ptr<Error> reported_failure_;       // to be passed to abort_handler_ without the lock
};

}  // namespace fsccl
