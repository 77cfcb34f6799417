// TorchBackend: fsccl as a c10d backend of torch.distributed. Runs collectives and messages of
// torch's tensors over a core group (core/group.h).
//
// The parts of this directory:
//   backend           construction and shutdown of a group, messages, torch's interface
//   operations        the collectives: check the arguments and describe the call
//   sparse            all_reduce of sparse tensors
//   dispatch          offers a call to the paths that may run it, in turn
//   router            chooses and owns the libraries that the paths use
//   operation_queue   numbers operations, runs those on host memory in order, coalesces
//   bounded_path      path for all_reduces in bounded time
//   nvlink_path       path for the NVLink engine
//   work, device_work the c10d::Work that an operation returns
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

// The backend of one rank for one group. torch calls it from one thread at a time.
class TorchBackend : public c10d::Backend {
 public:
  using TensorLists = std::vector<Tensors>;

  struct Options : c10d::Backend::Options {
    explicit Options(Milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("fsccl", timeout) {}
    // An option that is not set takes its value from the environment (FSCCL_* variables).
    std::optional<std::string> algorithm;   // of all_reduce between nodes
    std::optional<int> pipeline_k;          // pipelined schedules: number of chunks; 0: do not use
    std::optional<int64_t> pipeline_nelem;  // pipelined schedules: elements per send
    // "bounded": all_reduces may omit contributions of late ranks to finish in bounded time
    // (datagram/bounded_all_reduce.h); "exact": never.
    std::optional<std::string> tail;
    std::string generation;  // under which the group keeps its keys in the store
  };

  // `native` describes the native library of this rank: the one that transfers its tensors to other
  // ranks with the same library (such as NCCL), which together form a native cluster. `make_native`
  // creates that library's backend for this rank's cluster.
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
  // Shuts down all backends of this process. To be called before the process ends: torch keeps
  // backends alive without a reference in Python, and a thread that still ran at exit would abort
  // the process.
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

  // Returns which library runs collectives of a tensor: "core", "engine" (the device engine) or the
  // native library's name. Waits until all ranks are known.
  std::string path_of(const at::Tensor& t) { return router_.path_of(t); }
  // See Router.
  void register_memory(const std::string& name, Regions regions) {
    router_.register_memory(name, std::move(regions));
  }
  void deregister_memory(const std::string& name) { router_.deregister_memory(name); }
  // Throws ValueError if an option or an environment variable is invalid, as the constructor does.
  static void check_settings(int rank, int size, const Options& options);
  const std::string& generation() const { return options_->generation; }
  // Description of the algorithm of the last operation.
  std::string last_algorithm() const { return group_->last_algorithm(); }
  // Messages and bytes that this rank has sent, by group rank of the receiver.
  std::map<int, std::pair<uint64_t, uint64_t>> traffic() const;
  // The same for datagrams; bytes include their headers.
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
  // Runs callbacks of messages, on a thread of their own so that no operation waits for one.
  const std::shared_ptr<Executor> callbacks_;
  OperationQueue queue_;
  Router router_;
  BoundedPath bounded_;
};

}  // namespace fsccl
