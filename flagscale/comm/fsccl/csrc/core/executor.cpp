#include "executor.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <ctime>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "thread.h"

namespace fsccl {
namespace {

using Lock = std::unique_lock<std::mutex>;

std::chrono::nanoseconds time_used(pthread_t thread) {
  clockid_t clock{};
  timespec used{};
  if (pthread_getcpuclockid(thread, &clock) != 0) return {};
  clock_gettime(clock, &used);
  return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

}  // namespace

struct Executor::State {
  explicit State(const char* thread_name) : name(thread_name) {}

  const char* const name;
  const pid_t process = getpid();
  std::mutex mutex;  // of all below
  std::condition_variable changed;
  std::deque<Job> queue;
  std::vector<std::thread> threads;
  bool busy = false;  // a job runs, or the callbacks of one
  bool stopped = false, waited = false;
  pthread_t worker{};  // whose turn it is to run the queue
  bool works = false;  // whether there is one
  bool calls_back = false, watched = false;
  size_t nested = 0;  // jobs under way that a callback has called, or runs by help()
  size_t steps = 0;   // callbacks begun, and such jobs done

  bool here() const { return process == getpid(); }
  bool in_callback() const { return calls_back && pthread_equal(worker, pthread_self()) != 0; }

  void start(void (*body)(const std::shared_ptr<State>&), const std::shared_ptr<State>& self) {
    threads.emplace_back([body, self] {
      begin_thread(self->name);
      body(self);
    });
  }
  // While the worker is in a callback somebody has to see whether it goes on.
  void see_to_queue(const std::shared_ptr<State>& self) {
    if (!works) {
      works = true;
      start(loop, self);
    } else if (calls_back && !watched && !queue.empty()) {
      watched = true;
      start(keep_watch, self);
    }
  }

  // Of a callback, on its thread.
  void run_nested(const Job& job, Lock& hold) {
    ++nested;
    hold.unlock();
    job.run();
    hold.lock();
    --nested;
    ++steps;
    hold.unlock();
    if (job.then) job.then();
    hold.lock();
  }
  void run_next(Lock& hold) {
    const Job job = std::move(queue.front());
    queue.pop_front();
    run_nested(job, hold);
  }
};

Executor::Executor(const char* thread_name) : state_(std::make_shared<State>(thread_name)) {}

Executor::~Executor() {
  stop();
  if (!state_->here()) static_cast<void>(new std::shared_ptr<State>(state_));  // of a parent's
}

bool Executor::run(Job job, bool may_run_here) {
  State& s = *state_;
  if (!s.here()) return false;
  Lock hold(s.mutex);
  if (s.in_callback()) {
    s.run_nested(job, hold);
    return true;
  }
  if (!s.stopped && (!may_run_here || s.busy || !s.queue.empty())) {
    s.queue.push_back(std::move(job));
    s.see_to_queue(state_);
    s.changed.notify_all();
    return false;
  }
  const bool alone = !s.stopped;
  if (alone) s.busy = true;
  hold.unlock();
  job.run();
  if (alone) {
    hold.lock();
    s.busy = false;
    if (!s.queue.empty() || s.waited) s.changed.notify_all();
    hold.unlock();
  }
  if (job.then) job.then();
  return true;
}

void Executor::help(const std::function<bool()>& done) {
  State& s = *state_;
  if (!s.here() || done()) return;
  Lock hold(s.mutex);
  while (s.in_callback() && !s.queue.empty() && !done()) s.run_next(hold);
}

bool Executor::drain(std::chrono::milliseconds limit) {
  State& s = *state_;
  if (!s.here()) return true;
  Lock hold(s.mutex);
  if (s.in_callback()) {
    while (s.in_callback() && !s.queue.empty()) s.run_next(hold);
    return true;
  }
  s.waited = true;
  return s.changed.wait_for(hold, limit, [&s] { return !s.busy && s.queue.empty(); });
}

void Executor::stop() {
  State& s = *state_;
  if (!s.here()) return;
  std::vector<std::thread> threads;
  {
    Lock hold(s.mutex);
    s.stopped = true;
    threads.swap(s.threads);
    s.changed.notify_all();
  }
  for (std::thread& t : threads) {
    if (t.get_id() == std::this_thread::get_id()) {
      t.detach();
    } else {
      t.join();
    }
  }
}

void Executor::loop(const std::shared_ptr<State>& state) {
  State& s = *state;
  Lock hold(s.mutex);
  const pthread_t me = pthread_self();
  s.worker = me;
  for (;;) {
    s.changed.wait(hold, [&s] { return !s.busy && (s.stopped || !s.queue.empty()); });
    if (s.queue.empty()) return;
    const Job job = std::move(s.queue.front());
    s.queue.pop_front();
    s.busy = true;
    hold.unlock();
    job.run();
    hold.lock();
    if (job.then) {
      s.calls_back = true;
      ++s.steps;
      s.see_to_queue(state);
      if (s.watched) s.changed.notify_all();
      hold.unlock();
      job.then();
      hold.lock();
      if (pthread_equal(s.worker, me) == 0) return;  // another has taken over
      s.calls_back = false;
    }
    s.busy = false;
    s.changed.notify_all();
  }
}

// Takes over when the worker stands still in a callback.
void Executor::keep_watch(const std::shared_ptr<State>& state) {
  State& s = *state;
  Lock hold(s.mutex);
  while (!s.stopped) {
    s.changed.wait(hold, [&s] { return s.stopped || (s.calls_back && !s.queue.empty()); });
    const size_t step = s.steps;
    const auto used = time_used(s.worker);
    const auto over = [&] { return s.stopped || !s.calls_back || s.steps != step; };
    if (s.changed.wait_for(hold, kStill, over) || s.nested > 0) continue;
    if (time_used(s.worker) - used > kStill / 100) continue;  // it works
    s.worker = pthread_self();
    s.calls_back = s.busy = s.watched = false;
    hold.unlock();
    return loop(state);
  }
}

}  // namespace fsccl
