#include "event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "socket.h"
#include "thread.h"
#include "types.h"

namespace fsccl {
namespace {

// Packs the handler and descriptor into epoll's user data. The wake-up eventfd has handler 0.
uint64_t epoll_data(uint32_t id, int fd) {
  return static_cast<uint64_t>(id) << 32 | static_cast<uint32_t>(fd);
}

}  // namespace

// State that the thread shares with the loop object, which may be destroyed first.
struct EventLoop::State {
  State(const char* thread_name, bool with_ticks)
      : name(thread_name),
        with_ticks(with_ticks),
        epoll(epoll_create1(EPOLL_CLOEXEC)),
        wake_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (epoll.get() < 0 || wake_fd.get() < 0) fail_system("cannot make a poll set");
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u64 = epoll_data(0, wake_fd.get());
    epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake_fd.get(), &e);
  }

  void signal_wake() const {
    const uint64_t increment = 1;
    // Fails with EAGAIN if the counter is full, which means that it is signalled already.
    [[maybe_unused]] const ssize_t n = write(wake_fd.get(), &increment, sizeof increment);
  }
  void clear_wake() const {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = read(wake_fd.get(), &count, sizeof count);
  }
  // Calls f(handler) without the lock, unless the handler has been removed.
  template <class F>
  void call_handler(std::unique_lock<std::mutex>& lock, Id id, F&& f) {
    const auto entry = handlers.find(id);
    if (entry == handlers.end()) return;
    Handler* const handler = entry->second;
    running = id;
    lock.unlock();
    f(*handler);
    lock.lock();
    running = 0;
    if (remove_waiters) call_returned.notify_all();
  }
  void tick(std::unique_lock<std::mutex>& lock) {
    const auto now = std::chrono::steady_clock::now();
    if (!with_ticks || now - last_tick < kTick) return;
    last_tick = now;
    std::vector<Id> ids;
    for (const auto& [id, handler] : handlers) ids.push_back(id);
    for (const Id id : ids) call_handler(lock, id, [](Handler& h) { h.on_tick(); });
  }

  const char* const name;
  const bool with_ticks;
  const Fd epoll, wake_fd;
  std::mutex mutex;  // guards all below
  std::condition_variable call_returned;
  std::map<Id, Handler*> handlers;
  std::vector<Id> woken;  // handlers whose on_wake() is to be called
  std::chrono::steady_clock::time_point last_tick = std::chrono::steady_clock::now();
  std::thread thread;
  Id last_id = 0, running = 0;  // the last one that was added; the one that is being called, or 0
  size_t remove_waiters = 0;    // threads in remove()
  bool stop_requested = false;
};

EventLoop::EventLoop(const char* thread_name, bool with_ticks)
    : state_(std::make_shared<State>(thread_name, with_ticks)) {}

EventLoop::~EventLoop() {
  std::thread thread;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop_requested = true;
    thread.swap(state_->thread);
  }
  state_->signal_wake();
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

void EventLoop::start() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->thread.joinable()) return;
  try {
    state_->thread = std::thread([state = state_] {
      set_up_thread(state->name);
      run(state);
    });
  } catch (const std::system_error& e) {
    throw Error(Fault::kSystem, -1, std::string("cannot start a thread: ") + e.what());
  }
}

EventLoop::Id EventLoop::add(Handler* handler) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->handlers[++state_->last_id] = handler;
  return state_->last_id;
}

void EventLoop::remove(Id id) {
  State& s = *state_;
  std::unique_lock<std::mutex> lock(s.mutex);
  s.handlers.erase(id);
  if (s.thread.get_id() == std::this_thread::get_id()) return;
  ++s.remove_waiters;
  s.call_returned.wait(lock, [&] { return s.running != id; });
  --s.remove_waiters;
}

void EventLoop::set(Id id, int fd, uint32_t previous, uint32_t events) {
  if (events == previous) return;
  epoll_event e{};
  e.events = events;
  e.data.u64 = epoll_data(id, fd);
  const int op = events == 0 ? EPOLL_CTL_DEL : previous != 0 ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  epoll_ctl(state_->epoll.get(), op, fd, &e);
}

void EventLoop::wake(Id id) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->woken.push_back(id);
  }
  state_->signal_wake();
}

void EventLoop::run(const std::shared_ptr<State>& state) {
  State& s = *state;
  std::array<epoll_event, 64> events;
  std::unique_lock<std::mutex> lock(s.mutex);
  while (!s.stop_requested) {
    lock.unlock();
    const int n = epoll_wait(s.epoll.get(), events.data(), static_cast<int>(events.size()),
                             s.with_ticks ? static_cast<int>(kTick.count()) : -1);
    lock.lock();
    for (int i = 0; i < n && !s.stop_requested; ++i) {
      const uint64_t data = events[static_cast<size_t>(i)].data.u64;
      const uint32_t ready_events = events[static_cast<size_t>(i)].events;
      const auto id = static_cast<Id>(data >> 32);
      if (id == 0) s.clear_wake();
      s.call_handler(lock, id,
                     [&](Handler& h) { h.on_events(static_cast<int>(data), ready_events); });
    }
    std::vector<Id> woken;
    woken.swap(s.woken);
    for (const Id id : woken) s.call_handler(lock, id, [](Handler& h) { h.on_wake(); });
    s.tick(lock);
  }
}

}  // namespace fsccl
