#include "executor.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <ctime>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "per_process.h"
#include "thread.h"
#include "types.h"

namespace fsccl {
namespace {

using Lock = std::unique_lock<std::mutex>;

std::chrono::nanoseconds cpu_time_of(pthread_t thread) {
  clockid_t clock{};
  timespec cpu_time{};
  if (pthread_getcpuclockid(thread, &clock) != 0) return {};
  clock_gettime(clock, &cpu_time);
  return std::chrono::seconds(cpu_time.tv_sec) + std::chrono::nanoseconds(cpu_time.tv_nsec);
}

// Threads of all executors of this process. A thread ends after kIdleTimeout without work.
class ThreadPool {
 public:
  // Throws Error(kSystem) if no thread can be started.
  void run(std::function<void()> task) {
    const Lock lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() > idle_) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error& e) {
        tasks_.pop_back();
        throw Error(Fault::kSystem, -1, std::string("cannot start a thread: ") + e.what());
      }
    } else {
      task_added_.notify_one();
    }
  }

 private:
  static constexpr std::chrono::seconds kIdleTimeout{5};

  void work() {
    set_up_thread("fsccl-worker");
    Lock lock(mutex_);
    for (;;) {
      ++idle_;
      task_added_.wait_for(lock, kIdleTimeout, [this] { return !tasks_.empty(); });
      --idle_;
      if (tasks_.empty()) return;
      {
        const std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable task_added_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

void call_and_destroy(std::function<void()>& function) {
  function();
  function = nullptr;
}

}  // namespace

// State that worker threads share with the executor object, which may be destroyed first.
struct Executor::State {
  const pid_t owner_pid = getpid();
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::deque<Job> queue;
  // Threads running for this executor, and those of them that are inside stop().
  size_t thread_count = 0, stopping_thread_count = 0;
  // State of the executor for which the current thread runs; null in other threads.
  static thread_local const State* current_state;
  bool is_running_job = false;  // a job or its callbacks are running
  bool stopped = false, drain_is_waiting = false;
  pthread_t worker{};               // the thread that may run the queue
  bool has_worker = false;          // whether there is one
  bool worker_in_callback = false;  // the worker is in run_callbacks() of a job
  bool has_watcher = false;         // a thread runs watch_worker()
  // Jobs in progress that a callback has called or that run_queued_until() runs.
  size_t nested_jobs = 0;
  size_t progress = 0;  // callbacks started, and nested jobs finished

  bool is_same_process() const { return owner_pid == getpid(); }
  bool in_callback() const {
    return worker_in_callback && pthread_equal(worker, pthread_self()) != 0;
  }

  void start_thread(void (*task)(const std::shared_ptr<State>&),
                    const std::shared_ptr<State>& state) {
    per_process<ThreadPool>().run([task, state] {
      current_state = state.get();
      task(state);
      current_state = nullptr;
      const Lock lock(state->mutex);
      --state->thread_count;
      state->changed.notify_all();
    });
    ++thread_count;
  }
  // Starts a worker if there is none. While the worker is in a callback and jobs are queued, starts
  // a watcher, which detects that the worker blocks.
  void ensure_worker(const std::shared_ptr<State>& state) {
    if (!has_worker) {
      start_thread(loop, state);
      has_worker = true;
    } else if (worker_in_callback && !has_watcher && !queue.empty()) {
      start_thread(watch_worker, state);
      has_watcher = true;
    }
  }

  // Runs a job inside a callback, on the thread of the callback.
  void run_nested(Job job, Lock& lock) {
    ++nested_jobs;
    lock.unlock();
    call_and_destroy(job.run);
    lock.lock();
    --nested_jobs;
    ++progress;
    lock.unlock();
    if (job.run_callbacks) call_and_destroy(job.run_callbacks);
    lock.lock();
  }
  Job take_next_queued() {
    Job job = std::move(queue.front());
    queue.pop_front();
    return job;
  }
};

thread_local const Executor::State* Executor::State::current_state = nullptr;

Executor::Executor() : state_(std::make_shared<State>()) {}

Executor::~Executor() {
  stop();
  // In a forked child, the State belongs to the parent and is leaked.
  if (!state_->is_same_process()) static_cast<void>(new std::shared_ptr<State>(state_));
}

bool Executor::run(Job job, bool allow_inline) {
  State& s = *state_;
  if (!s.is_same_process()) return false;
  Lock lock(s.mutex);
  if (s.in_callback()) {
    s.run_nested(std::move(job), lock);
    return true;
  }
  if (!s.stopped && (!allow_inline || s.is_running_job || !s.queue.empty())) {
    s.queue.push_back(std::move(job));
    try {
      s.ensure_worker(state_);
    } catch (const Error&) {
      job = std::move(s.queue.back());
      s.queue.pop_back();
      throw;
    }
    s.changed.notify_all();
    return false;
  }
  const bool exclusive = !s.stopped;
  if (exclusive) s.is_running_job = true;
  lock.unlock();
  job.run();
  if (exclusive) {
    lock.lock();
    s.is_running_job = false;
    if (!s.queue.empty() || s.drain_is_waiting) s.changed.notify_all();
    lock.unlock();
  }
  if (job.run_callbacks) job.run_callbacks();
  return true;
}

void Executor::run_queued_until(const std::function<bool()>& condition) {
  State& s = *state_;
  if (!s.is_same_process() || condition()) return;
  Lock lock(s.mutex);
  while (s.in_callback() && !s.queue.empty() && !condition()) {
    s.run_nested(s.take_next_queued(), lock);
  }
}

bool Executor::drain(std::chrono::milliseconds timeout) {
  State& s = *state_;
  if (!s.is_same_process()) return true;
  Lock lock(s.mutex);
  if (s.in_callback()) {
    while (s.in_callback() && !s.queue.empty()) s.run_nested(s.take_next_queued(), lock);
    return true;
  }
  s.drain_is_waiting = true;
  return s.changed.wait_for(lock, timeout, [&s] { return !s.is_running_job && s.queue.empty(); });
}

void Executor::stop() {
  State& s = *state_;
  if (!s.is_same_process()) return;
  Lock lock(s.mutex);
  s.stopped = true;
  s.changed.notify_all();
  // The calling thread, inside a callback, ends later.
  if (State::current_state == &s) ++s.stopping_thread_count;
  s.changed.wait(lock, [&s] { return s.thread_count <= s.stopping_thread_count; });
}

void Executor::loop(const std::shared_ptr<State>& state) {
  State& s = *state;
  Lock lock(s.mutex);
  const pthread_t self_thread = pthread_self();
  s.worker = self_thread;
  for (;;) {
    s.changed.wait(lock, [&s] { return !s.is_running_job; });
    if (s.queue.empty()) {
      s.has_worker = false;
      return;
    }
    Job job = s.take_next_queued();
    s.is_running_job = true;
    lock.unlock();
    call_and_destroy(job.run);
    lock.lock();
    if (job.run_callbacks) {
      s.worker_in_callback = true;
      ++s.progress;
      try {
        s.ensure_worker(state);
      } catch (const Error&) {
        // Without a watcher, jobs wait until the callback returns.
      }
      if (s.has_watcher) s.changed.notify_all();
      lock.unlock();
      call_and_destroy(job.run_callbacks);
      lock.lock();
      if (pthread_equal(s.worker, self_thread) == 0) return;  // a watcher has taken over
      s.worker_in_callback = false;
    }
    s.is_running_job = false;
    s.changed.notify_all();
  }
}

// Waits until the worker blocks in a callback, and then becomes the worker.
void Executor::watch_worker(const std::shared_ptr<State>& state) {
  State& s = *state;
  Lock lock(s.mutex);
  while (!s.stopped && s.worker_in_callback) {
    if (s.queue.empty()) {
      s.changed.wait(lock, [&s] { return s.stopped || !s.worker_in_callback || !s.queue.empty(); });
      continue;
    }
    const size_t progress_before = s.progress;
    const auto cpu_time = cpu_time_of(s.worker);
    const auto condition_changed = [&] {
      return s.stopped || !s.worker_in_callback || s.progress != progress_before;
    };
    if (s.changed.wait_for(lock, kStallTimeout, condition_changed) || s.nested_jobs > 0) continue;
    // A worker that uses processor time is not blocked.
    if (cpu_time_of(s.worker) - cpu_time > kStallTimeout / 100) continue;
    s.worker = pthread_self();
    s.worker_in_callback = s.is_running_job = s.has_watcher = false;
    lock.unlock();
    return loop(state);
  }
  s.has_watcher = false;
}

}  // namespace fsccl
