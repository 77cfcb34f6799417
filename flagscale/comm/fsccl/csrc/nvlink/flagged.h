// Kernels for small messages, in cells (cells.h): packets for the smallest, bundles for others.
//
// Small messages take no longer than their launch, and their kernels may begin early:
// wait_previous_kernel() is the first thing that all of them do.
#pragma once

#include "cells.h"

namespace fsccl {
namespace nvlink {

// Calls f(cell, slot in its channel's box) for this channel's and thread's cells of a list of
// `count`.
template <class Kind, class B, class F>
FSCCL_FN void each_cell(B& b, u32 count, F f) {
  const u32 cells_at_once = b.threads() / Kind::kThreads;
  u32 slot = b.thread() / Kind::kThreads;
  for (u32 i = b.channel() * cells_at_once + slot; i < count; i += b.channels() * cells_at_once) {
    f(i, slot);
    slot += cells_at_once;
  }
}

template <class Kind>
FSCCL_FN u32 cells_of(u64 bytes) {
  return static_cast<u32>((bytes + Kind::kData - 1) / Kind::kData);
}

// Calls f(w, offset in the message) for this thread's words of a cell.
template <class Kind, class B, class F>
FSCCL_FN void each_word(B& b, u32 cell, F f) {
  FSCCL_UNROLL for (u32 w = 0; w < Kind::kWords; ++w) {
    const int word = Kind::word(b, w);
    if (word >= 0) f(w, cell * Kind::kData + static_cast<u32>(word) * sizeof(u64));
  }
}

// Loads this thread's words of a cell of the `bytes` at `from`; zeros beyond them.
template <class Kind, class B>
FSCCL_FN void load_cell(B& b, const KernelArgs& a, const char* from, u64 bytes, u32 cell,
                        u64 (&data)[Kind::kWords]) {
  FSCCL_UNROLL for (u32 w = 0; w < Kind::kWords; ++w) data[w] = 0;
  each_word<Kind>(b, cell, [&](u32 w, u64 at) {
    if (at < bytes) data[w] = load<u64>(b, from + at, bytes - at, a.width_in);
  });
}

template <class Kind, class B>
FSCCL_FN void store_cell(B& b, const KernelArgs& a, char* to, u64 bytes, u32 cell,
                         const u64 (&data)[Kind::kWords]) {
  each_word<Kind>(b, cell, [&](u32 w, u64 at) {
    if (at < bytes) store(b, to + at, bytes - at, a.width_out, data[w]);
  });
}

template <int Most, u32 kWords>
FSCCL_FN void set_own(u64 (&data)[Most][kWords], int rank, const u64 (&own)[kWords]) {
  FSCCL_UNROLL for (int p = 0; p < Most; ++p) {
    FSCCL_UNROLL for (u32 w = 0; w < kWords; ++w) {
      if (p == rank) data[p][w] = own[w];
    }
  }
}

// Reduces all ranks' w-th words.
template <class E, int Most, u32 kWords>
FSCCL_FN u64 reduce_word(const KernelArgs& a, const u64 (&data)[Most][kWords], u32 w) {
  Sum<E, u64> sum;
  if (sum.is_simple(a)) {
    sum.begin_simple(data[0][w]);
    FSCCL_UNROLL for (int p = 1; p < Most; ++p) {
      if (p < a.ranks) sum.add_simple(data[p][w]);
    }
    return sum.finish_simple(a);
  }
  FSCCL_UNROLL for (int p = 0; p < Most; ++p) {
    if (p < a.ranks) sum.add(a, p == 0, data[p][w]);
  }
  return sum.finish(a);
}

template <class Kind, int Most, class B>
FSCCL_FN void send_cells(B& b, const KernelArgs& a, Boxes<Kind, Most, B>& boxes) {
  each_cell<Kind>(b, cells_of<Kind>(a.bytes), [&](u32 i, u32 slot) {
    if (a.stride_in == 0) {
      u64 data[Kind::kWords];
      load_cell<Kind>(b, a, a.in, a.bytes, i, data);
      return boxes.send_to_peers(slot, data);
    }
    u64 data[Most][Kind::kWords];  // all are loaded before any is sent
    FSCCL_UNROLL for (int k = 1; k < Most; ++k) {
      if (k >= a.ranks) break;
      load_cell<Kind>(b, a, a.in + peer(a, k) * a.stride_in, a.bytes, i, data[k]);
    }
    FSCCL_UNROLL for (int k = 1; k < Most; ++k) {
      if (k < a.ranks) boxes.send(peer(a, k), slot, data[k]);
    }
  });
}

// all_reduce (stride_in 0) and reduce_scatter: every rank reduces the data it received.
template <class E, class Kind, int Most, class B>
FSCCL_FN void reduce_cells(B& b, const KernelArgs& a) {
  b.wait_previous_kernel();
  Boxes<Kind, Most, B> boxes(b, a);
  if (boxes.gave_up_before()) return;
  send_cells<Kind, Most>(b, a, boxes);
  const char* const own = a.in + a.rank * a.stride_in;
  each_cell<Kind>(b, cells_of<Kind>(a.bytes), [&](u32 i, u32 slot) {
    u64 mine[Kind::kWords], data[Most][Kind::kWords];
    load_cell<Kind>(b, a, own, a.bytes, i, mine);
    if (!boxes.receive(slot, boxes.peers(), data)) return;
    set_own(data, a.rank, mine);
    FSCCL_UNROLL for (u32 w = 0; w < Kind::kWords; ++w) mine[w] = reduce_word<E>(a, data, w);
    store_cell<Kind>(b, a, a.out, a.bytes, i, mine);
  });
  boxes.finish();
}

// all_gather (stride_in 0) and all_to_all.
template <class Kind, int Most, class B>
FSCCL_FN void copy_cells(B& b, const KernelArgs& a) {
  b.wait_previous_kernel();
  Boxes<Kind, Most, B> boxes(b, a);
  if (boxes.gave_up_before()) return;
  send_cells<Kind, Most>(b, a, boxes);
  const char* const own = a.in + a.rank * a.stride_in;
  each_cell<Kind>(b, cells_of<Kind>(a.bytes), [&](u32 i, u32 slot) {
    u64 mine[Kind::kWords], data[Most][Kind::kWords];
    load_cell<Kind>(b, a, own, a.bytes, i, mine);
    if (!boxes.receive(slot, boxes.peers(), data)) return;
    set_own(data, a.rank, mine);
    FSCCL_UNROLL for (int p = 0; p < Most; ++p) {
      if (p < a.ranks) store_cell<Kind>(b, a, a.out + p * a.stride_out, a.bytes, i, data[p]);
    }
  });
  boxes.finish();
}

// all_reduce in two steps: rank p reduces the p-th share and sends the result, so that a byte
// crosses twice instead of ranks - 1 times. A box's first half is for inputs, its second for
// results.
template <class E, class Kind, int Most, class B>
FSCCL_FN void two_shot_cells(B& b, const KernelArgs& a) {
  b.wait_previous_kernel();
  Boxes<Kind, Most, B> boxes(b, a);
  if (boxes.gave_up_before()) return;
  const u32 n = static_cast<u32>(a.ranks), all = cells_of<Kind>(a.bytes);
  const u32 least = all / n, longer = all % n;  // the first shares are longer by one cell
  const u32 results = a.cells / 2;
  const auto begin = [&](u32 p) { return p * least + (p < longer ? p : longer); };
  const auto count = [&](u32 p) { return least + (p < longer ? 1 : 0); };
  const u32 longest = least + (longer > 0 ? 1 : 0);
  each_cell<Kind>(b, longest, [&](u32 i, u32 slot) {
    u64 data[Most][Kind::kWords];
    FSCCL_UNROLL for (int k = 1; k < Most; ++k) {
      if (k >= a.ranks) break;
      const u32 p = static_cast<u32>(peer(a, k));
      if (i < count(p)) load_cell<Kind>(b, a, a.in, a.bytes, begin(p) + i, data[k]);
    }
    FSCCL_UNROLL for (int k = 1; k < Most; ++k) {
      const int p = peer(a, k);
      if (k < a.ranks && i < count(static_cast<u32>(p))) boxes.send(p, slot, data[k]);
    }
  });
  const u32 rank = static_cast<u32>(a.rank);
  each_cell<Kind>(b, count(rank), [&](u32 i, u32 slot) {
    u64 mine[Kind::kWords], data[Most][Kind::kWords];
    load_cell<Kind>(b, a, a.in, a.bytes, begin(rank) + i, mine);
    if (!boxes.receive(slot, boxes.peers(), data)) return;
    set_own(data, a.rank, mine);
    FSCCL_UNROLL for (u32 w = 0; w < Kind::kWords; ++w) mine[w] = reduce_word<E>(a, data, w);
    boxes.send_to_peers(results + slot, mine);
    store_cell<Kind>(b, a, a.out, a.bytes, begin(rank) + i, mine);
  });
  each_cell<Kind>(b, longest, [&](u32 i, u32 slot) {
    const u32 owners = i < least ? ~0u : (1u << longer) - 1;  // ranks whose shares are that long
    const u32 from = boxes.peers() & owners;
    u64 data[Most][Kind::kWords];
    if (!boxes.receive(results + slot, from, data)) return;
    FSCCL_UNROLL for (int p = 0; p < Most; ++p) {
      if (from >> p & 1) {
        store_cell<Kind>(b, a, a.out, a.bytes, begin(static_cast<u32>(p)) + i, data[p]);
      }
    }
  });
  boxes.finish();
}

// The kernels.
template <int Most, class B>
FSCCL_FN void copy_flagged(B& b, const KernelArgs& a) {
  copy_cells<Packets<B>, Most>(b, a);
}
template <int Most, class B>
FSCCL_FN void copy_lines(B& b, const KernelArgs& a) {
  copy_cells<Bundles<B>, Most>(b, a);
}
template <class E, int Most, class B>
FSCCL_FN void reduce_flagged(B& b, const KernelArgs& a) {
  reduce_cells<E, Packets<B>, Most>(b, a);
}
template <class E, int Most, class B>
FSCCL_FN void reduce_lines(B& b, const KernelArgs& a) {
  reduce_cells<E, Bundles<B>, Most>(b, a);
}
template <class E, int Most, class B>
FSCCL_FN void all_reduce_lines(B& b, const KernelArgs& a) {
  two_shot_cells<E, Bundles<B>, Most>(b, a);
}

}  // namespace nvlink
}  // namespace fsccl
