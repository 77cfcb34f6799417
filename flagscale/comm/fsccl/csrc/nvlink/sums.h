// Sums of what lies at the same place of every rank's memory, vector by vector.
#pragma once

#include "access.h"

namespace fsccl {
namespace nvlink {

// As sum_vectors() of whole vectors and aligned memory. Few ranks read several places at once, so
// that about eight loads are in flight: with less, time goes by waiting for memory.
template <class E, int Most, class B, class From, class F>
FSCCL_FN void sum_plainly(B& b, const Args& a, From from, u32 first, u32 stride, u32 whole, F f) {
  constexpr int kPlaces = kMaxRanks / Most;
  const auto there = [&](int p) { return Most == 2 || p < a.ranks; };
  for (u32 v = first; v < whole; v += kPlaces * stride) {
    Vec held[kPlaces][Most];
    FSCCL_UNROLL for (int i = 0; i < kPlaces; ++i) {
      const u32 place = v + i * stride;
      FSCCL_UNROLL for (int p = 0; p < Most; ++p) {
        if (place < whole && there(p)) {
          held[i][p] = b.template load<Vec>(from(p) + u64{place} * kVecBytes);
        }
      }
    }
    FSCCL_UNROLL for (int i = 0; i < kPlaces; ++i) {
      const u32 place = v + i * stride;
      if (place >= whole) break;
      Sum<E, Vec> sum;
      sum.begin_plainly(held[i][0]);
      FSCCL_UNROLL for (int p = 1; p < Most; ++p) {
        if (there(p)) sum.add_plainly(held[i][p]);
      }
      f(true, u64{place} * kVecBytes, sum.finish_plainly(a));
    }
  }
}

// The widest accesses that this rank's own memory allows: of its input, and where sums go.
struct Widths {
  u32 in, out;
};

// Every stride-th vector of `bytes` from the first-th on, first < stride: f(whole, offset, sum), to
// put() it. What is beyond `bytes` in the last one is zeros. from(p) is where the input of rank p
// begins; those of others at a multiple of 16. `Most` ranks, of which there may be fewer.
template <class E, int Most, class B, class From, class F>
FSCCL_FN void sum_vectors(B& b, const Args& a, From from, Widths own, u32 first, u32 stride,
                          u64 bytes, F f) {
  const u32 count = static_cast<u32>((bytes + kVecBytes - 1) / kVecBytes);
  u32 v = first;
  if (Sum<E, Vec>::plain(a) && own.in == kVecBytes && own.out == kVecBytes) {
    const u32 whole = static_cast<u32>(bytes / kVecBytes);
    sum_plainly<E, Most>(b, a, from, first, stride, whole, f);
    v = whole % stride == first ? whole : count;  // the rest is one thread's
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
