// Tagged messages between any two ranks of a group, within a host and between hosts.
//
// Sends and receives complete in the background, on one thread that sleeps in epoll; it is started
// by the first of them. Messages of one sender with one tag match receives in order. A message that
// nobody waits for yet is kept in memory when it is small or belongs to a collective (whose
// receiver is about to come); a large one waits at its sender until the receiver has called.
//
// Large messages are divided over several connections (TcpOptions::connections). The announcement
// travels on the first; a stripe that overtakes it waits.
//
// A connection that ends without a kBye means that the peer is lost: every request that needs it
// fails with an error that names it.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "link.h"

namespace fsccl {

struct MessengerConfig {
  int rank = 0;
  uint64_t token = 0;                  // tells this group's connections from others'
  std::vector<std::string> addresses;  // of every rank
  std::vector<std::string> names;      // of every rank, for messages
  TcpOptions tcp;
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

  // The memory must stay valid until the request has finished. A message whose digest is not the
  // receiver's fails it.
  RequestPtr send(int peer, uint64_t tag, Pieces memory, uint32_t digest = 0);
  RequestPtr recv(int peer, uint64_t tag, Pieces memory, uint32_t digest = 0);
  // Throws the request's error; kTimeout names the peer. `watch` is called ten times a second.
  void wait(const RequestPtr& request, const Deadline& deadline,
            const std::function<void()>& watch);

  // Answers from now on, also before this rank sends or receives anything.
  void listen();
  // Asks a rank whom it waits for, and that one, and so on: the first of them that waits for nobody
  // or does not answer before the deadline. Throws what `watch` throws.
  int trace(int rank, const Deadline& deadline, const std::function<void()>& watch);
  // How this rank answers; called by the progress thread.
  void on_ask(std::function<int()> answer) { answer_ = std::move(answer); }

  // Calls `then` once the request has finished: now, or later from the progress thread.
  void notify(const RequestPtr& request, std::function<void()> then);

  // Fails everything under way and all that comes later, and tells every connected peer.
  // Afterwards no memory of any request is touched any more.
  void abort(const Error& why);
  // Called, once, from the progress thread when a peer reports that the group failed.
  void on_abort(std::function<void(const Error&)> handler) { aborted_ = std::move(handler); }
  // Leaves in good order: flushes, says bye, ends the thread.
  void close();

 private:
  // A message that has been announced.
  struct Incoming {
    uint64_t message, tag, total;
    uint64_t received = 0;
    uint32_t digest = 0;
    bool asks = false;
    Link* link = nullptr;  // where it was announced
    RequestPtr request;    // null until a receive matches
    std::vector<std::byte> kept;
    bool keeps = false;          // the body goes to `kept`
    std::unique_ptr<Error> bad;  // not what is expected: swallow the body, then fail
  };
  struct Posted {
    uint64_t order;
    RequestPtr request;
  };
  struct Peer {
    std::vector<Link*> out;
    std::list<Incoming> incoming;
    std::list<Posted> posted;
    std::map<uint64_t, RequestPtr> held;  // sends that wait for kClear
    uint64_t next_message = 0;
    uint64_t byes_expected = 0, closed_in = 0;
    std::unique_ptr<Error> gone;
  };

  Answer on_frame(Link& link, const Frame& frame, Pieces* into) override;
  void on_body(Link& link, const Frame& frame) override;
  Answer on_stripe(Link& link, const Frame& frame, Pieces* into);
  void on_hello(Link& link, const Frame& frame);
  void on_clear(Link& link, const Frame& frame);
  void on_ask(Link& link, const Frame& frame);
  void on_answer(const Frame& frame);
  RequestPtr ask(int rank);
  void on_announced(Link& link, const Frame& frame, Pieces* into);
  Pieces target_of(Incoming& m, Interval range);
  void received(Peer& peer, uint64_t message, uint64_t bytes);
  void match(Incoming& m, RequestPtr request);
  RequestPtr take_posted(int peer, uint64_t tag);
  void finish(Peer& peer, std::list<Incoming>::iterator m);

  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  const std::string& name(int rank) const { return config_.names[static_cast<size_t>(rank)]; }
  void abort_locked(const Error& why, const Link* told_by);
  bool connect(int rank);
  void accept_all();
  void send_stripes(Peer& to, uint64_t message, const RequestPtr& request);
  void push(Link& link);
  void poll_for(Link& link);
  void close_link(Link& link);
  void lost(int rank, const Error& why);
  void ensure_started();
  void run();
  void handle(Link& link, uint32_t events);
  void stop_thread();
  void wake();
  void call_ready();
  void forget_all();

  MessengerConfig config_;
  std::vector<Fd> listeners_;
  Fd epoll_, wake_;
  std::thread thread_;
  std::mutex mutex_;  // guards all below
  std::vector<Peer> peers_;
  std::list<Posted> any_;
  std::unordered_map<int, std::unique_ptr<Link>> links_;  // by descriptor
  uint64_t next_order_ = 0;
  std::map<uint64_t, RequestPtr> asked_;  // questions under way; an answer becomes their peer
  std::function<int()> answer_;
  std::unique_ptr<Error> failed_;
  bool stop_ = false, closed_ = false;
  std::function<void(const Error&)> aborted_;
  std::vector<std::function<void()>> ready_;  // notify()'s, to be called outside the lock
  std::unique_ptr<Error> heard_;              // to hand to aborted_ outside the lock
};

}  // namespace fsccl
