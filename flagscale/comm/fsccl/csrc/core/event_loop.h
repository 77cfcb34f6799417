// Event loop: a thread that waits for descriptors and calls the handlers they belong to. All groups
// of a process share it. Handlers are called one at a time and must not block. A handler that has
// much to do does it in turns, so that the others get theirs.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

namespace fsccl {

// The loop and its thread. Handlers are not owned.
class EventLoop {
  // Callbacks run on the thread of the loop.
 public:
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
  EventLoop(const char* thread_name, bool with_ticks);
  EventLoop(const EventLoop&) = delete;
  ~EventLoop();

  // Starts the thread, once. Throws Error(kSystem) if there is no thread to be had. Any thread may
  // call this and all functions below.
  void start();
  Id add(Handler* handler);
  // Removes a handler. It is not called any more once this returns: waits for a call in progress,
  // unless the calling thread is in it.
  void remove(Id id);
  // Sets the epoll events of a descriptor, `previous` being those set before; 0 is none.
  void set(Id id, int fd, uint32_t previous, uint32_t events);
  // Makes the thread call on_wake() soon.
  void wake(Id id);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace fsccl
