// Kernels for small messages, sent in cells (cells.h): packets for the smallest, bundles for larger
// ones.
//
// A small message takes no longer than the launch of its kernel, so these kernels may begin before
// the stream's previous kernel has ended, and first call wait_previous_kernel().
#pragma once

#include "cells.h"

namespace fsccl {
namespace nvlink {

// Calls f(cell, slot) for each of the `count` cells that this thread of this channel handles.
// `slot` is the cell's position among the source's cells in the channel's buffer.
template <class CellKind, class B, class F>
FSCCL_FN void for_each_cell(B& b, u32 count, F f) {
  const u32 cells_at_once = b.threads() / CellKind::kThreadsPerCell;
  u32 slot = b.thread() / CellKind::kThreadsPerCell;
  for (u32 i = b.channel() * cells_at_once + slot; i < count; i += b.channels() * cells_at_once) {
    f(i, slot);
    slot += cells_at_once;
  }
}

// Number of cells for `bytes` of data.
template <class CellKind>
FSCCL_FN u32 cells_of(u64 bytes) {
  return static_cast<u32>((bytes + CellKind::kCellDataBytes - 1) / CellKind::kCellDataBytes);
}

// Calls f(w, offset in the message) for this thread's data words of a cell.
template <class CellKind, class B, class F>
FSCCL_FN void for_each_word(B& b, u32 cell, F f) {
  FSCCL_UNROLL for (u32 w = 0; w < CellKind::kWordsPerThread; ++w) {
    const int word = CellKind::data_word(b, w);
    if (word >= 0) f(w, cell * CellKind::kCellDataBytes + static_cast<u32>(word) * sizeof(u64));
  }
}

// Loads this thread's words of a cell from the message of `bytes` at `from`; words beyond the
// message are zero.
template <class CellKind, class B>
FSCCL_FN void load_cell(B& b, const KernelArgs& a, const char* from, u64 bytes, u32 cell,
                        u64 (&data)[CellKind::kWordsPerThread]) {
  FSCCL_UNROLL for (u32 w = 0; w < CellKind::kWordsPerThread; ++w) data[w] = 0;
  for_each_word<CellKind>(b, cell, [&](u32 w, u64 offset) {
    if (offset < bytes) data[w] = load<u64>(b, from + offset, bytes - offset, a.width_in);
  });
}

template <class CellKind, class B>
FSCCL_FN void store_cell(B& b, const KernelArgs& a, char* to, u64 bytes, u32 cell,
                         const u64 (&data)[CellKind::kWordsPerThread]) {
  for_each_word<CellKind>(b, cell, [&](u32 w, u64 offset) {
    if (offset < bytes) store(b, to + offset, bytes - offset, a.width_out, data[w]);
  });
}

template <int RankCapacity, u32 kWordsPerThread>
FSCCL_FN void set_own_data(u64 (&data)[RankCapacity][kWordsPerThread], int rank,
                           const u64 (&own_input)[kWordsPerThread]) {
  FSCCL_UNROLL for (int p = 0; p < RankCapacity; ++p) {
    FSCCL_UNROLL for (u32 w = 0; w < kWordsPerThread; ++w) {
      if (p == rank) data[p][w] = own_input[w];
    }
  }
}

// Reduces the w-th words of all ranks.
template <class E, int RankCapacity, u32 kWordsPerThread>
FSCCL_FN u64 reduce_word(const KernelArgs& a, const u64 (&data)[RankCapacity][kWordsPerThread],
                         u32 w) {
  Sum<E, u64> sum;
  if (sum.is_simple(a)) {
    sum.begin_simple(data[0][w]);
    FSCCL_UNROLL for (int p = 1; p < RankCapacity; ++p) {
      if (p < a.ranks) sum.add_simple(data[p][w]);
    }
    return sum.finish_simple(a);
  }
  FSCCL_UNROLL for (int p = 0; p < RankCapacity; ++p) {
    if (p < a.ranks) sum.add(a, p == 0, data[p][w]);
  }
  return sum.finish(a);
}

// Sends this rank's input to all peers: the same to all if stride_in is 0, else a part to each.
template <class CellKind, int RankCapacity, class B>
FSCCL_FN void send_cells(B& b, const KernelArgs& a,
                         CellBuffers<CellKind, RankCapacity, B>& buffers) {
  for_each_cell<CellKind>(b, cells_of<CellKind>(a.bytes), [&](u32 i, u32 slot) {
    if (a.stride_in == 0) {
      u64 data[CellKind::kWordsPerThread];
      load_cell<CellKind>(b, a, a.in, a.bytes, i, data);
      return buffers.send_to_peers(slot, data);
    }
    u64 data[RankCapacity][CellKind::kWordsPerThread];  // all are loaded before any is sent
    FSCCL_UNROLL for (int k = 1; k < RankCapacity; ++k) {
      if (k >= a.ranks) break;
      load_cell<CellKind>(b, a, a.in + peer_rank(a, k) * a.stride_in, a.bytes, i, data[k]);
    }
    FSCCL_UNROLL for (int k = 1; k < RankCapacity; ++k) {
      if (k < a.ranks) buffers.send(peer_rank(a, k), slot, data[k]);
    }
  });
}

// all_reduce (stride_in 0) and reduce_scatter: every rank reduces the data it received.
template <class E, class CellKind, int RankCapacity, class B>
FSCCL_FN void reduce_cells(B& b, const KernelArgs& a) {
  b.wait_previous_kernel();
  CellBuffers<CellKind, RankCapacity, B> buffers(b, a);
  if (buffers.gave_up_before()) return;
  send_cells<CellKind, RankCapacity>(b, a, buffers);
  const char* const own_input = a.in + a.rank * a.stride_in;
  for_each_cell<CellKind>(b, cells_of<CellKind>(a.bytes), [&](u32 i, u32 slot) {
    u64 own_words[CellKind::kWordsPerThread], data[RankCapacity][CellKind::kWordsPerThread];
    load_cell<CellKind>(b, a, own_input, a.bytes, i, own_words);
    if (!buffers.receive(slot, buffers.peer_mask(), data)) return;
    set_own_data(data, a.rank, own_words);
    FSCCL_UNROLL for (u32 w = 0; w < CellKind::kWordsPerThread; ++w) own_words[w] =
        reduce_word<E>(a, data, w);
    store_cell<CellKind>(b, a, a.out, a.bytes, i, own_words);
  });
  buffers.finish();
}

// all_gather (stride_in 0) and all_to_all.
template <class CellKind, int RankCapacity, class B>
FSCCL_FN void copy_cells(B& b, const KernelArgs& a) {
  b.wait_previous_kernel();
  CellBuffers<CellKind, RankCapacity, B> buffers(b, a);
  if (buffers.gave_up_before()) return;
  send_cells<CellKind, RankCapacity>(b, a, buffers);
  const char* const own_input = a.in + a.rank * a.stride_in;
  for_each_cell<CellKind>(b, cells_of<CellKind>(a.bytes), [&](u32 i, u32 slot) {
    u64 own_words[CellKind::kWordsPerThread], data[RankCapacity][CellKind::kWordsPerThread];
    load_cell<CellKind>(b, a, own_input, a.bytes, i, own_words);
    if (!buffers.receive(slot, buffers.peer_mask(), data)) return;
    set_own_data(data, a.rank, own_words);
    FSCCL_UNROLL for (int p = 0; p < RankCapacity; ++p) {
      if (p < a.ranks) store_cell<CellKind>(b, a, a.out + p * a.stride_out, a.bytes, i, data[p]);
    }
  });
  buffers.finish();
}

// all_reduce in two steps: rank p reduces the p-th share of the message and sends the result to
// all, so that a byte is sent twice instead of ranks - 1 times. The first half of a source's cells
// in a buffer is for inputs, the second for results.
template <class E, class CellKind, int RankCapacity, class B>
FSCCL_FN void two_shot_cells(B& b, const KernelArgs& a) {
  b.wait_previous_kernel();
  CellBuffers<CellKind, RankCapacity, B> buffers(b, a);
  if (buffers.gave_up_before()) return;
  const u32 ranks = static_cast<u32>(a.ranks), cell_count = cells_of<CellKind>(a.bytes);
  // Cells of a share; the first `longer_shares` shares have one more.
  const u32 min_share = cell_count / ranks, longer_shares = cell_count % ranks;
  const u32 results_slot = a.cells_per_source / 2;
  const auto begin = [&](u32 p) { return p * min_share + (p < longer_shares ? p : longer_shares); };
  const auto count = [&](u32 p) { return min_share + (p < longer_shares ? 1 : 0); };
  const u32 max_share = min_share + (longer_shares > 0 ? 1 : 0);
  for_each_cell<CellKind>(b, max_share, [&](u32 i, u32 slot) {
    u64 data[RankCapacity][CellKind::kWordsPerThread];
    FSCCL_UNROLL for (int k = 1; k < RankCapacity; ++k) {
      if (k >= a.ranks) break;
      const u32 p = static_cast<u32>(peer_rank(a, k));
      if (i < count(p)) load_cell<CellKind>(b, a, a.in, a.bytes, begin(p) + i, data[k]);
    }
    FSCCL_UNROLL for (int k = 1; k < RankCapacity; ++k) {
      const int p = peer_rank(a, k);
      if (k < a.ranks && i < count(static_cast<u32>(p))) buffers.send(p, slot, data[k]);
    }
  });
  const u32 rank = static_cast<u32>(a.rank);
  for_each_cell<CellKind>(b, count(rank), [&](u32 i, u32 slot) {
    u64 own_words[CellKind::kWordsPerThread], data[RankCapacity][CellKind::kWordsPerThread];
    load_cell<CellKind>(b, a, a.in, a.bytes, begin(rank) + i, own_words);
    if (!buffers.receive(slot, buffers.peer_mask(), data)) return;
    set_own_data(data, a.rank, own_words);
    FSCCL_UNROLL for (u32 w = 0; w < CellKind::kWordsPerThread; ++w) own_words[w] =
        reduce_word<E>(a, data, w);
    buffers.send_to_peers(results_slot + slot, own_words);
    store_cell<CellKind>(b, a, a.out, a.bytes, begin(rank) + i, own_words);
  });
  for_each_cell<CellKind>(b, max_share, [&](u32 i, u32 slot) {
    // Ranks whose shares have a cell i.
    const u32 owners = i < min_share ? ~0u : (1u << longer_shares) - 1;
    const u32 sources = buffers.peer_mask() & owners;
    u64 data[RankCapacity][CellKind::kWordsPerThread];
    if (!buffers.receive(results_slot + slot, sources, data)) return;
    FSCCL_UNROLL for (int p = 0; p < RankCapacity; ++p) {
      if (sources >> p & 1) {
        store_cell<CellKind>(b, a, a.out, a.bytes, begin(static_cast<u32>(p)) + i, data[p]);
      }
    }
  });
  buffers.finish();
}

// The kernels, by the names in kernels.h.
template <int RankCapacity, class B>
FSCCL_FN void copy_flagged(B& b, const KernelArgs& a) {
  copy_cells<Packets<B>, RankCapacity>(b, a);
}
template <int RankCapacity, class B>
FSCCL_FN void copy_lines(B& b, const KernelArgs& a) {
  copy_cells<Bundles<B>, RankCapacity>(b, a);
}
template <class E, int RankCapacity, class B>
FSCCL_FN void reduce_flagged(B& b, const KernelArgs& a) {
  reduce_cells<E, Packets<B>, RankCapacity>(b, a);
}
template <class E, int RankCapacity, class B>
FSCCL_FN void reduce_lines(B& b, const KernelArgs& a) {
  reduce_cells<E, Bundles<B>, RankCapacity>(b, a);
}
template <class E, int RankCapacity, class B>
FSCCL_FN void all_reduce_lines(B& b, const KernelArgs& a) {
  two_shot_cells<E, Bundles<B>, RankCapacity>(b, a);
}

}  // namespace nvlink
}  // namespace fsccl
