// Kernels for larger messages: a rank writes pieces of the message into slots (staging buffers) of
// its peers' memory, and then posts a flag. Only writes go over NVLink, which do not wait for an
// answer; all reads are local.
//
// A channel (a block of the grid, see kernel_args.h) counts steps. In step s a rank writes to slot
// s % kSlotsPerChannel of its peers (in which each source has a separate area), posts s to all
// peers, waits until all peers have posted s, and reads its own slot. Two rules, which hold for
// every algorithm here and from one operation to the next, make this safe:
//
//   (1) slot s is written only after the posts of step s - 2 of all peers were waited for;
//   (2) slot s is read after the posts of s were waited for, and before the reader posts
//       step s + 2.
//
// A rank that writes the slot of step s + kSlotsPerChannel = s + 4, which is the same memory, has
// waited for step s + 2 of every peer, and that peer had read slot s before it posted s + 2. So a
// step needs one post and no acknowledgement, and the writes of step s overlap the flags of step
// s - 1. The layout of a slot may differ from step to step.
#pragma once

#include "vector_sums.h"

namespace fsccl {
namespace nvlink {

// The steps of this channel in one operation, numbered from 0.
template <class B>
class ChannelSteps {
 public:
  FSCCL_FN ChannelSteps(B& b, const KernelArgs& a)
      : b_(b),
        a_(a),
        base_(b.template load<u32>(reinterpret_cast<const char*>(&counters(b, a)->last_step)) + 1) {
  }

  FSCCL_FN bool gave_up_before() const { return PeerWait<B>::gave_up_before(b_, a_); }

  // Posts the step to all peers, which then see all writes of the block before its last barrier.
  FSCCL_FN void post(u32 step) {
    for (u32 p = b_.thread(); p < static_cast<u32>(a_.ranks); p += b_.threads()) {
      if (static_cast<int>(p) != a_.rank) b_.post_flag(flags(a_.arena[p]) + a_.rank, base_ + step);
    }
  }

  // Waits until all peers have posted the step; a barrier of the block. Returns false if waiting
  // was given up: then the operation ends at once.
  FSCCL_FN bool wait_step(u32 step) {
    const u32* const own_flags = flags(a_.arena[a_.rank]);
    for (u32 p = b_.thread(); p < static_cast<u32>(a_.ranks); p += b_.threads()) {
      if (static_cast<int>(p) == a_.rank) continue;
      const auto is_missing = [&] {
        const bool posted = static_cast<int>(b_.load_flag(own_flags + p) - (base_ + step)) >= 0;
        return posted ? 0 : 1u << p;
      };
      peer_wait_.wait(b_, a_, is_missing, [](bool gives_up) { return gives_up; });
    }
    if (!b_.any(peer_wait_.gave_up())) return true;
    PeerWait<B>::mark_given_up(b_, a_);
    return false;
  }

  // Barrier before the post of step e: afterwards all threads have written step e, and the writes
  // of all peers for step e - 1 are visible. Returns false if waiting was given up.
  FSCCL_FN bool wait_previous_step(u32 step) {
    if (step > 0) return wait_step(step - 1);
    b_.sync();
    return true;
  }

  // The area of the owner's slot in which `source` writes, if every rank but the owner has `bytes`
  // of the slot.
  FSCCL_FN char* source_area(int owner, int source, u64 bytes, u32 step) const {
    const u32 index = static_cast<u32>(source - (source > owner ? 1 : 0));
    return slot(owner, step) + index * static_cast<u32>(bytes);  // bytes of a slot fit 32 bits
  }

  FSCCL_FN char* slot(int owner, u32 step) const {
    const u64 index = b_.channel() * kSlotsPerChannel + (base_ + step) % kSlotsPerChannel;
    return a_.arena[owner] + a_.slots + index * a_.slot_bytes;
  }

  // Ends the operation, whose `count` steps have all been posted and waited for.
  FSCCL_FN void finish(u32 count) {
    b_.sync();
    if (b_.thread() == 0) {
      b_.store(reinterpret_cast<char*>(&counters(b_, a_)->last_step), base_ + count - 1);
    }
  }

