// The c10d backend: collectives and messages of torch's tensors over a core group.
//
// The parts of this directory:
//   backend       life of a group, messages, torch's interface
//   operations    the collectives: check the arguments, describe the call (sparse: sparse tensors)
//   dispatch      offers a call to the paths that may carry it out, and runs it
//   router        chooses and owns the libraries behind the paths
//   operation_queue  numbers operations, runs those of the host in order, coalesces
//   bounded_path, nvlink_path  two of the paths
//   work, device_work  what operations return
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../core/executor.h"
#include "bounded_path.h"
#include "dispatch.h"
#include "operation_queue.h"
#include "router.h"

namespace fsccl {

// One group of one rank. torch calls it from one thread at a time.
class TorchBackend : public c10d::Backend {
 public:
  using TensorLists = std::vector<Tensors>;

  struct Options : c10d::Backend::Options {
    explicit Options(Milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("fsccl", timeout) {}
    // Unset options have the value of the environment.
    std::optional<std::string> algorithm;  // of all_reduce between nodes
    std::optional<int> pipeline_k;         // of pipelined schedules, as is the next
    std::optional<int64_t> pipeline_nelem;
    std::optional<std::string> tail;  // "bounded" or "exact"
  };

  // `native` describes the library that moves this rank's tensors among ranks of its kind, and
  // `make_native` makes that library's backend for one of the group's native clusters.
  TorchBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
               c10::intrusive_ptr<Options> options, NativeLibrary native,
               DeviceEngine::MakeNative make_native);
  ~TorchBackend() override;

  const std::string getBackendName() const override { return "fsccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { queue_.start_coalescing(); }
  WorkPtr endCoalescing() override { return queue_.end_coalescing(); }
  void setSequenceNumberForGroup() override {}  // every rank counts from 0
  uint64_t getSequenceNumberForGroup() override { return queue_.sequence(); }
  c10d::ErrorType getError() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override;
  // Shuts down all backends of this process. torch keeps them alive without Python's knowing, and a
  // thread that still runs when the process ends would abort it.
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

  // Returns how a tensor's collectives are done: "core", "engine" or the native library's name.
  // Waits until all ranks are known.
  std::string path_of(const at::Tensor& t) { return router_.path_of(t); }
  // See Router.
  void register_memory(const std::string& name, Regions regions) {
    router_.register_memory(name, std::move(regions));
  }
  void deregister_memory(const std::string& name) { router_.deregister_memory(name); }
  // Description of the algorithm of the last operation.
  std::string last_algorithm() const { return group_->last_algorithm(); }
  // Messages and bytes that this rank has sent, by group rank.
  std::map<int, std::pair<uint64_t, uint64_t>> traffic() const;
  // Datagrams, and bytes with their headers.
  std::map<int, std::pair<uint64_t, uint64_t>> datagrams() const;
  // Counters of the all_reduces in bounded time, by name.
  std::map<std::string, double> tail_statistics() const { return group_->bounded_statistics(); }

 private:
  // dispatch.cpp
  WorkPtr dispatch(const CollectiveCall& call, NativeCall native_call, Prepare prepare);
  std::optional<WorkPtr> run_on_nvlink(const OperationInfo& info, const NvlinkOperands& operands);
  std::optional<WorkPtr> run_natively(const at::Tensor& reference, NativeCall call);
  WorkPtr run_on_host(const OperationInfo& info, PreparedCollective prepared);
  WorkPtr run_on_device(const OperationInfo& info, const Placement& placement,
                        PreparedCollective prepared);
  WorkPtr send_or_receive(c10d::OpType type, const char* title, Tensors& tensors, int peer,
                          int tag);
  std::optional<WorkPtr> send_or_receive_natively(c10d::OpType type, Tensors& tensors, int peer,
                                                  int tag);
  // operations.cpp, sparse.cpp
  Reduction all_reduction_of(const at::Tensor& t, const c10d::ReduceOp& op) const;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o);

  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Executor> callbacks_;  // of messages: no operation waits behind one
  OperationQueue queue_;
  Router router_;
  BoundedPath bounded_;
};

}  // namespace fsccl
