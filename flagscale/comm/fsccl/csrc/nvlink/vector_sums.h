// Reductions of the vectors at the same offset of every rank's memory.
#pragma once

#include "block_primitives.h"

namespace fsccl {
namespace nvlink {

// sum_vectors() for `whole_vectors` complete vectors in aligned memory. With few ranks a thread
// reads several vectors at once, so that about eight loads are in flight; with fewer, it would wait
// for memory.
template <class E, int RankCapacity, class B, class From, class F>
FSCCL_FN void sum_aligned_vectors(B& b, const KernelArgs& a, From from, u32 first, u32 stride,
                                  u32 whole_vectors, F store_sum) {
  constexpr int kVectorsAtOnce = kMaxRanks / RankCapacity;
  const auto exists = [&](int p) { return RankCapacity == 2 || p < a.ranks; };
  for (u32 v = first; v < whole_vectors; v += kVectorsAtOnce * stride) {
    Vec loaded[kVectorsAtOnce][RankCapacity];
    FSCCL_UNROLL for (int i = 0; i < kVectorsAtOnce; ++i) {
      const u32 index = v + i * stride;
      FSCCL_UNROLL for (int p = 0; p < RankCapacity; ++p) {
        if (index < whole_vectors && exists(p)) {
          loaded[i][p] = b.template load<Vec>(from(p) + u64{index} * kVecBytes);
        }
      }
    }
    FSCCL_UNROLL for (int i = 0; i < kVectorsAtOnce; ++i) {
      const u32 index = v + i * stride;
      if (index >= whole_vectors) break;
      Sum<E, Vec> sum;
      sum.begin_simple(loaded[i][0]);
      FSCCL_UNROLL for (int p = 1; p < RankCapacity; ++p) {
        if (exists(p)) sum.add_simple(loaded[i][p]);
      }
      store_sum(true, u64{index} * kVecBytes, sum.finish_simple(a));
    }
  }
}

// Bytes of the widest accesses that this rank's own input and output allow.
struct Widths {
  u32 in, out;
};

// Reduces the 16-byte vectors number first, first + stride, ... (first < stride) of the ranks'
// inputs of `bytes`, and calls store_sum(is_whole, offset, sum) for each, which stores it with
// store_vector(). The last vector has zeros beyond `bytes`. from(p) returns the address of rank p's
// input; those of peers are multiples of 16. There are at most RankCapacity ranks.
template <class E, int RankCapacity, class B, class From, class F>
FSCCL_FN void sum_vectors(B& b, const KernelArgs& a, From from, Widths own_widths, u32 first,
                          u32 stride, u64 bytes, F store_sum) {
  const u32 count = static_cast<u32>((bytes + kVecBytes - 1) / kVecBytes);
  u32 v = first;
  if (Sum<E, Vec>::is_simple(a) && own_widths.in == kVecBytes && own_widths.out == kVecBytes) {
    const u32 whole_vectors = static_cast<u32>(bytes / kVecBytes);
    sum_aligned_vectors<E, RankCapacity>(b, a, from, first, stride, whole_vectors, store_sum);
    v = whole_vectors % stride == first ? whole_vectors : count;  // one thread reduces the rest
  }
  for (; v < count; v += stride) {
    const u64 offset = u64{v} * kVecBytes;
    Sum<E, Vec> sum;
    FSCCL_NO_UNROLL for (int p = 0; p < a.ranks; ++p) {
      const u32 width = p == a.rank ? own_widths.in : kVecBytes;
      sum.add(a, p == 0, load<Vec>(b, from(p) + offset, bytes - offset, width));
    }
    store_sum(false, offset, sum.finish(a));
  }
}

}  // namespace nvlink
}  // namespace fsccl
