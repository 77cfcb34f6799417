// Path for all_reduces in bounded time (datagram/bounded_all_reduce.h) in groups that have ranks on
// devices.
//
// The core runs such an all_reduce in host memory. A tensor on a device is copied there, reduced
// over all ranks by the core, and copied back. The copies use two separate streams, so that they
// overlap with the caller's work.
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

// Called by the thread that calls the backend. All ranks choose the path or none: the choice
// follows from the settings and from properties that are the same in all of their calls.
class BoundedPath {
 public:
  BoundedPath(OperationQueue& queue, Router& router) : queue_(queue), router_(router) {}

  // Runs an all_reduce in place by this path. Returns nullopt if the settings do not enable it, the
  // tensors are not suitable, or all ranks use host memory: then the core itself decides.
  // `reductions` is called at most once, and returns one entry per tensor.
  template <class F>
  std::optional<WorkPtr> all_reduce(const OperationInfo& info, Tensors& tensors, F&& reductions) {
    if (!supports_tensors(tensors)) return std::nullopt;
    return all_reduce_as(info, tensors, reductions());
  }

 private:
  // Two streams of a device: one for copies to host memory, one for copies from it.
  struct CopyStreams {
    explicit CopyStreams(at::Device device)
        : guard(device.type()),
          to_host(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
          to_device(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

    c10::impl::VirtualGuardImpl guard;
    c10::Stream to_host, to_device;
  };

  bool supports_tensors(const Tensors& tensors) const;
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

// Work of an all_reduce in host memory whose result is then copied to a device.
//
// As with gloo, wait() blocks the caller until the reduction has ended, because the time that the
// network takes cannot be predicted; then it makes the caller's current stream wait for the copy.
class StagedWork : public CollectiveWork {
 public:
  // `last_stream` is the stream on which the result is copied to the device.
  StagedWork(int rank, const OperationInfo& info, uint64_t sequence, std::vector<at::Tensor> outputs,
             std::weak_ptr<Group> group, std::weak_ptr<Executor> executor, c10::Stream last_stream)
      : CollectiveWork(rank, info, sequence, std::move(outputs), std::move(group),
                       std::move(executor)),
        last_stream_(last_stream),
        end_event_(last_stream.device_type()) {}

  // Records that the last step has been enqueued. To be called before finish_operation().
  void record_end() {
    end_event_.record(last_stream_);
    is_end_recorded_ = true;
  }

  bool isCompleted() override {
    return Work::isCompleted() && (!is_end_recorded_ || end_event_.query());
  }
  // torch calls it at the end of wait(), where it holds the work's lock.
  void synchronize() override {
    if (!is_end_recorded_) return;
    end_event_.block(
        c10::impl::VirtualGuardImpl(last_stream_.device_type()).getStream(last_stream_.device()));
  }

 private:
  FuturePtr make_future() const override { return new_future({last_stream_.device()}); }
  void set_result(c10::ivalue::Future& future, const std::exception_ptr& error) override {
    // torch makes the stream of a user of the value wait for the stream that is current here.
    const c10::StreamGuard current(last_stream_);
    CollectiveWork::set_result(future, error);
  }

  const c10::Stream last_stream_;
  c10::Event end_event_;
  std::atomic<bool> is_end_recorded_{false};
};

}  // namespace fsccl
