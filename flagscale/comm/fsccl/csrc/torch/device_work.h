// DeviceWork: a collective that has been enqueued on a device by the device engine.
//
// wait() makes the caller's current stream wait and does not block the caller. References to the
// tensors are kept until the device has finished, so that their memory is not reused meanwhile.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "../device/stream_watchdog.h"
#include "work.h"

namespace fsccl {

class DeviceWork : public c10d::Work {
 public:
  // `stream` is the stream on which the operation ends.
  DeviceWork(int rank, const OperationInfo& info, uint64_t sequence,
             std::vector<at::Tensor> outputs, std::shared_ptr<PendingOperation> pending,
             c10::Stream stream)
      : Work(rank, info.type, info.title, info.inputs.vec()),
        outputs_(std::move(outputs)),
        pending_(std::move(pending)),
        device_(stream.device()),
        sequence_(sequence),
        future_(new_future({device_})) {
    // A future of device tensors completes at once: torch makes the stream of a user of its value
    // wait.
    const c10::StreamGuard current(stream);
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override { return pending_->finished || pending_->end_event->query(); }
  bool isSuccess() const override { return !exception() && pending_->end_event->query(); }
  std::exception_ptr exception() const override {
    return pending_->finished ? pending_->error : nullptr;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  FuturePtr getFuture() override { return future_; }
  void synchronize() override {
    if (auto error = exception()) std::rethrow_exception(error);
    pending_->end_event->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

 private:
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<PendingOperation> pending_;
  c10::Device device_;
  uint64_t sequence_;
  FuturePtr future_;
};

}  // namespace fsccl
