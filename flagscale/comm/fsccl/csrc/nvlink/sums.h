// Sums of what lies at the same place of every rank's memory, vector by vector.
#pragma once

#include "access.h"

namespace fsccl {
namespace nvlink {

constexpr u32 kVecBytes = sizeof(Vec);

// As sum_vectors() of whole vectors and aligned memory. Few ranks read several places at once, so
// that about eight loads are in flight: with less, time goes by waiting for memory.
template <class E, class B, class From, class F>
FSCCL_FN void sum_plainly(B& b, const Args& a, From from, u64 first, u64 stride, u64 whole, F f) {
  const int places = kMaxRanks / a.ranks, loads = places * a.ranks;
  for (u64 v = first; v < whole; v += places * stride) {
    Vec held[kMaxRanks];
    u64 place = v;
    int p = 0;
    const auto next = [&] {
      if (++p == a.ranks) {
        p = 0;
        place += stride;
      }
    };
    FSCCL_UNROLL for (int i = 0; i < kMaxRanks; ++i, next()) {
      if (i < loads && place < whole) held[i] = b.template load<Vec>(from(p) + place * kVecBytes);
    }
    place = v;
    p = 0;
    Sum<E, Vec> sum;
    FSCCL_UNROLL for (int i = 0; i < kMaxRanks; ++i, next()) {
      if (i >= loads || place >= whole) continue;
      sum.add_plainly(p == 0, held[i]);
      if (p + 1 == a.ranks) f(true, place * kVecBytes, sum.finish(a));
    }
  }
}

// The widest accesses that this rank's own memory allows: of its input, and where sums go.
struct Widths {
  u32 in, out;
};

// Every stride-th vector of `bytes` from the first-th on, first < stride: f(whole, offset, sum), to
// put() it. What is beyond `bytes` in the last one is zeros. from(p) is where the input of rank p
// begins; those of others at a multiple of 16.
template <class E, class B, class From, class F>
FSCCL_FN void sum_vectors(B& b, const Args& a, From from, Widths own, u64 first, u64 stride,
                          u64 bytes, F f) {
  u64 v = first;
  if (Sum<E, Vec>::plain(a) && own.in == kVecBytes && own.out == kVecBytes) {
    const u64 whole = bytes / kVecBytes;
    sum_plainly<E>(b, a, from, first, stride, whole, f);
    v = whole % stride == first ? whole : bytes;  // the rest is one thread's
  }
  for (; v * kVecBytes < bytes; v += stride) {
    const u64 at = v * kVecBytes;
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
