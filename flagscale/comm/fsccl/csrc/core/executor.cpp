#include "executor.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <ctime>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "per_process.h"
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

// The threads of all executors of this process: one that has nothing to do is there for the next,
// whosever, for a while.
class Workers {
 public:
  void run(std::function<void()> body) {
    const Lock hold(mutex_);
    bodies_.push_back(std::move(body));
    if (bodies_.size() > idle_) {
      std::thread([this] { work(); }).detach();
    } else {
      come_.notify_one();
    }
  }

 private:
  static constexpr std::chrono::seconds kStays{5};

  void work() {
    begin_thread("fsccl-worker");
    Lock hold(mutex_);
    for (;;) {
      ++idle_;
      come_.wait_for(hold, kStays, [this] { return !bodies_.empty(); });
      --idle_;
      if (bodies_.empty()) return;
      {
        const std::function<void()> body = std::move(bodies_.front());
        bodies_.pop_front();
        hold.unlock();
        body();
      }
      hold.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable come_;
  std::deque<std::function<void()>> bodies_;
  size_t idle_ = 0;
};

}  // namespace

struct Executor::State {
  const pid_t process = getpid();
  std::mutex mutex;  // of all below
  std::condition_variable changed;
  std::deque<Job> queue;
  size_t threads = 0, leaving = 0;           // at work here; and of these in stop()
  static thread_local const State* at_work;  // on this thread
  bool busy = false;                         // a job runs, or the callbacks of one
  bool stopped = false, waited = false;
  pthread_t worker{};  // whose turn it is to run the queue
  bool works = false;  // whether there is one
  bool calls_back = false, watched = false;
  size_t nested = 0;  // jobs under way that a callback has called, or runs by help()
  size_t steps = 0;   // callbacks begun, and such jobs done

  bool here() const { return process == getpid(); }
  bool in_callback() const { return calls_back && pthread_equal(worker, pthread_self()) != 0; }

  void start(void (*body)(const std::shared_ptr<State>&), const std::shared_ptr<State>& self) {
    per_process<Workers>().run([body, self] {
      at_work = self.get();
      body(self);
      at_work = nullptr;
      const Lock hold(self->mutex);
      --self->threads;
      self->changed.notify_all();
    });
    ++threads;
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

thread_local const Executor::State* Executor::State::at_work = nullptr;

Executor::Executor() : state_(std::make_shared<State>()) {}

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
  Lock hold(s.mutex);
  s.stopped = true;
  s.changed.notify_all();
  if (State::at_work == &s) ++s.leaving;  // this very thread, in a callback, ends later
  s.changed.wait(hold, [&s] { return s.threads <= s.leaving; });
}

void Executor::loop(const std::shared_ptr<State>& state) {
  State& s = *state;
  Lock hold(s.mutex);
  const pthread_t me = pthread_self();
  s.worker = me;
  for (;;) {
    s.changed.wait(hold, [&s] { return !s.busy; });
    if (s.queue.empty()) {
      s.works = false;
      return;
    }
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
  while (!s.stopped && s.calls_back) {
    if (s.queue.empty()) {
      s.changed.wait(hold, [&s] { return s.stopped || !s.calls_back || !s.queue.empty(); });
      continue;
    }
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
  s.watched = false;
}

}  // namespace fsccl
