// Kernels for larger messages: chunks are written into slots of the peers' memory, and a flag is
// posted once they are there. Everything that crosses is a write, which waits for nothing; all
// reads are local.
//
// A channel counts steps. In step s a rank writes to slot s % kDepth of its peers (each source has
// a place of its own in it), posts s to all, waits for the posts of s from all, and reads its own
// slot. Two rules, kept by every algorithm here and from one operation to the next, make this safe:
//
//   (1) slot s is written only after the posts of step s - 2 of all peers were waited for;
//   (2) slot s is read after the posts of s were waited for, and before the reader posts
//       step s + 2.
//
// A rank that writes slot s + kDepth = s + 4, which is the same memory, has waited for step s + 2
// of every peer, and that peer had read slot s before it posted it. So there is one post per step
// and no credit to return; the writes of step s overlap the flags of step s - 1. The layout of a
// slot may differ from step to step.
#pragma once

#include "vector_sums.h"

namespace fsccl {
namespace nvlink {

// The steps of this channel, numbered from 0 within the operation.
template <class B>
class Steps {
 public:
  FSCCL_FN Steps(B& b, const KernelArgs& a)
      : b_(b),
        a_(a),
        base_(b.template load<u32>(reinterpret_cast<const char*>(&counters(b, a)->step)) + 1) {}

  FSCCL_FN bool gave_up_before() const { return PeerWait<B>::gave_up_before(b_, a_); }

  // Posts to all peers that the writes of all threads before the last barrier are there.
  FSCCL_FN void post(u32 step) {
    for (u32 p = b_.thread(); p < static_cast<u32>(a_.ranks); p += b_.threads()) {
      if (static_cast<int>(p) != a_.rank) b_.post_flag(flags(a_.arena[p]) + a_.rank, base_ + step);
    }
  }

  // Waits for the posts of all peers; a barrier of the block. False if waiting was given up, which
  // ends the operation at once.
  FSCCL_FN bool wait_step(u32 step) {
    const u32* const mine = flags(a_.arena[a_.rank]);
    for (u32 p = b_.thread(); p < static_cast<u32>(a_.ranks); p += b_.threads()) {
      if (static_cast<int>(p) == a_.rank) continue;
      const auto missing = [&] {
        const bool posted = static_cast<int>(b_.load_flag(mine + p) - (base_ + step)) >= 0;
        return posted ? 0 : 1u << p;
      };
      peer_wait_.wait(b_, a_, missing, [](bool over) { return over; });
    }
    if (!b_.any(peer_wait_.gave_up())) return true;
    PeerWait<B>::mark_given_up(b_, a_);
    return false;
  }

  // The barrier before a post: all threads have written step e, and the writes of peers for the
  // step before are there.
  FSCCL_FN bool wait_previous_step(u32 e) {
    if (e > 0) return wait_step(e - 1);
    b_.sync();
    return true;
  }

  // The place where `source` writes for `owner`, if every rank but the owner has `bytes` of the
  // slot.
  FSCCL_FN char* place(int owner, int source, u64 bytes, u32 step) const {
    const u32 index = static_cast<u32>(source - (source > owner ? 1 : 0));
    return slot(owner, step) + index * static_cast<u32>(bytes);  // bytes of a slot fit 32 bits
  }

  FSCCL_FN char* slot(int owner, u32 step) const {
    const u64 index = b_.channel() * kDepth + (base_ + step) % kDepth;
    return a_.arena[owner] + a_.slots + index * a_.slot_bytes;
  }

  // Ends the operation, of which `count` steps were posted and waited for.
  FSCCL_FN void finish(u32 count) {
    b_.sync();
    if (b_.thread() == 0) {
      b_.store(reinterpret_cast<char*>(&counters(b_, a_)->step), base_ + count - 1);
    }
  }

 private:
  FSCCL_FN u32* flags(char* arena) const {
    return reinterpret_cast<u32*>(arena + kFlags + b_.channel() * kLine);
  }

