// Tagged messages between any two ranks of a group, within a host and between hosts.
//
// Sends and receives complete in the background. Messages of one sender with one tag match receives
// in order. A message that nobody waits for yet is kept in memory when it is small or belongs to a
// collective (whose receiver is about to come); a large one waits at its sender until the receiver
// has called.
//
// Large messages are divided over several connections (TcpOptions::connections). The announcement
// travels on the first; a stripe that overtakes it waits.
//
// A connection that ends without a kBye means that the peer is lost: every request that needs it
// fails with an error that names it. What a peer had sent before it left is received all the same.
//
// The device's two threads look after the connections of all groups: one after those that peers
// opened, on which messages come, the other after those opened here. Who has queued something sends
// it, or begins to, before leaving (push_queued), unless somebody sends on that connection already
// or it waits for room; what stays is its thread's.
//
// One lock guards all but the copies of bodies (request.h). Why nothing goes wrong while a thread
// copies without it:
//  - On a connection one thread sends at a time (Connection::flush), and only its own thread
//    receives and closes it. Others may queue, or take the memory away (Connection::let_go), which
//    the copying thread sees before its next call; the connection itself lives as long as someone
//    has a pointer to it.
//  - A request does not finish while its memory is copied (request.h), and abort() and close() wait
//    until nobody copies any more. The kernel's copies wait for nobody, so neither do they.
//  - Only copies let the lock go: in push_queued() and finish(), and in a connection's flush() and
//    receive(). They come last in what calls them, or it looks at everything anew after them: all
//    frames of a message are queued before, so announcements go in the order of their numbers.
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

class TcpTransport final : public Transport, private ConnectionOwner, private EventLoop::Handler {
 public:
  // Above: the sender of a user's message asks first.
  static constexpr size_t kEagerBytes = 64 << 10;
  // Above: a message between hosts is divided over the connections.
  static constexpr size_t kStripeBytes = 256 << 10;

  explicit TcpTransport(std::shared_ptr<TcpDevice> device);
  ~TcpTransport() override;

  std::string address() const override;
  void meet(Peers peers) override;
  RequestPtr send(int peer, uint64_t tag, BufferList memory, const OpCard& card = {}) override;
  RequestPtr recv(int peer, uint64_t tag, BufferList memory, const OpCard& card = {}) override;
  void notify(const RequestPtr& request, std::function<void()> then) override;
  void throw_trouble() override;
  void listen() override;
  void touch(int rank) override;
  void abort(const Error& why) override;
  std::vector<Traffic> sent() override;
  uint64_t moved() const override { return moved_.load(std::memory_order_relaxed); }
  void close() override;

 private:
  using ConnectionPtr = std::shared_ptr<Connection>;
  struct Pair {
    std::vector<ConnectionPtr> out;
    Inbox inbox;
    Calls calls;
    std::map<uint64_t, RequestPtr> held;  // sends that wait for kClear
    uint64_t next_message = 0, sent_bytes = 0;
    uint64_t byes_expected = 0, closed_in = 0;
    uint64_t opened = 0;            // connections to it so far
    uint64_t called_in = 0;         // which connections it has opened: a bit each
    bool stalled = false;           // some of its connections may be
    std::unique_ptr<Error> ending;  // it will be gone once all that it has sent has come
    std::unique_ptr<Error> gone;
    bool said_bye = false;
  };

  Answer on_frame(Connection& connection, const Frame& frame, Body* into) override;
  void on_body(Connection& connection, const Frame& frame, Hold& hold) override;
  Answer on_stripe(Connection& connection, const Frame& frame, Body* into);
  void on_clear(Connection& connection, const Frame& frame);
  void on_ask(Connection& connection, const Frame& frame);
  void on_answer(const Frame& frame);
  RequestPtr ask(int rank) override;
  Answer on_announced(Connection& connection, const Frame& frame, Body* into);
  bool keeps_enough(const Pair& from, const Incoming& m) const;
  void compare_order(int from, const Incoming& m);
  bool left_over(int from, Request& r);
  void resume(int rank);
  Body target_of(Connection& connection, Incoming& m, Interval range);
  void received(Pair& pair, const Frame& frame, Hold& hold);
  void compare(Incoming& m);
  RequestPtr take_call(int peer, uint64_t tag);
  void finish(Pair& pair, uint64_t message, Hold& hold);

  Pair& pair(int rank) { return pairs_[static_cast<size_t>(rank)]; }
  void abort_locked(const Error& why, const Connection* told_by);
  void tell_failure(const ConnectionPtr& connection);
  Body room_for_words(Connection& connection, size_t bytes);
  // Sees to it that there are connections enough for a message of so many bytes.
  bool connect(int rank, size_t bytes = 0);
  void open(int rank, bool near);
  void take_arrivals();
  void send_stripes(Pair& to, uint64_t message, const RequestPtr& request);
  void queue(const ConnectionPtr& connection, const Frame& frame, Body body = {});
  void push_queued(Hold& hold);
  ConnectionPtr pointer_to(const Connection& connection) const {
    return connections_.at(connection.fd());
  }
  void poll_for(Connection& connection);
  void close_connection(Connection& connection);
  Error why_it_ended(const Connection& connection) const;
  void lost(int rank, const Error& why);
  void lost_soon(int rank, const Error& why);
  void note_trouble(const Request& request, const Error& why);
  void note_trouble(const Error& why, Connection::Clock::time_point from);
  void look_for_ends();
  void look_around();
  bool anybody_left() const;
  void start_threads();
  void on_events(int fd, uint32_t events) override;
  void handle(const ConnectionPtr& connection, uint32_t events, Hold& hold);
  void on_poke() override;
  void tell();
  void on_tick() override;
  void leave_loops();
  void forget_all();

  const std::shared_ptr<TcpDevice> device_;
  const pid_t process_;
  const std::chrono::milliseconds look_every_;
  EventLoop::Id receives_, sends_;  // in the device's loops
  uint64_t token_ = 0;
  Guard guard_;              // of all below
  std::vector<Pair> pairs_;  // one a peer
  Calls any_;
  std::unordered_map<int, ConnectionPtr> connections_;  // by descriptor
  std::vector<ConnectionPtr> queued_;                   // what push_queued() is to look at
  uint64_t next_order_ = 0;
  std::map<uint64_t, RequestPtr> asked_;  // questions under way; an answer becomes their peer
  std::unique_ptr<Error> failed_;
  std::unique_ptr<Error> trouble_;
  Connection::Clock::time_point trouble_from_;
  std::atomic<bool> troubled_{false};
  std::atomic<uint64_t> moved_{0};
  bool started_ = false, closed_ = false;
  Connection::Clock::time_point looked_ = Connection::Clock::now();
  std::vector<std::function<void()>> ready_;  // notify()'s, to be called outside the lock
  std::unique_ptr<Error> heard_;              // to hand to aborted_ outside the lock
};

}  // namespace fsccl
