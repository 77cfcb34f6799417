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
// Two threads, started by the first message, sleep in poll sets of their own: one has the
// connections that peers opened, on which messages come, the other those opened here. Who has
// queued something sends it, or begins to, before leaving (push_queued), unless somebody sends on
// that connection already or it waits for room; what stays is its thread's.
//
// One lock guards all but the copies of bodies (request.h). Why nothing goes wrong while a thread
// copies without it:
//  - On a connection one thread sends at a time (Link::flush), and only its own thread receives and
//    closes it. Others may queue, or take the memory away (Link::let_go), which the copying thread
//    sees before its next call; the connection itself lives as long as someone has a pointer to it.
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
#include <thread>
#include <unordered_map>
#include <vector>

#include "inbox.h"
#include "link.h"

namespace fsccl {

struct MessengerConfig {
  int rank = 0;
  uint64_t token = 0;                  // tells this group's connections from others'
  std::vector<std::string> addresses;  // of every rank
  std::vector<std::string> names;      // of every rank, for messages
  TcpOptions tcp;
  // Of messages of a peer's that nobody waits for. Above, it waits until somebody waits for one.
  size_t kept_bytes = 256 << 20;
  // How long who connects may take to say who it is.
  std::chrono::milliseconds hello_time{3000};
};

class Messenger : private LinkOwner {
 public:
  static constexpr int kAnySource = -1;
  static constexpr uint64_t kCollectiveTag = uint64_t{1} << 63;
  // Above: the sender of a user's message asks first.
  static constexpr size_t kEagerBytes = 64 << 10;
  // Above: a message between hosts is divided over the connections.
  static constexpr size_t kStripeBytes = 256 << 10;

  Messenger(MessengerConfig config, std::vector<Fd> listeners);
  ~Messenger() override;

  // The memory must stay valid until the request has finished. A message whose card is not the
  // receiver's fails it; so does one of another collective, where one of a collective is awaited:
  // they come in order.
  RequestPtr send(int peer, uint64_t tag, Pieces memory, const OpCard& card = {});
  RequestPtr recv(int peer, uint64_t tag, Pieces memory, const OpCard& card = {});
  // Throws the request's error; kTimeout names the peer. `watch` is called ten times a second.
  void wait(const RequestPtr& request, const Deadline& deadline,
            const std::function<void()>& watch);

  // For who waits in a collective: throws why a message of a collective's cannot go or come any
  // more, if one cannot, or, a moment later, that a peer has ended without a word, which may have
  // done its part. Whoever waits for another message would learn it too late.
  void throw_trouble();

  // Answers from now on, also before this rank sends or receives anything.
  void listen();
  // As listen(), and connects to a rank, which then hears of a failure here, as this one of its.
  void touch(int rank);
  // Asks a rank whom it waits for, and that one, and so on: the first of them that waits for nobody
  // or does not answer before the deadline. Throws what `watch` throws.
  int trace(int rank, const Deadline& deadline, const std::function<void()>& watch);
  // How this rank answers; called by a thread of the messenger's that has the lock.
  void on_ask(std::function<int()> answer) { answer_ = std::move(answer); }

  // Calls `then` once the request has finished: now, or later from one thread of the messenger's.
  void notify(const RequestPtr& request, std::function<void()> then);

  // Fails everything under way and all that comes later, and tells every peer that is connected or
  // connects later. Afterwards no memory of any request is touched any more.
  void abort(const Error& why);
  // Called, once, from a thread of the messenger's when a peer reports that the group failed.
  void on_abort(std::function<void(const Error&)> handler) { aborted_ = std::move(handler); }
  // How often something has gone or come. Any thread may call.
  uint64_t moved() const { return moved_.load(std::memory_order_relaxed); }
  // Leaves in good order: flushes, says bye, ends the threads.
  void close();

