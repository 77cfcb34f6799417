// A session (session.h) in the world: a socket, a clock, a thread, and the group's transport for
// what must arrive. The thread answers peers while this rank computes.
//
// Each pair of ranks has a receive open for words (Notice) all the time, and one for a record where it
// has asked for one. Both are messages of the group's transport, with tags of their own.
#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "../core/transport.h"
#include "session.h"
#include "socket.h"

namespace fsccl::datagram {

struct Counters {
  Dropped dropped;
  uint64_t sent_bytes = 0, kernel_drops = 0, refused = 0;
};

class Endpoint final : private Network {
 public:
  // `members`: the group ranks of the circle. Throws Error(kSystem) when there is no thread.
  Endpoint(const Circle& circle, std::vector<int> members, std::unique_ptr<Socket> socket,
           size_t payload, Transport& transport);
  ~Endpoint() override;

  // Blocks until the operation is done. `watch` is called ten times a second with the group rank
  // that is waited for, or -1, and throws to end it, for good. Throws Error when a rank has gone or
  // has called another operation.
  const Outcome& run(const Job& job, const std::function<void(int)>& watch);
  // Of the last one.
  const std::byte* result() { return session_.result(); }
  const Layout& layout() const { return session_.layout(); }
  Counters counters();
  // All datagrams to each rank of the group that is of the circle, with their headers.
  std::map<int, Transport::Traffic> sent();
  // Tells who has yet to be done what is needed for that, and ends the thread. Before the transport
  // closes.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;
  struct Post {  // a message under way, and its memory
    RequestPtr request;
    std::shared_ptr<std::vector<std::byte>> memory;
  };
  struct Peer {
    Post notice, record;
    std::optional<Error> gone;
    Transport::Traffic sent;  // by datagrams
  };

  static constexpr uint64_t kNoticeTag = uint64_t{1} << 62 | 1, kRecordTag = uint64_t{1} << 62 | 2;

  static Time now() { return Clock::now().time_since_epoch(); }
  std::byte* place(size_t most) override { return socket_->place(most); }
  void send(int to, size_t bytes) override;
  uint32_t overruns() const override { return socket_->kernel_drops(); }
  void tell(int to, const Notice& notice) override;
  void tell_record(int to, const std::vector<std::byte>& record) override;
  void work();
  void take_messages();
  void look_for_gone();
  Post receive(int from, uint64_t tag, size_t bytes);
  void post(int to, uint64_t tag, const void* data, size_t bytes);
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }

  const Circle circle_;
  const std::vector<int> members_;
  Transport& transport_;
  std::unique_ptr<Socket> socket_;
  std::shared_ptr<Fd> wake_;
  std::mutex mutex_;  // of all below
  std::condition_variable done_;
  Session session_;
  std::vector<Peer> peers_;
  std::list<Post> sends_;
  std::optional<Error> trouble_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace fsccl::datagram
