// Kernels for registered buffers, which every rank has mapped: they read and write the buffers of
// peers without staging.
//
// An operation has two steps of a channel (staged.h). After the first all peers' kernels have
// begun, so whatever ran before them on their streams has ended and their buffers may be read and
// written. After the second all reads and writes of peers are done, so the next operation of the
// stream may begin. A peer's channel accesses only the part of a buffer that belongs to the channel
// of the same number. All addresses are multiples of 16.
#pragma once

#include "staged.h"

namespace fsccl {
namespace nvlink {

// Reduces the `bytes` at offset `offset` of every rank's registered buffer with all threads of the
// grid, and calls store_sum as sum_vectors() does.
template <class E, int RankCapacity, class B, class F>
FSCCL_FN void reduce_peers(B& b, const KernelArgs& a, u64 offset, u64 bytes, u32 width_out,
                           F store_sum) {
  const auto from = [&](int p) { return a.registered_buffer[p] + offset; };
  const u32 first = b.channel() * b.threads() + b.thread(), stride = b.channels() * b.threads();
  sum_vectors<E, RankCapacity>(b, a, from, {kVecBytes, width_out}, first, stride, bytes, store_sum);
}

// Calls access_peers() between the two steps of an operation.
template <class B, class F>
FSCCL_FN void run_between_steps(B& b, const KernelArgs& a, F access_peers) {
  ChannelSteps<B> steps(b, a);
  if (steps.gave_up_before()) return;
  b.sync();
  steps.post(0);
  // If a peer did not come, its buffer may still be in use by earlier work.
  if (!steps.wait_step(0)) return;
  access_peers();
  b.sync();
  steps.post(1);
  if (steps.wait_step(1)) steps.finish(2);
}

// In place: registered_buffer[] is input and output.
template <class E, int RankCapacity, class B>
FSCCL_FN void all_reduce_direct(B& b, const KernelArgs& a) {
  run_between_steps(b, a, [&] {
    const u64 lo = static_cast<u64>(a.rank) * a.piece_bytes,
              size = clipped_size(lo, a.piece_bytes, a.bytes);
    reduce_peers<E, RankCapacity>(
        b, a, lo, size, kVecBytes, [&](bool is_whole, u64 offset, const Vec& sum) {
          for (int k = 0; k < a.ranks; ++k) {
            store_vector(b, is_whole, a.registered_buffer[peer_rank(a, k)] + lo + offset,
                         size - offset, kVecBytes, sum);
          }
        });
  });
}

// registered_buffer[] is the input.
template <class E, int RankCapacity, class B>
FSCCL_FN void reduce_scatter_direct(B& b, const KernelArgs& a) {
  run_between_steps(b, a, [&] {
    const u64 own_offset = a.rank * a.stride_in;
    reduce_peers<E, RankCapacity>(
        b, a, own_offset, a.bytes, a.width_out, [&](bool is_whole, u64 offset, const Vec& sum) {
          store_vector(b, is_whole, a.out + offset, a.bytes - offset, a.width_out, sum);
        });
  });
}

// all_gather (stride_in 0) and all_to_all; registered_buffer[] is the output.
template <class B>
FSCCL_FN void copy_direct(B& b, const KernelArgs& a) {
  run_between_steps(b, a, [&] {
    const u32 ranks = static_cast<u32>(a.ranks);
    const u64 lo = b.channel() * a.piece_bytes, size = clipped_size(lo, a.piece_bytes, a.bytes);
    for_each_part(b, ranks, [&](u32 k, u32 first, u32 stride) {
      const int p = peer_rank(a, static_cast<int>(k));
      const char* const from = a.in + p * a.stride_in + lo;
      char* const to = a.registered_buffer[p] + a.rank * a.stride_out + lo;
      if (to != from) copy_vectors(b, to, kVecBytes, from, a.width_in, size, first, stride);
    });
  });
}

}  // namespace nvlink
}  // namespace fsccl
