// Path for all_reduces in bounded time (datagram/bounded_all_reduce.h) of groups that have ranks on
// devices.
//
// The core does such an all_reduce in host memory. A tensor of a device is copied there, reduced
// over all ranks by their core, and copied back, on two streams of its own next to the caller's
// work.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "operation_queue.h"
#include "router.h"

namespace fsccl {

// Called by the thread that calls the backend. Ranks take the path or leave it together: the choice
// follows from the settings and from what is the same in all of their calls.
class BoundedPath {
 public:
  BoundedPath(OperationQueue& queue, Router& router) : queue_(queue), router_(router) {}

  // An all_reduce in place by this path; nullopt where the settings do not ask for one, the tensors
  // do not allow it, or all ranks are on hosts, whose core decides by itself. `reductions` is
  // called at most once, and gives one entry per tensor.
  template <class F>
  std::optional<WorkPtr> all_reduce(const OperationInfo& info, Tensors& tensors, F&& reductions) {
    if (!allows(tensors)) return std::nullopt;
    return all_reduce_as(info, tensors, reductions());
  }

 private:
  // Two streams of a device: copies to the host are enqueued on one, those from it on the other.
  struct CopyStreams {
    explicit CopyStreams(at::Device device)
        : guard(device.type()),
          to_host(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
          to_device(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

    c10::impl::VirtualGuardImpl guard;
    c10::Stream to_host, to_device;
  };

  bool allows(const Tensors& tensors) const;
  std::optional<WorkPtr> all_reduce_as(const OperationInfo& info, Tensors& tensors,
                                       std::vector<Reduction> reductions);
  bool connect();
  WorkPtr all_reduce_through_host(const OperationInfo& info, Tensors& tensors,
                                  const std::vector<Reduction>& reductions);

  OperationQueue& queue_;
  Router& router_;
  std::optional<bool> connected_;  // unset: not tried
  std::unique_ptr<CopyStreams> streams_;
};

// An all_reduce that ends on a stream of a device after the host's part of it.
//
// As with gloo, wait() blocks the caller until the result is there, because it cannot be predicted
// how long the network takes; then it makes the caller's current stream wait for the copy back.
class StagedWork : public CollectiveWork {
 public:
  // `last_stream`: where the operation ends.
  StagedWork(int rank, c10d::OpType type, const char* title, uint64_t sequence,
             std::vector<at::Tensor> outputs, std::weak_ptr<Group> group,
             std::weak_ptr<Executor> executor, c10::Stream last_stream)
      : CollectiveWork(rank, type, title, sequence, std::move(outputs), std::move(group),
                       std::move(executor)),
        last_stream_(last_stream),
        end_(last_stream.device_type()) {}

  // The last step has been enqueued. Call before finish_operation().
  void record_end() {
    end_.record(last_stream_);
    recorded_ = true;
  }

  bool isCompleted() override { return Work::isCompleted() && (!recorded_ || end_.query()); }
  // torch calls it at the end of wait(), where it holds the work's lock.
  void synchronize() override {
    if (!recorded_) return;
    end_.block(
        c10::impl::VirtualGuardImpl(last_stream_.device_type()).getStream(last_stream_.device()));
  }

 private:
  FuturePtr make_future() const override { return new_future({last_stream_.device()}); }
  void set_result(c10::ivalue::Future& future, const std::exception_ptr& error) override {
    // A user of the value has his stream wait for the current one.
    const c10::StreamGuard current(last_stream_);
    CollectiveWork::set_result(future, error);
  }

  const c10::Stream last_stream_;
  c10::Event end_;
  std::atomic<bool> recorded_{false};
};

}  // namespace fsccl
