// Runs a group's collectives one after the other, in the order in which they were called.
//
// An asynchronous one runs on a thread that the group has while something is queued; threads serve
// all groups of the process in turn. A synchronous one runs on its caller's thread when nothing is
// queued before it: two switches of thread less, which for a small message is most of its time.
//
// A job's `then` completes futures, and so runs callbacks of the user's, which may do all that a
// program may. The group's thread runs them before the next job: what they call comes at the same
// place on all ranks then, however early or late a rank has attached them.
//  - What they call here runs at once, before what is queued.
//  - Where they wait for a queued job, help() runs the queue as far as that.
//  - Where they wait for a queued job's future, which nobody sees, the thread stands still: when it
//    has used no processor time for kStill, another one takes the queue over.
//
// In a forked child there are no threads, and a lock may be held by one that is not there: what is
// called there does nothing.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace fsccl {

class Executor {
 public:
  struct Job {  // neither may throw
    std::function<void()> run;
    std::function<void()> then;  // may be empty
  };
  static constexpr std::chrono::milliseconds kStill{500};

  Executor();
  Executor(const Executor&) = delete;
  ~Executor();

  // Returns whether the job has already run. After stop() it runs here.
  bool run(Job job, bool may_run_here);
  // In a callback on the group's thread: runs what is queued until `done`. Elsewhere: nothing.
  void help(const std::function<bool()>& done);
  // Whether everything has run within `limit`. In a callback: runs it.
  bool drain(std::chrono::milliseconds limit);
  // Runs what is queued, and lets the threads go; a callback that calls it has its own go later.
  void stop();

 private:
  struct State;
  static void loop(const std::shared_ptr<State>& state);
  static void keep_watch(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace fsccl
