// Device engine: collectives of a group whose ranks have different native libraries. Inside a
// cluster the native library transfers the data, between clusters host memory does.
//
// A native library is one that a rank uses for its tensors, such as NCCL or gloo. A cluster is the
// set of ranks that use the same one. The exchange between clusters does not depend on their
// libraries, so ranks on GPUs and ranks on CPUs take part in the same operation.
//
// A cluster of n ranks divides the data that it exchanges with other clusters into n equal
// intervals, and its rank i owns interval i. The owners of intervals in two clusters exchange the
// intersections of their intervals, so every byte is sent once and every rank's link to its host is
// used. Large buffers are divided into chunks: begin(k) reduces chunk k inside the cluster and
// sends it, end(k) receives the other clusters' data of the chunk, reduces it and gathers it inside
// the cluster. begin(k+2) comes before end(k), so two chunks are in flight.
//
// In a reduction every owner reduces the clusters' partial results in the order of clusters, with
// operations that round in the same way on every device (tensor_reduce.h), so all ranks get the
// same bits.
//
// Small operations take other ways if all ranks are on one host:
// - With at most eight ranks, all on GPUs that have the NVLink engine's kernels, one kernel runs an
//   operation of equal parts (host_memory_kernels.h), up to the size from which the transfer over
//   the bus takes longer than the steps that the kernel saves.
// - Operations of at most tiny_bytes per rank: every rank writes its part to the control block
//   (shared_control_block.h) and reads all parts.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/group.h"
#include "host_memory_kernels.h"
#include "local_communicator.h"
#include "pipe.h"
#include "scratch_allocator.h"
#include "shared_control_block.h"
#include "streams.h"

namespace fsccl {

// Pointers passed to the collectives are to memory of the streams' device. One thread at a time
// calls the collectives; other methods say so if any thread may call them.
class DeviceEngine final : public Collectives {
 public:
  // Creates the streams. Its argument is a function to call during a wait for a word that `peer`
  // writes (HostStreams in streams.h).
  using MakeStreams = std::function<std::unique_ptr<Streams>(std::function<void(int peer)>)>;
  // Creates the native library's backend for cluster number `cluster` of the group, which consists
  // of `ranks`, of which this one is at `index`.
  using MakeNative = std::function<LocalCommunicator::Backend(int cluster, int index,
                                                              const std::vector<int>& ranks)>;

  // Waits for all ranks. Throws Error, also at the deadline.
  DeviceEngine(std::shared_ptr<Group> group, const MakeStreams& make_streams,
               const MakeNative& make_native, const Deadline& d);
  ~DeviceEngine();