 private:
  FSCCL_FN u32* flags(char* arena) const {
    return reinterpret_cast<u32*>(arena + kFlagsOffset + b_.channel() * kLineBytes);
  }

  B& b_;
  const KernelArgs& a_;
  const u32 base_;
  PeerWait<B> peer_wait_;
};

// Reduces the data that peers sent in a step with this rank's own input. `area_bytes` is the size
// of a source's area; store_sum is that of sum_vectors().
template <class E, int RankCapacity, class B, class F>
FSCCL_FN void reduce_step(B& b, const KernelArgs& a, const ChannelSteps<B>& steps,
                          const char* own_input, u32 step, u64 area_bytes, u64 bytes, F store_sum) {
  const auto from = [&](int p) {
    return p == a.rank ? own_input : steps.source_area(a.rank, p, area_bytes, step);
  };
  sum_vectors<E, RankCapacity>(b, a, from, {a.width_in, a.width_out}, b.thread(), b.threads(),
                               bytes, store_sum);
}

// all_gather (stride_in 0), all_to_all, and broadcast: only the root sends.
template <class B>
FSCCL_FN void copy_staged(B& b, const KernelArgs& a) {
  ChannelSteps<B> steps(b, a);
  if (steps.gave_up_before()) return;
  const u32 ranks = static_cast<u32>(a.ranks);
  const bool all_ranks_send = a.root < 0;
  const auto piece_offset = [&](u32 step) {
    return (step * b.channels() + b.channel()) * a.piece_bytes;
  };
  const auto is_sender = [&](int rank) { return all_ranks_send || a.root == rank; };
  const auto source_area = [&](int owner, int source, u32 step) {
    return all_ranks_send ? steps.source_area(owner, source, a.piece_bytes, step)
                          : steps.slot(owner, step);
  };
  const auto write_piece = [&](u32 step) {
    const u64 lo = piece_offset(step), size = clipped_size(lo, a.piece_bytes, a.bytes);
    for_each_part(b, ranks, [&](u32 k, u32 first, u32 stride) {
      const int p = peer_rank(a, static_cast<int>(k));
      const char* const from = a.in + p * a.stride_in + lo;
      if (p != a.rank) {
        copy_vectors(b, source_area(p, a.rank, step), kVecBytes, from, a.width_in, size, first,
                     stride);
      } else if (from != a.out + p * a.stride_out + lo) {
        copy_vectors(b, a.out + p * a.stride_out + lo, a.width_out, from, a.width_in, size, first,
                     stride);
      }
    });
  };
  const auto read_piece = [&](u32 step) {
    const u64 lo = piece_offset(step), size = clipped_size(lo, a.piece_bytes, a.bytes);
    for_each_part(b, ranks - 1, [&](u32 k, u32 first, u32 stride) {
      const int p = peer_rank(a, static_cast<int>(k) + 1);
      if (!is_sender(p)) return;
      copy_vectors(b, a.out + p * a.stride_out + lo, a.width_out, source_area(a.rank, p, step),
                   kVecBytes, size, first, stride);
    });
  };
  for (u32 step = 0; step <= a.rounds; ++step) {
    if (step < a.rounds && is_sender(a.rank)) write_piece(step);
    if (!steps.wait_previous_step(step)) return;
    // While one warp waits for its writes to arrive, the others go on.
    if (step < a.rounds) steps.post(step);
    if (step > 0) read_piece(step - 1);
  }
  steps.finish(a.rounds);
}

template <class E, int RankCapacity, class B>
FSCCL_FN void reduce_scatter_staged(B& b, const KernelArgs& a) {
  ChannelSteps<B> steps(b, a);
  if (steps.gave_up_before()) return;
  const u32 ranks = static_cast<u32>(a.ranks);
  const auto piece_offset = [&](u32 step) {
    return (step * b.channels() + b.channel()) * a.piece_bytes;
  };
  const auto write_piece = [&](u32 step) {
    const u64 lo = piece_offset(step), size = clipped_size(lo, a.piece_bytes, a.bytes);
    for_each_part(b, ranks - 1, [&](u32 k, u32 first, u32 stride) {
      const int p = peer_rank(a, static_cast<int>(k) + 1);
      copy_vectors(b, steps.source_area(p, a.rank, a.piece_bytes, step), kVecBytes,
                   a.in + p * a.stride_in + lo, a.width_in, size, first, stride);
    });
  };
  for (u32 step = 0; step <= a.rounds; ++step) {
    if (step < a.rounds) write_piece(step);
    if (!steps.wait_previous_step(step)) return;
    if (step < a.rounds) steps.post(step);
    if (step > 0) {
      const u64 lo = piece_offset(step - 1), size = clipped_size(lo, a.piece_bytes, a.bytes);
      const char* const own_input = a.in + a.rank * a.stride_in + lo;
      const auto store = [&](bool is_whole, u64 offset, const Vec& sum) {
        store_vector(b, is_whole, a.out + lo + offset, size - offset, a.width_out, sum);
      };
      reduce_step<E, RankCapacity>(b, a, steps, own_input, step - 1, a.piece_bytes, size, store);
    }
  }
  steps.finish(a.rounds);
}

// A piece of the message has a share for every rank to reduce. Step e sends the inputs of piece e
// in the first half of the slots, and the results of piece e - 1 in the second half.
template <class E, int RankCapacity, class B>
FSCCL_FN void all_reduce_staged(B& b, const KernelArgs& a) {
  ChannelSteps<B> steps(b, a);
  if (steps.gave_up_before()) return;
  const u32 ranks = static_cast<u32>(a.ranks);
  const u64 half_slot_bytes = a.slot_bytes / 2;
  const u64 share_bytes = a.piece_bytes / ranks;
  const auto piece_offset = [&](u32 step, int p) {
    return (step * b.channels() + b.channel()) * a.piece_bytes + static_cast<u64>(p) * share_bytes;
  };
  const auto peer_at = [&](u32 k) { return peer_rank(a, static_cast<int>(k) + 1); };
  for (u32 step = 0; step <= a.rounds + 1; ++step) {
    if (step < a.rounds) {
      for_each_part(b, ranks - 1, [&](u32 k, u32 first, u32 stride) {
        const u64 lo = piece_offset(step, peer_at(k));
        copy_vectors(b, steps.source_area(peer_at(k), a.rank, share_bytes, step), kVecBytes,
                     a.in + lo, a.width_in, clipped_size(lo, share_bytes, a.bytes), first, stride);
      });
    }
    if (!steps.wait_previous_step(step)) return;
    if (step > 0 && step <= a.rounds) {
      const u64 lo = piece_offset(step - 1, a.rank), size = clipped_size(lo, share_bytes, a.bytes);
      const auto send = [&](bool is_whole, u64 offset, const Vec& sum) {
        for (u32 k = 0; k + 1 < ranks; ++k) {
          b.store(
              steps.source_area(peer_at(k), a.rank, share_bytes, step) + half_slot_bytes + offset,
              sum);
        }
        store_vector(b, is_whole, a.out + lo + offset, size - offset, a.width_out, sum);
      };
      reduce_step<E, RankCapacity>(b, a, steps, a.in + lo, step - 1, share_bytes, size, send);
      b.sync();
    }
    if (step <= a.rounds) steps.post(step);
    if (step > 1) {
      for_each_part(b, ranks - 1, [&](u32 k, u32 first, u32 stride) {
        const u64 lo = piece_offset(step - 2, peer_at(k));
        copy_vectors(b, a.out + lo, a.width_out,
                     steps.source_area(a.rank, peer_at(k), share_bytes, step - 1) + half_slot_bytes,
                     kVecBytes, clipped_size(lo, share_bytes, a.bytes), first, stride);
      });
    }
  }
  steps.finish(a.rounds + 1);
}

}  // namespace nvlink
}  // namespace fsccl
