// Pipelined schedules: in which order a rank passes on the chunks of an all-gather, a
// reduce-scatter or an all-reduce. Only arithmetic; pipeline.h moves the bytes.
//
// The buffer is a row of blocks, one a rank, and every block is cut in k chunks. Chunk c of all
// blocks travels around ring c: from the rank at position p to the one at p + stride(c), the
// strides being such that the k rings use the connections of all pairs evenly. Inside a ring, data
// moves in sends of `nelem_per_send` elements. A window is what one send a block makes: it is taken
// around the ring before the next begins, which bounds what a rank must keep to two sends a ring,
// and while one ring waits for its neighbour, the others move.
//
// In one window the rank at position p takes these steps (the fused primitives of ring algorithms:
// receive, reduce with the own input, keep in the output, send):
//
//   all-gather       send block p; receive, keep and send block p-s ... ; receive and keep the last
//   reduce-scatter   send block p-s; receive, reduce and send p-2s ... ; receive, reduce, keep p
//   all-reduce       the second, whose last step also sends, then the first from its second step on
//
// Block b of a reduction is summed in the order of ring c from b+s on: in one place and always in
// the same order, so all ranks get the same bits; but not in the order of ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "partition.h"

namespace fsccl {

struct PipelineStep {
  size_t block = 0;   // whose data moves: a position in the row
  size_t window = 0;  // which send of the chunk
  bool receives = false;
  bool reduces = false;  // what came with the own input, or the own input alone when nothing came
  bool keeps = false;    // the output gets it
  bool sends = false;
};

enum class PipelineKind { kAllGather, kReduceScatter, kAllReduce };

// What the rank at `position` of `ranks` (at least two) does on one ring.
class Schedule {
 public:
  Schedule(PipelineKind kind, size_t ranks, size_t position, size_t stride, size_t windows)
      : kind_(kind), ranks_(ranks), position_(position), stride_(stride), windows_(windows) {}

  size_t per_window() const { return kind_ == PipelineKind::kAllReduce ? 2 * ranks_ - 1 : ranks_; }
  size_t steps() const { return windows_ * per_window(); }
  PipelineStep at(size_t i) const;
  size_t next() const { return (position_ + stride_) % ranks_; }
  size_t previous() const { return (position_ + ranks_ - stride_) % ranks_; }

 private:
  size_t behind(size_t hops) const { return (position_ + hops * (ranks_ - stride_)) % ranks_; }

  PipelineKind kind_;
  size_t ranks_, position_, stride_, windows_;
};

// The stride of each of k rings over `ranks` positions: 1, -1, 3, -3, ... as far as they visit all
// positions, over and over. With `neighbours_only` 1 and -1: where positions next to each other
// share memory and others may not.
std::vector<size_t> ring_strides(size_t ranks, size_t k, bool neighbours_only);

// What the send of `window` moves: an interval of the block, which has `bytes` bytes, on ring
// `ring` of k. `send` and the cuts are multiples of `grain`.
Interval piece_of(size_t bytes, size_t k, size_t ring, size_t window, size_t send, size_t grain);

// The windows that the longest block needs.
size_t windows_for(size_t longest, size_t k, size_t send, size_t grain);

}  // namespace fsccl
