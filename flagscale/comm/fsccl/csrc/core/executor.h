// Executor: runs the collectives of a group one after the other, in the order in which they were
// called.
//
// An asynchronous collective runs on a worker thread, which the executor has while jobs are queued;
// all executors of the process share a pool of threads. A synchronous collective runs on the thread
// of its caller if no job is queued or running. That saves two context switches, which dominate the
// time of a small message.
//
// After a job, its run_callbacks() completes the futures of the collective, which runs the
// callbacks that the user has attached to them. A callback may call and wait for further
// collectives of the group. The worker runs callbacks before the next job, so that the collectives
// that they call have the same position on all ranks, however early or late a rank has attached
// them:
//
// - A collective called in a callback runs at once, before the queued ones.
// - If a callback waits for a queued job, run_queued_until() runs the queue up to that job.
// - If a callback waits for the future of a queued job, which the executor cannot detect, the
//   worker blocks. Once it has used no processor time for kStallTimeout, another thread becomes the
//   worker and runs the queue.
//
// Jobs are called and destroyed without the lock of the executor: what they have captured may need
// other locks, such as Python's.
//
// In a forked child, all functions do nothing: the worker threads do not exist there, and may have
// held locks.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace fsccl {

// Queue of the collectives of one group. Any thread may call.
class Executor {
 public:
  // A collective. Neither function may throw.
  struct Job {
    std::function<void()> run;
    std::function<void()> run_callbacks;  // called after `run`; may be empty
  };
  static constexpr std::chrono::milliseconds kStallTimeout{500};

  Executor();
  Executor(const Executor&) = delete;
  ~Executor();

  // Runs or queues a job, and returns whether it has run. With `allow_inline`, the calling thread
  // runs it if no job is queued or running. After stop(), the calling thread always runs it.
  bool run(Job job, bool allow_inline);
  // Called in a callback on the worker: runs queued jobs until condition() is true. Elsewhere it
  // does nothing.
  void run_queued_until(const std::function<bool()>& condition);
  // Waits until all jobs have run, at most `timeout`; returns false on timeout. Called in a
  // callback on the worker, it runs the queued jobs itself.
  bool drain(std::chrono::milliseconds timeout);
  // Waits until the queued jobs have run and the threads have ended. If a callback calls it, the
  // thread of that callback ends later.
  void stop();

 private:
  struct State;
  static void loop(const std::shared_ptr<State>& state);
  static void watch_worker(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace fsccl
