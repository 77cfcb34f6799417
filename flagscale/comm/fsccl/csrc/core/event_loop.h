// A thread that waits for descriptors to be ready, for whoever handles them: one for all groups of
// a process, and not one a group. Handlers are called one after the other, and must not block; what
// they find to do they do in turns, so that none keeps the thread from the others.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

namespace fsccl {

class EventLoop {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_events(int /*fd*/, uint32_t /*events*/) {}
    virtual void on_poke() {}
    virtual void on_tick() {}  // every kTick
  };
  // Names a handler, in the loop that it has been added to; 0 names none.
  using Id = uint32_t;

  static constexpr std::chrono::milliseconds kTick{250};

  // The thread starts with start(), and ends with the loop.
  EventLoop(const char* thread_name, bool ticks);
  EventLoop(const EventLoop&) = delete;
  ~EventLoop();

  // Throws Error(kSystem) when there is no thread to be had. Any thread may call what is here.
  void start();
  Id add(Handler* handler);
  // Afterwards the handler is not called any more. Waits until a call that goes on has returned,
  // unless it is this very thread that is in it.
  void remove(Id id);
  // What to wait for at a descriptor, in place of `before`; 0 is nothing.
  void set(Id id, int fd, uint32_t before, uint32_t events);
  // Has the thread call on_poke(), soon.
  void poke(Id id);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace fsccl
