// Path for a group's collectives of CUDA tensors by the NVLink engine (nvlink/engine.h), which runs
// each as one kernel on a stream.
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

// Work of a collective that is one kernel on a stream. If the kernel is on the caller's stream, an
// event is recorded only when another stream waits for the work, which then also waits for later
// work on the caller's stream. If it is on a side stream, the event is recorded at once, so that
// later work can overlap.
class NvlinkWork : public c10d::Work {
 public:
  NvlinkWork(int rank, const OperationInfo& info, uint64_t sequence,
             std::vector<at::Tensor> outputs, c10::Stream stream,
             std::shared_ptr<nvlink::Communicator> kernels, std::shared_ptr<Group> group,
             std::optional<c10::Event> end)
      : Work(rank, info.type, info.title, info.inputs.vec()),
        outputs_(std::move(outputs)),
        stream_(stream),
        kernels_(std::move(kernels)),
        group_(std::move(group)),
        sequence_(sequence),
        end_event_(std::move(end)) {}

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
  std::optional<c10::Event> end_event_;  // unset: not recorded yet
};

// A group's connection to the NVLink engine of this rank's GPU.
//
// run() and registration() are called by the thread that calls the backend; failure() and abort()
// by any thread.
class NvlinkPath {
 public:
  using Exchange = MemoryRegistration::Exchange;

  // Reason for which the ranks could not connect: their GPUs are not linked (expected), or an error
  // (unexpected).
  struct ConnectFailure {
    bool is_unexpected = false;
    std::string text;  // empty: the ranks are connected
  };

  // Connects the ranks of the group, all of which call it. Returns null on all ranks if any cannot
  // connect, and sets `connect_failure`. `exchange` is an all-gather of one string per rank.
  static std::unique_ptr<NvlinkPath> connect(int device, const std::shared_ptr<Group>& group,
                                             std::chrono::milliseconds timeout,
                                             const Exchange& exchange,
                                             ConnectFailure* connect_failure);
  ~NvlinkPath();

  // Waits until all kernels have ended; aborts those that still wait for peers after `timeout`.
  void finish(std::chrono::milliseconds timeout);

  // Launches the operation's kernel. Returns nullopt, on all ranks, if another library is faster at
  // its size.
  //
  // A large asynchronous operation runs on a side stream, so that the caller's next kernels run at
  // the same time. Each rank decides that by itself. All ranks must choose the same library, so
  // that choice does not depend on whether the call is asynchronous.
  std::optional<WorkPtr> run(nvlink::Call call, const OperationInfo& info, int rank,
                             uint64_t sequence, const at::Tensor& in, const at::Tensor& out);

  MemoryRegistration registration(Exchange exchange) {
    return MemoryRegistration(*kernels_, std::move(exchange));
  }

  const char* last_algorithm() const;
  std::optional<Error> failure() const { return kernels_->failure(); }
  void abort() { kernels_->abort(); }
  // Returns a function that returns whether all operations enqueued so far have ended.
  std::function<bool()> completion_query() const {
    return [weak = std::weak_ptr<nvlink::Communicator>(kernels_)] {
      const auto kernels = weak.lock();
      return !kernels || kernels->idle();
    };
  }

 private:
  explicit NvlinkPath(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  const c10::Stream& side_stream(const c10::Stream& caller_stream);

  std::shared_ptr<Group> group_;
  std::shared_ptr<nvlink::Communicator> kernels_;
  std::optional<c10::Stream> side_stream_;
};

}  // namespace fsccl
