// Proxy thread: sends and receives the messages of pipes (pipe.h) between ranks that share no
// memory.
//
// One thread per device engine, started by the first message. A pipe submits each message with its
// size when the operation is enqueued. The thread then polls the ring's words, which a device may
// write: it sends a slot once that is posted, and receives a message into a slot once that is free.
// A thread cannot sleep until a device writes a word, so while messages are in flight it polls a
// few ten thousand times a second; else it sleeps.
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
  // on_error(error) is called on the proxy thread when a message fails; later messages are not
  // sent.
  ProxyThread(Group& group, std::function<void(const Error&)> on_error);
  ~ProxyThread();

  // Sets the operation to which messages submitted from now on belong.
  void begin(const CollectiveFingerprint& fingerprint);
  // Submits message n of the pipe to or from `peer`.
  void send(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
  void receive(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
  // Waits until all submitted messages have been sent or received. Returns false if they have not
  // within `timeout`.
  bool flush(std::chrono::milliseconds timeout);

 private:
  struct PendingMessage {
    uint32_t n;
    size_t bytes;
    CollectiveFingerprint fingerprint;
    RequestPtr request;  // null until the message is handed to the transport
  };
  // Messages to one peer, or from it.
  struct PipeQueue {
    int peer;
    bool sends;
    std::shared_ptr<Ring> ring;
    std::deque<PendingMessage> messages;
  };

  // Above the tags of users' messages, below those of the core's collectives.
  static constexpr uint64_t kPipeTag = uint64_t{1} << 62;

  void submit(int peer, bool sends, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
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
