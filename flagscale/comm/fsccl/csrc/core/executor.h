// Executor: runs the collectives of a group one after the other, in the order in which they were
// called.
//
// An asynchronous collective runs on a worker thread, which the group has while something is
// queued; all groups of the process share a pool of threads. A synchronous collective runs on the
// thread of its caller if nothing is queued before it. That saves two context switches, which
// dominate the time of a small message.
//
// The `then` of a job completes futures, and so runs callbacks of the user, which may do anything a
// program may do. The worker runs them before the next job, so that the collectives they call come
// at the same position on all ranks, however early or late a rank has attached them:
//
// - A collective called in a callback runs at once, before the queued ones.
// - If a callback waits for a queued job, run_queued_until() runs the queue up to that job.
// - If a callback waits for the future of a queued job, which the executor cannot see, the worker
//   blocks. Once it has used no processor time for kStallTimeout, another thread takes the queue
//   over.
//
// A forked child has no worker threads, and a lock may be held by a thread that does not exist in
// it. There, all functions do nothing.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace fsccl {

// Any thread may call.
class Executor {
 public:
  // A collective. Neither function may throw.
  struct Job {
    std::function<void()> run;
    std::function<void()> then;  // runs after `run`, may be empty
  };
  static constexpr std::chrono::milliseconds kStallTimeout{500};

  Executor();
  Executor(const Executor&) = delete;
  ~Executor();

  // Runs or queues a job, and returns whether it has already run. After stop() it runs here.
  bool run(Job job, bool allow_inline);
  // Inside a callback on the worker: runs queued jobs until `condition`. Elsewhere it does nothing.
  void run_queued_until(const std::function<bool()>& condition);
  // Waits until everything has run, and returns whether it has within `timeout`. Inside a callback
  // it runs the queue.
  bool drain(std::chrono::milliseconds timeout);
  // Runs the queued callbacks and ends the threads. If a callback calls it, its own thread ends
  // later.
  void stop();

 private:
  struct State;
  static void loop(const std::shared_ptr<State>& state);
  static void watch_worker(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace fsccl
