// Transport over TCP and Unix sockets: tagged messages between any two ranks of a group, within a
// host and between hosts. The frames (kAnnounce, kBye, ...) are described in connection.h.
//
// Sends and receives complete in the background. Messages of one sender with one tag match receives
// in order. As in MPI, there is an eager and a rendezvous protocol. Messages of collectives and
// messages of up to kEagerBytes are sent at once, and buffered if no receive matches yet. Of a
// larger message, only an announcement (a kAnnounce frame with its size and tag) is sent; the body
// follows when the receiver has posted the receive and sent kClearToSend.
//
// A message between hosts larger than kStripeBytes is striped: it is divided into contiguous parts
// (stripes), one per connection (TcpOptions::connections), which follow an announcement on the
// first connection. A stripe that arrives before its announcement stays unread.
//
// If a connection ends without a kBye frame, the peer is lost: every request that needs it fails
// with an error that names the peer. Data that a peer sent before it left is still received.
//
// Connections carry messages in one direction. Two threads of the device serve those of all groups:
// one receives on connections that peers opened, the other sends on connections opened here. A
// thread that queues a frame sends it, or begins to, before it returns (flush_queued), unless
// another thread is sending on that connection or the connection waits for room. The thread of the
// connection sends the rest.
//
// One lock guards everything except copies of message bodies (request.h). Copying without the lock
// is safe because:
//
// - On a connection, one thread sends at a time (Connection::flush), and only the device's thread
//   for the connection receives and closes it. Other threads may queue frames, or revoke the memory
//   of requests (Connection::release_requests), which the copying thread checks before its next
//   system call. The connection is reference-counted.
// - A request does not finish while its memory is copied (request.h), and abort() and close() wait
//   until no copy is in progress. Copies are system calls that never block, so those waits are
//   short.
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
  // Above this size, the sender of a message outside collectives waits for kClearToSend.
  static constexpr size_t kEagerBytes = 64 << 10;
  // Above this size, a message between hosts is striped.
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
  std::optional<Error> loss_of(int rank) override;
  bool awaits_silent_peer() override;
  ProcessState probe_process(int rank, const Deadline& deadline) override;
  void abort(const Error& error) override;
  std::vector<Traffic> sent_traffic() override;
  uint64_t progress_count() const override { return event_count_.load(std::memory_order_relaxed); }
  void close() override;

 private:
  using ConnectionPtr = std::shared_ptr<Connection>;
  // State of one peer.
  struct PeerState {
    std::vector<ConnectionPtr> out;  // connections opened here, on which this rank sends
    Inbox inbox;
    PendingReceives receives;
    std::map<uint64_t, RequestPtr> awaiting_clear_to_send;  // sends that wait for kClearToSend
    uint64_t next_message_number = 0, sent_bytes = 0;       // of messages to it
    // Connections that it has opened: their number, known from its kBye, and how many have ended.
    uint64_t expected_incoming_connections = 0, closed_incoming_connections = 0;
    uint64_t connections_opened = 0;  // number of connections to it so far
    uint64_t accepted_mask = 0;       // indices of the connections that it has opened, one bit each
    bool has_stalled = false;         // some of its connections may be stalled
    // `loss_error` is set once it is lost, and fails all requests that need it. If data that it has
    // sent may still arrive, `deferred_loss_error` is set first.
    std::unique_ptr<Error> deferred_loss_error;
    std::unique_ptr<Error> loss_error;
    bool received_bye = false;  // it has left in an orderly way
  };

  Decision on_frame(Connection& connection, const Frame& frame, Body* body) override;
  void on_body(Connection& connection, const Frame& frame, LockHold& hold) override;
  Decision on_stripe(Connection& connection, const Frame& frame, Body* body);
  void on_clear_to_send(Connection& connection, const Frame& frame);
  void on_bye(Connection& connection, const Frame& frame);
  void answer_wait_query(Connection& connection, const Frame& frame);
  void on_wait_reply(const Frame& frame);
  RequestPtr query_awaited_rank(int rank) override;
  Decision on_new_message(Connection& connection, const Frame& frame, Body* body);
  bool buffer_is_full(const PeerState& from, const IncomingMessage& m) const;
  void check_collective_order(int from, const IncomingMessage& m);
  bool has_stale_message(int from, Request& r);
  void resume_connections(int rank);
  Body body_target(Connection& connection, IncomingMessage& m, Interval range);
  void count_received(PeerState& state, const Frame& frame, LockHold& hold);
  void check_matched_receive(IncomingMessage& m);
  RequestPtr take_matching_receive(int peer, uint64_t tag);
  void complete_message(PeerState& state, uint64_t message, LockHold& hold);

  PeerState& peer_state(int rank) { return peer_states_[static_cast<size_t>(rank)]; }
  void abort_locked(const Error& error, const Connection* source);
  void send_abort(const ConnectionPtr& connection);
  void send_bye(const ConnectionPtr& connection);
  Body abort_text_body(Connection& connection, size_t bytes);
  // Opens as many connections as a message of `bytes` bytes is striped over. Returns false if the
  // peer cannot be reached.
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
  Error describe_loss(const Connection& connection) const;
  void mark_lost(int rank, const Error& error);
  void mark_lost_when_drained(int rank, const Error& error);
  void note_transport_error(const Request& request, const Error& error);
  void note_transport_error(const Error& error, Connection::Clock::time_point effective_time);
  void check_drained_peers();
  void check_connections();
  void check_accepting();
  bool any_peer_alive() const;
  void start_threads();
  void on_events(int fd, uint32_t events) override;
  void handle_connection_events(const ConnectionPtr& connection, uint32_t events, LockHold& hold);
  bool receive_from(const ConnectionPtr& connection, LockHold& hold);
  void on_wake() override;
  void run_callbacks();
  void on_tick() override;
  void detach_from_device();
  void drop_everything();

  const std::shared_ptr<TcpDevice> device_;
  const pid_t owner_pid_;
  const std::chrono::milliseconds check_interval_;
  EventLoop::Id receiving_id_, sending_id_;  // in the device's loops
  uint64_t token_ = 0;                       // identifies this endpoint in hello frames
  TransportLock lock_;                       // guards all below
  std::vector<PeerState> peer_states_;       // by rank
  PendingReceives any_source_receives_;
  std::unordered_map<int, ConnectionPtr> connections_;  // by descriptor
  std::vector<ConnectionPtr> connections_to_flush_;     // connections for flush_queued()
  uint64_t next_receive_number_ = 0;                    // also the number of the next wait query
  // Wait queries (find_straggler) without a reply, by number.
  std::map<uint64_t, RequestPtr> pending_wait_queries_;
  // Error of an abort by this rank or by a peer, or of close(). All requests fail with it from then
  // on.
  std::unique_ptr<Error> abort_error_;
  // Copy of `abort_error_` that the abort handler has yet to be called with, without the lock. Set
  // only if this rank has not called abort() itself.
  std::unique_ptr<Error> unreported_abort_error_;
  // First error that prevents a message of a collective. From `transport_error_time_` on,
  // raise_transport_error() throws it; the transport itself continues.
  std::unique_ptr<Error> transport_error_;
  Connection::Clock::time_point transport_error_time_;
  std::atomic<bool> has_transport_error_{false};
  std::atomic<uint64_t> event_count_{0};  // for progress_count()
  bool threads_started_ = false, closed_ = false;
  Connection::Clock::time_point last_check_ = Connection::Clock::now();
  std::vector<std::function<void()>> callbacks_;  // of notify(), to be called without the lock
};

}  // namespace fsccl
