// Queue of a group's operations: numbers them, runs those on host memory on the group's executor
// (core/executor.h), and collects the works of a coalesced block.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "../core/executor.h"
#include "../core/group.h"
#include "flight_recorder.h"
#include "work.h"

namespace fsccl {

class NvlinkPath;

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using NativePtr = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;

// Operations of one group run one after the other on its executor, in the order of the calls; a
// synchronous one runs on its caller's thread if the executor allows it.
//
// Between start_coalescing() and end_coalescing() all works are collected, and end_coalescing()
// returns one work for all of them. A native library coalesces its own calls, from the first one in
// the block on.
//
// Called by the thread that calls the backend, except nvlink() and failed(), which any thread
// may call.
class OperationQueue {
 public:
  OperationQueue(int rank, std::shared_ptr<Group> group,
                 c10::intrusive_ptr<c10d::Backend::Options> options);

  int rank() const { return rank_; }
  int size() const { return group_->size(); }
  Group& group() const { return *group_; }
  const std::shared_ptr<Group>& shared_group() const { return group_; }

  // Number of the last operation. Calls of all paths are counted, so the numbers are the same on
  // all ranks.
  uint64_t sequence() const { return sequence_; }
  uint64_t next_sequence() { return ++sequence_; }
  // Returns a call's timeout: the group's, if the call does not set one.
  Milliseconds timeout_of(Milliseconds requested) const {
    return requested == c10d::kUnsetTimeout ? options_->timeout : requested;
  }
  Milliseconds timeout() const { return options_->timeout; }

  // Throws in a child forked from the process that made the group.
  void check_process() const;
  // Throws if the group has an NVLink path and has failed. A failure of the path's kernels is first
  // reported to all ranks. Without an NVLink path does nothing: operations detect the failure.
  void check_failure(const char* title);
  // Sets the path whose kernels' failure fails the group; null: none.
  void set_nvlink(NvlinkPath* path) { nvlink_ = path; }
  NvlinkPath* nvlink() const { return nvlink_; }
  bool failed() const;
  // Fails the group on all ranks, and throws the error as torch's exception.
  [[noreturn]] void fail(const char* title, const Error& error);

  // Runs body(Group&, const Deadline&) on the executor. The work completes when it returns.
  template <class Body>
  WorkPtr run(const OperationInfo& info, Tensors outputs, Body body) {
    check_process();
    check_failure(info.title);
    return enqueue(
        info,
        c10::make_intrusive<CollectiveWork>(rank_, info, next_sequence(), std::move(outputs),
                                            group_, executor_),
        std::move(body));
  }
  // run() for a work that the caller has created and numbered.
  template <class Body>
  WorkPtr enqueue(const OperationInfo& info, c10::intrusive_ptr<CollectiveWork> work, Body body);

  // Record an operation in the flight recorder. `has_ended` is called where nobody calls end().
  FlightRecorder::Id record(const OperationInfo& info, uint64_t sequence, TensorSpan outputs,
                            std::function<bool()> has_ended = nullptr);
  void record_message(const OperationInfo& info, int peer, std::function<bool()> has_ended);

  bool coalescing() const { return coalescing_; }
  // Returns whether a native library has calls in the coalesced block.
  bool coalesces_native() const { return static_cast<bool>(coalescing_native_); }
  void start_coalescing() { coalescing_ = true; }
  WorkPtr end_coalescing();
  // Adds the work to the coalesced block, if there is one. Returns its argument.
  WorkPtr collect(WorkPtr work);
  // Calls call(c10d::Backend&); in a coalesced block, inside a coalesced block of that library.
  template <class F>
  WorkPtr call_native(const NativePtr& native, F&& call) {
    if (coalescing_ && !coalescing_native_) {
      native->startCoalescing();
      coalescing_native_ = native;
    }
    return call(*native);
  }

  const std::shared_ptr<Executor>& executor() const { return executor_; }
  // Waits until all operations have ended. Returns false if they make no progress for a second.
  bool finish();

 private:
  const int rank_;
  const c10::intrusive_ptr<c10d::Backend::Options> options_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Executor> executor_;
  std::atomic<NvlinkPath*> nvlink_{nullptr};
  FlightRecorder& recorder_;
  const std::shared_ptr<const FlightRecorder::GroupInfo> recorded_group_;
  uint64_t sequence_ = 0, message_sequence_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  NativePtr coalescing_native_;
};

template <class Body>
WorkPtr OperationQueue::enqueue(const OperationInfo& info, c10::intrusive_ptr<CollectiveWork> work,
                                Body body) {
  const auto timeout = timeout_of(info.timeout);
  const auto record_id = record(info, work->getSequencenumber(), work->outputs());
  auto job = [work, group = group_, timeout, body = std::move(body), &recorder = recorder_,
              record_id] {
    recorder.begin(record_id);
    std::exception_ptr error;
    try {
      body(*group, Deadline::after(timeout));
    } catch (const c10::Error&) {
      error = std::current_exception();
    } catch (const std::exception& e) {
      error = torch_error(e);
    }
    recorder.end(record_id, error != nullptr);
    work->finish_operation(error);
  };
  try {
    executor_->run({std::move(job), [work] { work->complete_future(); }},
                   !info.async && !coalescing_);
  } catch (const Error& e) {  // no thread could be started: other ranks would wait for this one
    fail(info.title, e);
  }
  return collect(std::move(work));
}

}  // namespace fsccl
