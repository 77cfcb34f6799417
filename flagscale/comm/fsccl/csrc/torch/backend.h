// The c10d backend: hands torch's tensors to a core group.
//
// Collectives run one after the other on an executor; a synchronous one runs on its caller's
// thread where it can. Messages go straight to the group's messenger. Between startCoalescing and
// endCoalescing all works are collected and returned as one.
//
// Who does an operation is the same for all ranks of a group, as it follows from what they told
// each other of themselves (devices.cpp):
//   - every rank on its CPU: the core group;
//   - every rank on a device: the core group for tensors of the host; for those of the device the
//     native library where it joins all ranks, else an engine (csrc/device);
//   - ranks of both kinds: the engine for all tensors, which are moved to the rank's device first.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../core/executor.h"
#include "../device/engine.h"
#include "../device/watch.h"
#include "nvlink_path.h"
#include "staged.h"
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
    // Unset: what the environment says.
    std::optional<std::string> algorithm;  // of all_reduce between clusters
    // Of pipelined schedules.
    std::optional<int> pipeline_k;
    std::optional<int64_t> pipeline_nelem;
    std::optional<std::string> tail;  // "bounded" or "exact"
  };

  // What moves this rank's tensors among its like, and who makes that library's backend for one of
  // the group's native clusters.
  struct Home {
    Native native;
    Engine::MakeNative make_native;
  };

  TorchBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
               c10::intrusive_ptr<Options> options, Home home);
  ~TorchBackend() override;

  const std::string getBackendName() const override { return "fsccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(Ms timeout) override;
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

  // How a tensor's collectives are done: "core", "engine" or the native library's name. Waits until
  // all ranks are known.
  std::string path_of(const at::Tensor& t);
  // Lets peers read and write this memory directly (nvlink/engine.h). All ranks call it, with
  // memory that they have allocated alike, and later with tensors at the same places in it.
  void register_memory(const std::string& name, Regions regions);
  // Before it is freed.
  void deregister_memory(const std::string& name);
  // What the last operation took, in words.
  std::string last_algorithm() const { return group_->last_algorithm(); }
  // What this rank has sent by messages: (messages, bytes) by group rank.
  std::map<int, std::pair<uint64_t, uint64_t>> traffic() const;
  // And by datagrams: (datagrams, bytes with their headers).
  std::map<int, std::pair<uint64_t, uint64_t>> datagrams() const;
  // What all_reduces by datagrams have met, by name.
  std::map<std::string, double> tail_statistics() const { return group_->tail_statistics(); }

 private:
  using NativePtr = c10::intrusive_ptr<c10d::Backend>;
  enum class Kinds { kHosts, kDevices, kBoth };
  struct Call {
    c10d::OpType type;
    const char* title;  // for the profiler
    bool async;
    Ms timeout;
  };

  // Of an all_reduce: with or without leave to leave something out, by what the group is for.
  Reduction all_reduction_of(const at::Tensor& t, const c10d::ReduceOp& op) const;
  // Where a tensor's operation is done. Refuses tensors that nothing here moves.
  Site site_of(const at::Tensor& t, const char* op);
  // `body` takes a Group or an Engine.
  template <class F>
  WorkPtr run(const Call& call, const Site& at, Tensors outputs, F body);
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o);
  WorkPtr run_on_host(const Call& call, Tensors outputs,
                      std::function<void(Group&, const Deadline&)> body);
  WorkPtr start(const Call& call, c10::intrusive_ptr<CollectiveWork> work,
                std::function<void(Group&, const Deadline&)> body);
  WorkPtr run_on_device(const Call& call, const Site& at, Tensors outputs,
                        std::function<void(Engine&, const Deadline&)> body);
  // What the core does in bounded time although ranks are on devices (staged.h).
  std::optional<WorkPtr> in_bounded_time(const Call& call, Tensors& tensors,
                                         const c10d::ReduceOp& op);
  bool has_tail();
  WorkPtr staged(const Call& call, Tensors& tensors, const std::vector<Reduction>& how);
  // What the native library does when it joins all ranks; nothing otherwise.
  template <class F>
  std::optional<WorkPtr> by_native(const at::Tensor& t, F&& call);
  // What the NVLink engine does where the native library joins all ranks; `op` of a reduction, else
  // null.
  std::optional<WorkPtr> by_nvlink(const Call& call, nvlink::Collective what, const at::Tensor& in,
                                   const at::Tensor& out, const c10d::ReduceOp* op, int root = 0);
  NvlinkPath* nvlink_path(const at::Tensor& t);
  void check_kernels(const char* title);
  NvlinkPath& path_of_registered(const char* what);
  std::vector<std::string> exchange_words(const std::string& own);
  template <class F>
  WorkPtr call_native(const NativePtr& native, F&& call);
  WorkPtr message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag);
  std::optional<WorkPtr> message_inside(c10d::OpType type, Tensors& tensors, int peer, int tag);
  WorkPtr collect(WorkPtr work);
  Ms limit(Ms asked) const { return asked == c10d::kUnsetTimeout ? options_->timeout : asked; }

  // What is under way when the group ends: how long it may stand still, and a device may work.
  static constexpr Ms kStandsStill{1000}, kLastOfDevice{5000};
  void check_alive() const;
  void check_process() const;  // throws in a forked child
  bool finish_operations();    // false: they stand still
  Kinds kinds();
  bool engine_of_hosts();
  template <class F>
  auto or_fail(const char* what, F&& body) -> decltype(body());
  NativePtr whole_native(const at::Tensor& t);
  Engine* host_engine(const Deadline& d);
  const Clusters& native_clusters();
  NativePtr cluster_native(int cluster, int index, const std::vector<int>& ranks);
  Engine& engine(const Deadline& d);
  void wait_for_device();
  void abort_devices();
  void stop_devices();

  c10::intrusive_ptr<Options> options_;
  Home home_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Executor> executor_;   // of collectives
  std::shared_ptr<Executor> callbacks_;  // of messages: no operation waits behind one
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> collected_;
  NativePtr coalescing_native_;  // which has been told so too

  std::mutex device_mutex_;  // guards the making of what follows, and the engine's use by devices
  std::optional<Kinds> kinds_;
  std::optional<NativePtr> whole_;  // null: the native library joins only some
  std::optional<std::unique_ptr<NvlinkPath>> nvlink_;  // null: some rank cannot
  std::atomic<NvlinkPath*> connected_{nullptr};        // the same, for any thread
  std::map<std::string, Regions> registered_;  // by pool
  std::optional<Clusters> clusters_;  // of ranks that a native library joins
  NativePtr cluster_native_;          // in this rank's; null: not needed so far
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Watch> watch_;  // of a device's operations
  std::optional<bool> has_tail_;
  std::unique_ptr<Staging> staging_;  // of sums that the core does
};

}  // namespace fsccl
