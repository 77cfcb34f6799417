// Queue of a group's operations: numbers them, runs those of the host on the group's executor, and
// collects the works of a coalesced block.
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
#include "work.h"

namespace fsccl {

class NvlinkPath;

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using NativePtr = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;

// Properties of a call that do not depend on its path.
struct OperationInfo {
  c10d::OpType type;
  const char* title;     // for the profiler and for messages: "fsccl:all_reduce"
  bool async;            // else the call returns once the operation is done (host) or enqueued
  Milliseconds timeout;  // c10d::kUnsetTimeout: the group's
};

// Operations of one group run one after the other on its executor, in the order of the calls; a
// synchronous one runs on its caller's thread where the executor allows it (core/executor.h).
//
// Between start_coalescing() and end_coalescing() every work is also kept, and end_coalescing()
// returns them as one. A native library takes part from its first call in the block on: the
// others are not its own.
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

  // Number of the last operation. Every path counts the same calls, so ranks agree on numbers.
  uint64_t sequence() const { return sequence_; }
  uint64_t next_sequence() { return ++sequence_; }
  // The group's timeout where a call sets none.
  Milliseconds timeout_of(Milliseconds requested) const {
    return requested == c10d::kUnsetTimeout ? options_->timeout : requested;
  }
  Milliseconds timeout() const { return options_->timeout; }

  // Throws in a child forked from the process that made the group.
  void check_process() const;
  // Throws if the group has failed, or kernels of the NVLink engine have: then also reports to all
  // ranks. Without an NVLink path an operation finds out itself.
  void check_failure(const char* title);
  // Kernels whose failure fails the group from now on; null: none.
  void set_nvlink(NvlinkPath* path) { nvlink_ = path; }
  NvlinkPath* nvlink() const { return nvlink_; }
  bool failed() const;

  // Runs body(Group&, const Deadline&) on the executor. The work completes when it returns.
  template <class Body>
  WorkPtr run(const OperationInfo& info, Tensors outputs, Body body) {
    check_process();
    check_failure(info.title);
    return enqueue(
        info,
        c10::make_intrusive<CollectiveWork>(rank_, info.type, info.title, next_sequence(),
                                            std::move(outputs), group_, executor_),
        std::move(body));
  }
  // As run(), for a work that the caller has numbered.
  template <class Body>
  WorkPtr enqueue(const OperationInfo& info, c10::intrusive_ptr<CollectiveWork> work, Body body);

  bool coalescing() const { return coalescing_; }
  // Returns whether a native library has calls in the coalesced block.
  bool coalesces_native() const { return static_cast<bool>(coalescing_native_); }
  void start_coalescing() { coalescing_ = true; }
  WorkPtr end_coalescing();
  // Returns its argument.
  WorkPtr collect(WorkPtr work);
  // Calls call(c10d::Backend&), inside the library's own coalesced block where there is one.
  template <class F>
  WorkPtr call_native(const NativePtr& native, F&& call) {
    if (coalescing_ && !coalescing_native_) {
      native->startCoalescing();
      coalescing_native_ = native;
    }
    return call(*native);
  }

  const std::shared_ptr<Executor>& executor() const { return executor_; }
  // Waits until all has run. False if operations stood still meanwhile.
  bool finish();

 private:
  const int rank_;
  const c10::intrusive_ptr<c10d::Backend::Options> options_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Executor> executor_;
  std::atomic<NvlinkPath*> nvlink_{nullptr};
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  NativePtr coalescing_native_;
};

template <class Body>
WorkPtr OperationQueue::enqueue(const OperationInfo& info, c10::intrusive_ptr<CollectiveWork> work,
                                Body body) {
  const auto timeout = timeout_of(info.timeout);
  auto job = [work, group = group_, timeout, body = std::move(body)] {
    std::exception_ptr error;
    try {
      body(*group, Deadline::after(timeout));
    } catch (const c10::Error&) {
      error = std::current_exception();
    } catch (const std::exception& e) {
      error = torch_error(e);
    }
    work->finish_operation(error);
  };
  executor_->run({std::move(job), [work] { work->complete_future(); }},
                 !info.async && !coalescing_);
  return collect(std::move(work));
}

}  // namespace fsccl