  void all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                  const Deadline& d) override;
  void reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
              const Deadline& d) override;
  void reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                      const Deadline& d) override;
  void all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                  size_t width) override;
  void broadcast(const BufferList& buffer, int root, const Deadline& d) override;
  void gather(const BufferList& in, const BufferLists& out, int root, const Deadline& d) override;
  void scatter(const BufferLists& in, const BufferList& out, int root, const Deadline& d) override;
  void all_to_all(const BufferLists& send, const BufferLists& recv, const Deadline& d) override;
  // The group's barrier, in order with this engine's operations. Only for groups without devices.
  void barrier(const Deadline& d) override;

  Streams& streams() { return *streams_; }
  Group& group() { return *group_; }

  // Throws if a rank of this host has ended or the group has failed. Any thread may call.
  void check_peers() const;
  // Aborts operations that wait in the native library or in a kernel. Any thread may call.
  void abort();
  // See LocalCommunicator.
  bool abandoned() const { return local_->abandoned(); }
  bool has_kernels() const { return kernels_ != nullptr; }
  // Throws if a kernel has failed. Any thread may call.
  void check_kernels() const {
    if (kernels_) kernels_->check();
  }
  // Reports the error to all ranks of this host, aborts calls of the native library, fails the
  // group, and throws. Any thread may call.
  [[noreturn]] void fail(const char* operation, uint64_t sequence, const Error& error);
  void shutdown();

 private:
  struct PipelineChunk;
  using Tensors = std::vector<at::Tensor>;

  static constexpr size_t kChunksInFlight = 2;

  template <class F>
  void run_operation(CollectiveFingerprint fingerprint, const Deadline& d, F&& body);
  template <class Begin, class End>
  void run_pipelined(size_t chunks, Begin&& begin, End&& end);

  void open_control_block(const Deadline& d);
  void open_kernels(const Deadline& d);
  bool run_as_kernel(nvlink::Collective collective, const Tensors& in, const Tensors& out,
                     const Reduction& r, const CollectiveFingerprint& fingerprint, int root = 0);
  bool is_same_host(int rank) const;
  void check_wait(int peer);
  Error attribute_error(const Error& error);
  void log_algorithm(const CollectiveFingerprint& fingerprint, const char* algorithm) const;

  size_t size_of(int cluster) const { return clusters_.ranks[static_cast<size_t>(cluster)].size(); }
  int rank_of(int cluster, size_t i) const {
    return clusters_.ranks[static_cast<size_t>(cluster)][i];
  }
  size_t own_index() const { return static_cast<size_t>(clusters_.own_index); }
  bool has_other_clusters() const { return clusters_.count() > 1; }
  bool is_single_host() const;
  bool is_tiny(size_t bytes) const;
  int cluster_of(int rank) const;
  size_t chunk_elements(size_t count, size_t width, size_t parts) const;
  size_t smallest_cluster_size() const;

  Pipe& send_pipe(int peer);
  Pipe& receive_pipe(int peer);

  at::Tensor wrap_memory(const void* data, size_t count, at::ScalarType type) const;
  Tensors wrap_buffers(const BufferLists& list, at::ScalarType type) const;
  at::Tensor exchange_tiny(const at::Tensor& part, size_t stride);
  Tensors tiny_parts(const at::Tensor& exchanged, size_t stride, size_t bytes) const;

  void reduce_tensor(const at::Tensor& in, const at::Tensor& out, const Reduction& r, int root,
                     const CollectiveFingerprint& fingerprint);
  void begin_reduce(PipelineChunk& c, const at::Tensor& in, const Reduction& r, int to_cluster);
  void end_reduce(PipelineChunk& c, const at::Tensor& out, const Reduction& r, int root);
  void reduce_scatter_tiny(const Tensors& parts, const at::Tensor& out, const Reduction& r);
  void begin_reduce_scatter(PipelineChunk& c, const Tensors& in, size_t lo, size_t window,
                            const Reduction& r);
  void end_reduce_scatter(PipelineChunk& c, const Tensors& in, const at::Tensor& out, size_t lo,
                          size_t window, const Reduction& r);
  void begin_all_gather(PipelineChunk& c, const Tensors& out, size_t lo, size_t window);
  void end_all_gather(PipelineChunk& c, const Tensors& out, size_t lo, size_t window);
  void unpack_window(const at::Tensor& packed, const Tensors& out, int cluster, size_t lo,
                     size_t window);
  void broadcast_pipelined(const at::Tensor& buffer, int root);
  void exchange_pairs(const CollectiveFingerprint& operation, const BufferLists& send,
                      const BufferLists& recv, const Deadline& d);
  void check_own_part(const BufferList& send, const BufferList& recv) const;
  void exchange_within_cluster(const Tensors& send, const Tensors& recv);
  void exchange_across_clusters(const Tensors& send, const Tensors& recv);

  std::shared_ptr<Group> group_;
  const Settings& config_;
  RankPartition clusters_;
  std::vector<Identity> identities_;
  int rank_;
  bool all_on_devices_ = true;
  std::unique_ptr<Streams> streams_;
  std::unique_ptr<SharedControlBlock> control_block_;
  std::shared_ptr<void> control_block_registration_;
  std::unique_ptr<HostMemoryKernels> kernels_;  // null: not supported by all ranks, or disabled
  std::unique_ptr<LocalCommunicator> local_;
  std::unique_ptr<ScratchAllocator> scratch_;
  std::map<int, Pipe> send_pipes_, receive_pipes_;  // by peer
  mutable std::mutex proxy_error_mutex_;
  std::unique_ptr<Error> proxy_error_;
  uint64_t sequence_ = 0;
  uint32_t exchange_step_ = 0;  // number of exchanges through the control block
  std::atomic<int> peer_that_left_{-1};  // rank that check_wait() has found to have left
  bool shut_down_ = false;
  Deadline deadline_ = Deadline::after(Deadline::Ms(0));  // of the current operation
  std::unique_ptr<ProxyThread> proxy_;                    // destroyed first
};

}  // namespace fsccl
