// Runs a group's collectives one after the other, in the order in which they were called.
//
// An asynchronous one runs on the group's thread. A synchronous one runs on its caller's thread
// when nothing is queued before it: two switches of thread less, which for a small message is most
// of its time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "thread.h"

namespace fsccl {

class Executor {
 public:
  using Job = std::function<void()>;  // must not throw

  ~Executor() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Returns whether the job has already run.
  bool run(Job job, bool may_run_here) {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      if (!may_run_here || busy_ || !queue_.empty()) {
        queue_.push_back(std::move(job));
        if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
        changed_.notify_all();
        return false;
      }
      busy_ = true;
    }
    job();
    {
      std::lock_guard<std::mutex> hold(mutex_);
      busy_ = false;
      if (queue_.empty() && !waited_) return true;
    }
    changed_.notify_all();
    return true;
  }

  // Whether everything has run within `limit`.
  bool drain(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> hold(mutex_);
    waited_ = true;
    return changed_.wait_for(hold, limit, [this] { return !busy_ && queue_.empty(); });
  }

 private:
  void loop() {
    begin_thread("fsccl-worker");
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      changed_.wait(hold, [this] { return !busy_ && (stop_ || !queue_.empty()); });
      if (queue_.empty()) return;
      const Job job = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      hold.unlock();
      job();
      hold.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  std::thread thread_;
  bool busy_ = false, stop_ = false, waited_ = false;
};

}  // namespace fsccl
