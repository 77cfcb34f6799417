// Carries the messages of pipes between ranks that share no memory.
//
// One thread an engine, started by the first message. Whoever puts or takes says so at once, with
// the size; the courier then follows the ring's words, which a device may set: it sends a slot once
// it is posted, and has a message received into a slot once that is free. What a device sets
// nobody can sleep on, so while something is under way the thread looks a few ten thousand times a
// second; else it sleeps.
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

class Courier {
 public:
  // `failed` is told, on the courier's thread, what went wrong with a message.
  Courier(Group& group, std::function<void(const Error&)> failed);
  ~Courier();

  // Of the operation of which all messages are from now on.
  void begin(const OpCard& card);
  void send(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
  void receive(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
  // Whether everything sent has left within `limit`.
  bool flush(std::chrono::milliseconds limit);

 private:
  struct Job {
    uint32_t n;
    size_t bytes;
    OpCard card;
    RequestPtr request;  // null until it is under way
  };
  struct Way {
    int peer;
    bool sends;
    std::shared_ptr<Ring> ring;
    std::deque<Job> jobs;
  };

  // Above those of users' messages, below those of the core's collectives.
  static constexpr uint64_t kPipeTag = uint64_t{1} << 62;

  void add(int peer, bool sends, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes);
  void run();
  bool advance(Way& way);  // whether anything happened
  bool start_next(Way& way);
  bool idle() const;

  Group& group_;
  std::function<void(const Error&)> failed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  OpCard card_;
  std::map<std::pair<int, bool>, Way> ways_;
  std::thread thread_;
  bool stop_ = false, broken_ = false;
};

}  // namespace fsccl
