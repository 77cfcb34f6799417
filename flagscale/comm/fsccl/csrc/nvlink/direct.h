// Kernels for registered buffers, which every rank has mapped: data goes from and to them without
// staging.
//
// Two steps of a channel (staged.h): after the first all peers' kernels have begun, so whatever ran
// before them on their streams is over and their buffers may be read and written; after the second
// all reads and writes of peers are done, and the stream may go on. A peer's channel touches only
// the part of a buffer that belongs to the channel of the same number. All addresses are multiples
// of 16.
#pragma once

#include "staged.h"

namespace fsccl {
namespace nvlink {

// Reduces `bytes` from offset `at` on of every rank's registered buffer, with all threads of the
// grid.
template <class E, int Most, class B, class F>
FSCCL_FN void reduce_peers(B& b, const KernelArgs& a, u64 at, u64 bytes, u32 width_out, F f) {
  const auto from = [&](int p) { return a.peer[p] + at; };
  const u32 first = b.channel() * b.threads() + b.thread(), stride = b.channels() * b.threads();
  sum_vectors<E, Most>(b, a, from, {kVecBytes, width_out}, first, stride, bytes, f);
}

template <class B, class F>
FSCCL_FN void between_steps(B& b, const KernelArgs& a, F f) {
  Steps<B> steps(b, a);
  if (steps.gave_up_before()) return;
  b.sync();
  steps.post(0);
  // Peers that did not come may still use their buffers for something else.
  if (!steps.wait_step(0)) return;
  f();
  b.sync();
  steps.post(1);
  if (steps.wait_step(1)) steps.finish(2);
}

// In place: peer[] is input and output.
template <class E, int Most, class B>
FSCCL_FN void all_reduce_direct(B& b, const KernelArgs& a) {
  between_steps(b, a, [&] {
    const u64 lo = static_cast<u64>(a.rank) * a.piece, size = clip(lo, a.piece, a.bytes);
    reduce_peers<E, Most>(b, a, lo, size, kVecBytes, [&](bool whole, u64 at, const Vec& sum) {
      for (int k = 0; k < a.ranks; ++k) {
        store_vector(b, whole, a.peer[peer(a, k)] + lo + at, size - at, kVecBytes, sum);
      }
    });
  });
}

// peer[] is the input.
template <class E, int Most, class B>
FSCCL_FN void reduce_scatter_direct(B& b, const KernelArgs& a) {
  between_steps(b, a, [&] {
    const u64 own = a.rank * a.stride_in;
    reduce_peers<E, Most>(b, a, own, a.bytes, a.width_out, [&](bool whole, u64 at, const Vec& sum) {
      store_vector(b, whole, a.out + at, a.bytes - at, a.width_out, sum);
    });
  });
}

// all_gather (stride_in 0) and all_to_all; peer[] is the output.
template <class B>
FSCCL_FN void copy_direct(B& b, const KernelArgs& a) {
  between_steps(b, a, [&] {
    const u32 ranks = static_cast<u32>(a.ranks);
    const u64 lo = b.channel() * a.piece, size = clip(lo, a.piece, a.bytes);
    for_each_part(b, ranks, [&](u32 k, u32 first, u32 stride) {
      const int p = peer(a, static_cast<int>(k));
      const char* const from = a.in + p * a.stride_in + lo;
      char* const to = a.peer[p] + a.rank * a.stride_out + lo;
      if (to != from) move(b, to, kVecBytes, from, a.width_in, size, first, stride);
    });
  });
}

}  // namespace nvlink
}  // namespace fsccl
