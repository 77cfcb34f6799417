// Reductions of the vectors at the same offset of every rank's memory.
#pragma once

#include "block_primitives.h"

namespace fsccl {
namespace nvlink {

// As sum_vectors(), of whole vectors and aligned memory. With few ranks a thread reads several
// places at once, so that about eight loads are in flight: with fewer, it waits for memory.
template <class E, int Most, class B, class From, class F>
FSCCL_FN void sum_aligned_vectors(B& b, const KernelArgs& a, From from, u32 first, u32 stride,
                                  u32 whole, F f) {
  constexpr int kPlaces = kMaxRanks / Most;
  const auto exists = [&](int p) { return Most == 2 || p < a.ranks; };
  for (u32 v = first; v < whole; v += kPlaces * stride) {
    Vec loaded[kPlaces][Most];
    FSCCL_UNROLL for (int i = 0; i < kPlaces; ++i) {
      const u32 place = v + i * stride;
      FSCCL_UNROLL for (int p = 0; p < Most; ++p) {
        if (place < whole && exists(p)) {
          loaded[i][p] = b.template load<Vec>(from(p) + u64{place} * kVecBytes);
        }
      }
    }
    FSCCL_UNROLL for (int i = 0; i < kPlaces; ++i) {
      const u32 place = v + i * stride;
      if (place >= whole) break;
      Sum<E, Vec> sum;
      sum.begin_simple(loaded[i][0]);
      FSCCL_UNROLL for (int p = 1; p < Most; ++p) {
        if (exists(p)) sum.add_simple(loaded[i][p]);
      }
      f(true, u64{place} * kVecBytes, sum.finish_simple(a));
    }
  }
}

// The widest accesses that this rank's own memory allows, of its input and its output.
struct Widths {
  u32 in, out;
};

// Reduces every stride-th vector of `bytes` from the first-th on, first < stride, and calls
// f(whole, offset, sum), to store_vector() it. The last vector has zeros beyond `bytes`. from(p) is
// where the input of rank p begins; those of peers begin at a multiple of 16. `Most` ranks, of
// which there may be fewer.
template <class E, int Most, class B, class From, class F>
FSCCL_FN void sum_vectors(B& b, const KernelArgs& a, From from, Widths own, u32 first, u32 stride,
                          u64 bytes, F f) {
  const u32 count = static_cast<u32>((bytes + kVecBytes - 1) / kVecBytes);
  u32 v = first;
  if (Sum<E, Vec>::is_simple(a) && own.in == kVecBytes && own.out == kVecBytes) {
    const u32 whole = static_cast<u32>(bytes / kVecBytes);
    sum_aligned_vectors<E, Most>(b, a, from, first, stride, whole, f);
    v = whole % stride == first ? whole : count;  // one thread reduces the rest
  }
  for (; v < count; v += stride) {
    const u64 at = u64{v} * kVecBytes;
    Sum<E, Vec> sum;
    FSCCL_NO_UNROLL for (int p = 0; p < a.ranks; ++p) {
      const u32 width = p == a.rank ? own.in : kVecBytes;
      sum.add(a, p == 0, load<Vec>(b, from(p) + at, bytes - at, width));
    }
    f(false, at, sum.finish(a));
  }
}

}  // namespace nvlink
}  // namespace fsccl
