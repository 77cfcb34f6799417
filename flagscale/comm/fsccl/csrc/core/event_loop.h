// Event loop: a thread that waits for file descriptors with epoll and calls their handlers. All
// groups of a process share it. Handlers are called one at a time and must not block. A handler
// with a lot of work returns after a limited amount, and is called again for the rest, so that the
// others are not delayed.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

namespace fsccl {

// The loop and its thread. Handlers are not owned.
class EventLoop {
 public:
  // Callbacks, which run on the thread of the loop.
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_events(int /*fd*/, uint32_t /*events*/) {}
    virtual void on_wake() {}
    virtual void on_tick() {}  // every kTick
  };
  // Number of a handler in the loop it was added to; 0 is none.
  using Id = uint32_t;

  static constexpr std::chrono::milliseconds kTick{250};

  // start() starts the thread, which ends with the loop. `with_ticks`: whether handlers get
  // on_tick().
  EventLoop(const char* thread_name, bool with_ticks);  // `thread_name`: at most 15 characters
  EventLoop(const EventLoop&) = delete;
  ~EventLoop();

  // Starts the thread if it is not running. Throws Error(kSystem) if the thread cannot be created.
  // Any thread may call this and all functions below.
  void start();
  Id add(Handler* handler);
  // Removes a handler. Waits for a call of the handler in progress, unless that call is the caller.
  // Afterwards the handler is not called any more.
  void remove(Id id);
  // Sets the epoll events of a descriptor. `previous` are the events set before; 0 is none.
  void set(Id id, int fd, uint32_t previous, uint32_t events);
  // Makes the thread call on_wake() soon.
  void wake(Id id);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace fsccl
