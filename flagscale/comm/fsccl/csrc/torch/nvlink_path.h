// Path for a group's collectives of CUDA tensors on the NVLink engine: one kernel on a stream.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../nvlink/engine.h"
#include "operation_queue.h"
#include "registration.h"
#include "work.h"

namespace fsccl {

// A kernel on a stream. One on the caller's own stream records an event only when a user on another
// stream waits for it, who then also waits for later work on that stream. One on a side
// stream has its own `end`: asynchronous operations are there to be overlapped.
class NvlinkWork : public c10d::Work {
 public:
  NvlinkWork(int rank, const OperationInfo& info, uint64_t sequence,
             std::vector<at::Tensor> outputs, c10::Stream stream,
             std::shared_ptr<nvlink::Communicator> kernels, std::shared_ptr<Group> group,
             std::optional<c10::Event> end)
      : Work(rank, info.type, info.title, outputs),
        outputs_(std::move(outputs)),
        stream_(stream),
        kernels_(std::move(kernels)),
        group_(std::move(group)),
        sequence_(sequence),
        end_(std::move(end)) {}

  bool isCompleted() override { return exception() || end().query(); }
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  void synchronize() override;
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  FuturePtr getFuture() override;

 private:
  c10::Event& end();

  std::vector<at::Tensor> outputs_;
  c10::Stream stream_;
  std::shared_ptr<nvlink::Communicator> kernels_;
  std::shared_ptr<Group> group_;
  uint64_t sequence_;
  std::optional<c10::Event> end_;  // recorded; unset: not yet needed
};

// A group's connection to the NVLink engine of this rank's GPU.
//
// run() and registration() are called by the thread that calls the backend; failure() and abort()
// by any thread.
class NvlinkPath {
 public:
  using Exchange = MemoryRegistration::Exchange;

  // Why there is no connection: the GPUs are not linked (expected), or something does not work
  // (unexpected).
  struct Refusal {
    bool unexpected = false;
    std::string text;  // empty: connected
  };

  // Every rank calls it. Null on all of them if any cannot connect; then `refusal` is set.
  static std::unique_ptr<NvlinkPath> connect(int device, const std::shared_ptr<Group>& group,
                                             std::chrono::milliseconds timeout,
                                             const Exchange& exchange, Refusal* refusal);
  ~NvlinkPath();

  // Waits until the work on the streams has ended; ends what still waits for peers after `timeout`.
  void finish(std::chrono::milliseconds timeout);

  // Puts the operation on a stream; nullopt, on all ranks, if another library is faster at its
  // size.
  //
  // An asynchronous operation that takes long goes to a side stream, so that the caller's next
  // kernels run at the same time. A rank decides that alone. The choice of the library is one of
  // all ranks, so it does not depend on whether the call is asynchronous.
  std::optional<WorkPtr> run(nvlink::Call call, const OperationInfo& info, int rank,
                             uint64_t sequence, const at::Tensor& in, const at::Tensor& out);

  MemoryRegistration registration(Exchange exchange) {
    return MemoryRegistration(*kernels_, std::move(exchange));
  }

  const char* last_algorithm() const;
  std::optional<Error> failure() const { return kernels_->failure(); }
  void abort() { kernels_->abort(); }

 private:
  explicit NvlinkPath(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  const c10::Stream& side_stream(const c10::Stream& user);

  std::shared_ptr<Group> group_;
  std::shared_ptr<nvlink::Communicator> kernels_;
  std::optional<c10::Stream> side_stream_;
};

}  // namespace fsccl
