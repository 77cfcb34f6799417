// Proxy thread: carries the messages of pipes between ranks that share no memory.
//
// One thread per engine, started by the first message. A pipe announces each message as soon as it
// is sent or received, with its size. The thread then polls the ring's words, which a device may
// write: it sends a slot once that is posted, and has a message received into a slot once that is
// free. A thread cannot sleep until a device writes a word, so while messages are in flight it
// polls a few ten thousand times a second; else it sleeps.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "../core/group.h"

namespace fsccl {

class Ring;

class ProxyThread {
 public:
  // on_error(error) is called on the thread when a message fails; no message moves after that.
  ProxyThread(Group& group, std::function<void(const Error&)> on_error);
  ~ProxyThread();

  // Messages announced from now on are of this operation.
  void begin(const CollectiveFingerprint& fingerprint);
  // Announces message n of the pipe.
  void send(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
  void receive(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
  // Waits until everything sent has left; false if it has not within `timeout`.
  bool flush(std::chrono::milliseconds timeout);

 private:
  struct PendingMessage {
    uint32_t n;
    size_t bytes;
    CollectiveFingerprint fingerprint;
    RequestPtr request;  // null until the transport moves it
  };
  // One direction of the traffic with a peer.
  struct PipeQueue {
    int peer;
    bool sends;
    std::shared_ptr<Ring> ring;
    std::deque<PendingMessage> messages;
  };

  // Above the tags of users' messages, below those of the core's collectives.
  static constexpr uint64_t kPipeTag = uint64_t{1} << 62;

  void announce(int peer, bool sends, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
  void run();
  bool advance(PipeQueue& queue);
  bool start_next(PipeQueue& queue);
  bool idle() const;

  Group& group_;
  std::function<void(const Error&)> on_error_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  CollectiveFingerprint fingerprint_;
  std::map<std::pair<int, bool>, PipeQueue> queues_;  // by peer and `sends`
  std::thread thread_;
  bool stop_ = false, failed_ = false;
};

}  // namespace fsccl