 private:
  using LinkPtr = std::shared_ptr<Link>;
  static constexpr const char* kReceiverName = "fsccl-messages";
  // A thread and what it sleeps in.
  struct Loop {
    Loop();
    void wake() const;
    Fd epoll, bell;
    std::thread thread;
  };
  struct Peer {
    std::vector<LinkPtr> out;
    Inbox inbox;
    Calls calls;
    std::map<uint64_t, RequestPtr> held;  // sends that wait for kClear
    uint64_t next_message = 0;
    uint64_t byes_expected = 0, closed_in = 0;
    bool stalled = false;           // some of its connections may be
    std::unique_ptr<Error> ending;  // it will be gone once all that it has sent has come
    std::unique_ptr<Error> gone;
    bool said_bye = false;
  };

  Answer on_frame(Link& link, const Frame& frame, Body* into) override;
  void on_body(Link& link, const Frame& frame, Hold& hold) override;
  Answer on_stripe(Link& link, const Frame& frame, Body* into);
  bool known(const Frame& hello) const;
  void on_hello(Link& link, const Frame& frame);
  void on_clear(Link& link, const Frame& frame);
  void on_ask(Link& link, const Frame& frame);
  void on_answer(const Frame& frame);
  RequestPtr ask(int rank);
  Answer on_announced(Link& link, const Frame& frame, Body* into);
  bool keeps_enough(const Peer& from, const Incoming& m) const;
  void compare_order(int from, const Incoming& m);
  bool left_over(int from, Request& r);
  void resume(int rank);
  Body target_of(Link& link, Incoming& m, Interval range);
  void received(Peer& peer, const Frame& frame, Hold& hold);
  void compare(Incoming& m);
  RequestPtr take_call(int peer, uint64_t tag);
  void finish(Peer& peer, uint64_t message, Hold& hold);

  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  const std::string& name(int rank) const { return config_.names[static_cast<size_t>(rank)]; }
  void abort_locked(const Error& why, const Link* told_by);
  void tell_failure(const LinkPtr& link);
  Body room_for_words(Link& link, size_t bytes);
  bool connect(int rank);
  void watch_listeners(int op);
  void accept_all();
  void send_stripes(Peer& to, uint64_t message, const RequestPtr& request);
  void queue(const LinkPtr& link, const Frame& frame, Body body = {});
  void push_queued(Hold& hold);
  LinkPtr pointer_to(const Link& link) const { return links_.at(link.fd()); }
  void poll_for(Link& link);
  void close_link(Link& link);
  Error why_it_ended(const Link& link) const;
  void lost(int rank, const Error& why);
  void lost_soon(int rank, const Error& why);
  void note_trouble(const Request& request, const Error& why);
  void note_trouble(const Error& why, Link::Clock::time_point from);
  void look_for_ends();
  void look_around();
  bool anybody_left() const;
  Loop& loop_of(const Link& link) { return link.opened_here() ? opened_here_ : opened_by_peers_; }
  void ensure_started(Loop& loop, const char* name);
  void run(Loop& loop);
  void handle(const LinkPtr& link, uint32_t events, Hold& hold);
  void stop_threads();
  void call_ready();
  void forget_all();

  MessengerConfig config_;
  const pid_t process_;
  const std::chrono::milliseconds look_every_;
  std::vector<Fd> listeners_;
  Loop opened_by_peers_, opened_here_;
  Guard guard_;  // of all below
  std::vector<Peer> peers_;
  Calls any_;
  std::unordered_map<int, LinkPtr> links_;  // by descriptor
  std::vector<LinkPtr> queued_;              // what push_queued() is to look at
  uint64_t next_order_ = 0;
  std::map<uint64_t, RequestPtr> asked_;  // questions under way; an answer becomes their peer
  std::function<int()> answer_;
  std::unique_ptr<Error> failed_;
  std::unique_ptr<Error> trouble_;
  Link::Clock::time_point trouble_from_;
  std::atomic<bool> troubled_{false};
  std::atomic<uint64_t> moved_{0};
  bool stop_ = false, closed_ = false;
  bool deaf_ = false;  // no descriptor was left to accept a connection with
  std::function<void(const Error&)> aborted_;
  std::vector<std::function<void()>> ready_;  // notify()'s, to be called outside the lock
  std::unique_ptr<Error> heard_;              // to hand to aborted_ outside the lock
};

}  // namespace fsccl
