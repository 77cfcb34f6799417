// Helpers of the device engine's operations (engine.h). Included by their sources only.
#pragma once

#include <array>

#include "engine.h"
#include "tensor_reduce.h"

namespace fsccl {

// Buffers and events of a chunk of a pipelined operation. The chunk kChunksInFlight + 1 later uses
// the same buffers; its steps wait for the events of this one. A shard is the interval of a reduced
// chunk that this rank owns.
struct DeviceEngine::PipelineChunk {
  at::Tensor work;   // a padded or packed input, or a gathered output
  at::Tensor shard;  // result of the reduction inside the cluster, in shard_memory or the input
  at::Tensor shard_memory;
  at::Tensor sum;                            // the shard reduced over all clusters
  Tensors shards, shard_memories, received;  // the same by cluster; data received from each
  StreamEvent native_done;  // end of the steps on kNative whose results other streams use
  StreamEvent sends_done;   // end of the copies of this chunk to host memory
};

template <class F>
void DeviceEngine::run_operation(CollectiveFingerprint fingerprint, const Deadline& d, F&& body) {
  fingerprint.sequence = ++sequence_;
  deadline_ = d;
  const at::NoGradGuard no_grad;
  const StreamScope native(*streams_, StreamId::kNative);
  try {
    if (shut_down_) throw Error(Fault::kAborted, rank_, kShutDown);
    check_peers();
    control_block_->publish(fingerprint);
    proxy_->begin(fingerprint);
    scratch_->reset();
    body(fingerprint);
  } catch (const Error& e) {
    if (e.fault == Fault::kUsage) throw;
    fail(name_of(fingerprint.op), fingerprint.sequence, e);
  } catch (const std::exception& e) {  // such as out of memory: other ranks wait for this one
    const auto* const c10_error = dynamic_cast<const c10::Error*>(&e);
    const std::string text = c10_error != nullptr ? c10_error->what_without_backtrace() : e.what();
    fail(name_of(fingerprint.op), fingerprint.sequence,
         Error(Fault::kSystem, rank_, group_->name(rank_) + ": " + text));
  }
}

template <class Begin, class End>
void DeviceEngine::run_pipelined(size_t chunks, Begin&& begin, End&& end) {
  constexpr size_t kLagChunks = kChunksInFlight;
  std::array<PipelineChunk, kLagChunks + 1> ring;
  streams_->fork();
  for (size_t k = 0; k < chunks + kLagChunks; ++k) {
    if (k < chunks) begin(ring[k % ring.size()], k);
    if (k >= kLagChunks && k - kLagChunks < chunks)
      end(ring[(k - kLagChunks) % ring.size()], k - kLagChunks);
  }
  streams_->join();
}

// Returns the i-th of `parts` equal parts of [0, n), of which the last ones may be short or empty.
inline Interval equal_part(size_t n, size_t parts, size_t i) {
  const size_t part = ceil_div(n, parts);
  return {std::min(i * part, n), std::min((i + 1) * part, n)};
}

inline at::Tensor slice(const at::Tensor& t, size_t lo, size_t n) {
  return t.narrow(0, static_cast<int64_t>(lo), static_cast<int64_t>(n));
}

inline at::Tensor as_bytes(const at::Tensor& t) { return t.view(at::kByte); }

// Returns how many elements of a part lie in the window [lo, lo + window).
inline size_t length_in_window(const at::Tensor& part, size_t lo, size_t window) {
  const auto n = static_cast<size_t>(part.numel());
  return n > lo ? std::min(n - lo, window) : 0;
}

// Returns the first `n` elements of `memory`, after allocating it if it is too small.
inline at::Tensor reserve(ScratchAllocator& scratch, at::Tensor& memory, size_t n,
                          at::ScalarType type) {
  if (!memory.defined() || static_cast<size_t>(memory.numel()) < n) {
    memory = scratch.allocate(static_cast<int64_t>(n), type);
  }
  return slice(memory, 0, n);
}

// Returns the fingerprint of an operation whose sizes all ranks know; ranks compare fingerprints to
// detect that they call different operations.
inline CollectiveFingerprint dense_fingerprint(OpCode op, size_t bytes, DType dtype, int root,
                                               uint64_t sizes_hash = 0) {
  CollectiveFingerprint fingerprint;
  fingerprint.op = op;
  fingerprint.bytes = bytes;
  fingerprint.dtype = dtype;
  fingerprint.root = root;
  fingerprint.sizes_hash = sizes_hash;
  return fingerprint;
}

inline CollectiveFingerprint dense_fingerprint(OpCode op, size_t bytes, const Reduction& r,
                                               int root, uint64_t sizes_hash = 0) {
  CollectiveFingerprint fingerprint = dense_fingerprint(op, bytes, r.dtype, root, sizes_hash);
  fingerprint.red_op = r.op;
  return fingerprint;
}

inline size_t total_bytes(const BufferLists& list) {
  size_t n = 0;
  for (const BufferList& p : list) n += p.bytes();
  return n;
}

inline size_t longest_part_bytes(const BufferLists& list) {
  size_t n = 0;
  for (const BufferList& p : list) n = std::max(n, p.bytes());
  return n;
}

// Returns the distance in bytes between the ranks' parts in the control block's area.
inline size_t aligned_stride(size_t bytes) { return ceil_div(bytes, kCacheLine) * kCacheLine; }

}  // namespace fsccl