  B& b_;
  const KernelArgs& a_;
  const u32 base_;
  PeerWait<B> peer_wait_;
};

// Reduces the data of a step and this rank's own: f as in vector_sums.h.
template <class E, int Most, class B, class F>
FSCCL_FN void reduce_step(B& b, const KernelArgs& a, const Steps<B>& steps, const char* own,
                          u32 step, u64 place, u64 bytes, F f) {
  const auto from = [&](int p) {
    return p == a.rank ? own : steps.place(a.rank, p, place, step);
  };
  sum_vectors<E, Most>(b, a, from, {a.width_in, a.width_out}, b.thread(), b.threads(), bytes, f);
}

// all_gather (stride_in 0), all_to_all, and broadcast: only the root sends.
template <class B>
FSCCL_FN void copy_staged(B& b, const KernelArgs& a) {
  Steps<B> steps(b, a);
  if (steps.gave_up_before()) return;
  const u32 ranks = static_cast<u32>(a.ranks);
  const bool from_all = a.root < 0;
  const auto begin = [&](u32 e) { return (e * b.channels() + b.channel()) * a.piece; };
  const auto sends = [&](int rank) { return from_all || a.root == rank; };
  const auto place = [&](int owner, int source, u32 e) {
    return from_all ? steps.place(owner, source, a.piece, e) : steps.slot(owner, e);
  };
  const auto push = [&](u32 e) {
    const u64 lo = begin(e), size = clip(lo, a.piece, a.bytes);
    for_each_part(b, ranks, [&](u32 k, u32 first, u32 stride) {
      const int p = peer(a, static_cast<int>(k));
      const char* const from = a.in + p * a.stride_in + lo;
      if (p != a.rank) {
        move(b, place(p, a.rank, e), kVecBytes, from, a.width_in, size, first, stride);
      } else if (from != a.out + p * a.stride_out + lo) {
        move(b, a.out + p * a.stride_out + lo, a.width_out, from, a.width_in, size, first, stride);
      }
    });
  };
  const auto pull = [&](u32 e) {
    const u64 lo = begin(e), size = clip(lo, a.piece, a.bytes);
    for_each_part(b, ranks - 1, [&](u32 k, u32 first, u32 stride) {
      const int p = peer(a, static_cast<int>(k) + 1);
      if (!sends(p)) return;
      move(b, a.out + p * a.stride_out + lo, a.width_out, place(a.rank, p, e), kVecBytes, size,
           first, stride);
    });
  };
  for (u32 e = 0; e <= a.rounds; ++e) {
    if (e < a.rounds && sends(a.rank)) push(e);
    if (!steps.wait_previous_step(e)) return;
    // While one warp waits for its writes to arrive, the others go on.
    if (e < a.rounds) steps.post(e);
    if (e > 0) pull(e - 1);
  }
  steps.finish(a.rounds);
}

template <class E, int Most, class B>
FSCCL_FN void reduce_scatter_staged(B& b, const KernelArgs& a) {
  Steps<B> steps(b, a);
  if (steps.gave_up_before()) return;
  const u32 ranks = static_cast<u32>(a.ranks);
  const auto begin = [&](u32 e) { return (e * b.channels() + b.channel()) * a.piece; };
  const auto push = [&](u32 e) {
    const u64 lo = begin(e), size = clip(lo, a.piece, a.bytes);
    for_each_part(b, ranks - 1, [&](u32 k, u32 first, u32 stride) {
      const int p = peer(a, static_cast<int>(k) + 1);
      move(b, steps.place(p, a.rank, a.piece, e), kVecBytes, a.in + p * a.stride_in + lo,
           a.width_in, size, first, stride);
    });
  };
  for (u32 e = 0; e <= a.rounds; ++e) {
    if (e < a.rounds) push(e);
    if (!steps.wait_previous_step(e)) return;
    if (e < a.rounds) steps.post(e);
    if (e > 0) {
      const u64 lo = begin(e - 1), size = clip(lo, a.piece, a.bytes);
      const char* const own = a.in + a.rank * a.stride_in + lo;
      const auto store = [&](bool whole, u64 at, const Vec& sum) {
        store_vector(b, whole, a.out + lo + at, size - at, a.width_out, sum);
      };
      reduce_step<E, Most>(b, a, steps, own, e - 1, a.piece, size, store);
    }
  }
  steps.finish(a.rounds);
}

// A piece of the message has a share for every rank to reduce. Step e carries the inputs of piece
// e, in the first half of the slots, and the results of piece e - 1, in the second.
template <class E, int Most, class B>
FSCCL_FN void all_reduce_staged(B& b, const KernelArgs& a) {
  Steps<B> steps(b, a);
  if (steps.gave_up_before()) return;
  const u32 ranks = static_cast<u32>(a.ranks);
  const u64 half = a.slot_bytes / 2;
  const u64 share = a.piece / ranks;
  const auto begin = [&](u32 e, int p) {
    return (e * b.channels() + b.channel()) * a.piece + static_cast<u64>(p) * share;
  };
  const auto peer_at = [&](u32 k) { return peer(a, static_cast<int>(k) + 1); };
  for (u32 e = 0; e <= a.rounds + 1; ++e) {
    if (e < a.rounds) {
      for_each_part(b, ranks - 1, [&](u32 k, u32 first, u32 stride) {
        const u64 lo = begin(e, peer_at(k));
        move(b, steps.place(peer_at(k), a.rank, share, e), kVecBytes, a.in + lo, a.width_in,
             clip(lo, share, a.bytes), first, stride);
      });
    }
    if (!steps.wait_previous_step(e)) return;
    if (e > 0 && e <= a.rounds) {
      const u64 lo = begin(e - 1, a.rank), size = clip(lo, share, a.bytes);
      const auto send = [&](bool whole, u64 at, const Vec& sum) {
        for (u32 k = 0; k + 1 < ranks; ++k) {
          b.store(steps.place(peer_at(k), a.rank, share, e) + half + at, sum);
        }
        store_vector(b, whole, a.out + lo + at, size - at, a.width_out, sum);
      };
      reduce_step<E, Most>(b, a, steps, a.in + lo, e - 1, share, size, send);
      b.sync();
    }
    if (e <= a.rounds) steps.post(e);
    if (e > 1) {
      for_each_part(b, ranks - 1, [&](u32 k, u32 first, u32 stride) {
        const u64 lo = begin(e - 2, peer_at(k));
        move(b, a.out + lo, a.width_out, steps.place(a.rank, peer_at(k), share, e - 1) + half,
             kVecBytes, clip(lo, share, a.bytes), first, stride);
      });
    }
  }
  steps.finish(a.rounds + 1);
}

}  // namespace nvlink
}  // namespace fsccl
