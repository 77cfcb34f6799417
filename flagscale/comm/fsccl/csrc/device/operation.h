// Helpers of the device engine's operations. Included by their sources only.
#pragma once

#include <array>

#include "engine.h"
#include "tensor_reduce.h"

namespace fsccl {

// A chunk of a pipelined operation. Its memory is used again kChunksInFlight + 1 chunks later:
// steps enqueued for that chunk wait for the events of this one.
struct DeviceEngine::PipelineChunk {
  at::Tensor work, shard, shard_memory, sum;
  Tensors shards, shard_memories, received;  // by cluster
  StreamEvent native_done;                   // steps of kNative that this chunk needs
  StreamEvent sends_done;                    // copies of this chunk to host memory
};

template <class F>
void DeviceEngine::run_operation(CollectiveFingerprint fingerprint, const Deadline& d, F&& body) {
  fingerprint.sequence = ++sequence_;
  deadline_ = d;
  const at::NoGradGuard no_grad;
  const StreamScope native(*streams_, StreamId::kNative);
  try {
    if (shut_down_) throw Error(Fault::kAborted, rank_, "the group has been shut down");
    check_peers();
    control_block_->publish(fingerprint);
    proxy_->begin(fingerprint);
    scratch_->reset();
    body(fingerprint);
  } catch (const Error& e) {
    if (e.fault == Fault::kUsage) throw;
    fail(name_of(fingerprint.op), fingerprint.sequence, e);
  } catch (const std::exception& e) {  // such as no memory, while others wait for this rank
    const auto* const of_torch = dynamic_cast<const c10::Error*>(&e);
    const std::string text = of_torch != nullptr ? of_torch->what_without_backtrace() : e.what();
    fail(name_of(fingerprint.op), fingerprint.sequence,
         Error(Fault::kSystem, rank_, group_->name(rank_) + ": " + text));
  }
}

template <class Begin, class End>
void DeviceEngine::run_pipelined(size_t chunks, Begin&& begin, End&& end) {
  constexpr size_t kLag = kChunksInFlight;
  std::array<PipelineChunk, kLag + 1> ring;
  streams_->fork();
  for (size_t k = 0; k < chunks + kLag; ++k) {
    if (k < chunks) begin(ring[k % ring.size()], k);
    if (k >= kLag && k - kLag < chunks) end(ring[(k - kLag) % ring.size()], k - kLag);
  }
  streams_->join();
}

// The i-th of `parts` equal parts of [0, n), of which the last may be short or empty.
inline Interval equal_part(size_t n, size_t parts, size_t i) {
  const size_t part = ceil_div(n, parts);
  return {std::min(i * part, n), std::min((i + 1) * part, n)};
}

inline at::Tensor slice(const at::Tensor& t, size_t lo, size_t n) {
  return t.narrow(0, static_cast<int64_t>(lo), static_cast<int64_t>(n));
}

inline at::Tensor as_bytes(const at::Tensor& t) { return t.view(at::kByte); }

// Elements of a part that lie in the window [lo, lo + window).
inline size_t length_in_window(const at::Tensor& part, size_t lo, size_t window) {
  const auto n = static_cast<size_t>(part.numel());
  return n > lo ? std::min(n - lo, window) : 0;
}

// The first `n` elements of `memory`, which is allocated when it is too small.
inline at::Tensor reserve(ScratchAllocator& scratch, at::Tensor& memory, size_t n,
                          at::ScalarType type) {
  if (!memory.defined() || static_cast<size_t>(memory.numel()) < n) {
    memory = scratch.allocate(static_cast<int64_t>(n), type);
  }
  return slice(memory, 0, n);
}

// The fingerprint of an operation whose sizes all ranks know.
inline CollectiveFingerprint dense_fingerprint(OpCode op, size_t bytes, const Reduction* r,
                                               int root, uint64_t layout = 0) {
  CollectiveFingerprint fingerprint;
  fingerprint.op = op;
  fingerprint.bytes = bytes;
  fingerprint.root = root;
  fingerprint.layout = layout;
  if (r != nullptr) {
    fingerprint.dtype = r->dtype;
    fingerprint.red = r->op;
  }
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

// Distance between the parts of ranks in the control block's area.
inline size_t aligned_stride(size_t bytes) { return ceil_div(bytes, kCacheLine) * kCacheLine; }

}  // namespace fsccl
