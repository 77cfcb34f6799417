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

// A handler's descriptor, as epoll keeps it. The bell is of nobody.
uint64_t packed(uint32_t id, int fd) {
  return static_cast<uint64_t>(id) << 32 | static_cast<uint32_t>(fd);
}

}  // namespace

struct EventLoop::State {
  State(const char* thread_name, bool does_tick)
      : name(thread_name),
        ticks(does_tick),
        epoll(epoll_create1(EPOLL_CLOEXEC)),
        bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (epoll.get() < 0 || bell.get() < 0) fail_system("cannot make a poll set");
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u64 = packed(0, bell.get());
    epoll_ctl(epoll.get(), EPOLL_CTL_ADD, bell.get(), &e);
  }

  void ring() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(bell.get(), &one, sizeof one);  // full is awake too
  }
  void answer_bell() const {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = read(bell.get(), &count, sizeof count);
  }
  // Calls f(handler), unless it has been removed.
  template <class F>
  void call(std::unique_lock<std::mutex>& hold, Id id, F&& f) {
    const auto found = handlers.find(id);
    if (found == handlers.end()) return;
    Handler* const handler = found->second;
    running = id;
    hold.unlock();
    f(*handler);
    hold.lock();
    running = 0;
    if (awaited) returned.notify_all();
  }
  void tick(std::unique_lock<std::mutex>& hold) {
    const auto now = std::chrono::steady_clock::now();
    if (!ticks || now - ticked < kTick) return;
    ticked = now;
    std::vector<Id> all;
    for (const auto& [id, handler] : handlers) all.push_back(id);
    for (const Id id : all) call(hold, id, [](Handler& h) { h.on_tick(); });
  }

  const char* const name;
  const bool ticks;
  const Fd epoll, bell;
  std::mutex mutex;  // of all below
  std::condition_variable returned;
  std::map<Id, Handler*> handlers;
  std::vector<Id> poked;
  std::chrono::steady_clock::time_point ticked = std::chrono::steady_clock::now();
  std::thread thread;
  Id last = 0, running = 0;
  size_t awaited = 0;
  bool stop = false;
};

EventLoop::EventLoop(const char* thread_name, bool ticks)
    : state_(std::make_shared<State>(thread_name, ticks)) {}

EventLoop::~EventLoop() {
  std::thread thread;
  {
    const std::lock_guard<std::mutex> hold(state_->mutex);
    state_->stop = true;
    thread.swap(state_->thread);
  }
  state_->ring();
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

void EventLoop::start() {
  const std::lock_guard<std::mutex> hold(state_->mutex);
  if (state_->thread.joinable()) return;
  try {
    state_->thread = std::thread([state = state_] {
      begin_thread(state->name);
      run(state);
    });
  } catch (const std::system_error& e) {
    throw Error(Fault::kSystem, -1, std::string("cannot start a thread: ") + e.what());
  }
}

EventLoop::Id EventLoop::add(Handler* handler) {
  const std::lock_guard<std::mutex> hold(state_->mutex);
  state_->handlers[++state_->last] = handler;
  return state_->last;
}

void EventLoop::remove(Id id) {
  State& s = *state_;
  std::unique_lock<std::mutex> hold(s.mutex);
  s.handlers.erase(id);
  if (s.thread.get_id() == std::this_thread::get_id()) return;
  ++s.awaited;
  s.returned.wait(hold, [&] { return s.running != id; });
  --s.awaited;
}

void EventLoop::set(Id id, int fd, uint32_t before, uint32_t events) {
  if (events == before) return;
  epoll_event e{};
  e.events = events;
  e.data.u64 = packed(id, fd);
  const int op = events == 0 ? EPOLL_CTL_DEL : before != 0 ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  epoll_ctl(state_->epoll.get(), op, fd, &e);
}

void EventLoop::poke(Id id) {
  {
    const std::lock_guard<std::mutex> hold(state_->mutex);
    state_->poked.push_back(id);
  }
  state_->ring();
}

void EventLoop::run(const std::shared_ptr<State>& state) {
  State& s = *state;
  std::array<epoll_event, 64> events;
  std::unique_lock<std::mutex> hold(s.mutex);
  while (!s.stop) {
    hold.unlock();
    const int n = epoll_wait(s.epoll.get(), events.data(), static_cast<int>(events.size()),
                             s.ticks ? static_cast<int>(kTick.count()) : -1);
    hold.lock();
    for (int i = 0; i < n && !s.stop; ++i) {
      const uint64_t at = events[static_cast<size_t>(i)].data.u64;
      const uint32_t what = events[static_cast<size_t>(i)].events;
      const auto id = static_cast<Id>(at >> 32);
      if (id == 0) s.answer_bell();
      s.call(hold, id, [&](Handler& h) { h.on_events(static_cast<int>(at), what); });
    }
    std::vector<Id> poked;
    poked.swap(s.poked);
    for (const Id id : poked) s.call(hold, id, [](Handler& h) { h.on_poke(); });
    s.tick(hold);
  }
}

}  // namespace fsccl
