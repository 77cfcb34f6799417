// The c10d backend: hands torch's tensors to a core group.
//
// Collectives run one after the other on an executor; a synchronous one runs on its caller's
// thread where it can. Messages go straight to the group's messenger. Between startCoalescing and
// endCoalescing all works are collected and returned as one.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../core/executor.h"
#include "work.h"

namespace fsccl {

class TorchBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Ms = std::chrono::milliseconds;

  struct Options : c10d::Backend::Options {
    explicit Options(Ms timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("fsccl", timeout) {}
    // Of pipelined schedules; unset: what the environment says.
    std::optional<int> pipeline_k;
    std::optional<int64_t> pipeline_nelem;
  };

  TorchBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
               c10::intrusive_ptr<Options> options);
  ~TorchBackend() override;

  const std::string getBackendName() const override { return "fsccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(Ms timeout) override { options_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}  // every rank counts from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override;
  // All backends of this process. torch keeps them alive without Python's knowing, and a thread
  // that still runs when the process ends would abort it.
  static void shutdown_all();

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override;
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override;
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& o) override;
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in,
                              const c10d::AllgatherOptions& o) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::AllgatherOptions& o) override;
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override;
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override;
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in,
                         const c10d::ReduceScatterOptions& o) override;
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& o) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& o) override;
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_rows,
                        std::vector<int64_t>& in_rows, const c10d::AllToAllOptions& o) override;
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override;
  WorkPtr barrier(const c10d::BarrierOptions& o) override;
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  using Body = std::function<void(Group&, const Deadline&)>;
  struct Call {
    c10d::OpType type;
    const char* title;  // for the profiler
    bool async;
    Ms timeout;
  };

  WorkPtr run(const Call& call, Tensors outputs, Body body);
  WorkPtr message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag);
  WorkPtr collect(WorkPtr work);
  Ms limit(Ms asked) const { return asked == c10d::kUnsetTimeout ? options_->timeout : asked; }

  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Group> group_;
  std::unique_ptr<Executor> executor_;
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> collected_;
};

}  // namespace fsccl
