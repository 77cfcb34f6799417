// Pipelined schedules: the order in which a rank forwards the chunks of an all-gather, a
// reduce-scatter or an all-reduce. This file only calculates; pipeline.h transfers the data.
//
// The buffer is a sequence of blocks, one per rank, and every block is divided into k chunks
// (FSCCL_PIPELINE_K). Ranks have positions 0, 1, 2, ... (node after node). Chunk c of all blocks
// travels around ring c: from the rank at position p to the one at position p + stride(c), modulo
// the number of ranks. The strides are chosen so that the k rings use the connections of all pairs
// evenly. Inside a ring, data is sent in pieces of FSCCL_PIPELINE_NELEM elements, called sends. A
// window consists of one send per block. It travels around the ring before the next window starts,
// which limits the data that a rank must buffer to two sends per ring. While one ring waits for a
// neighbour, the other rings continue.
//
// In one window, the rank at position p takes the following steps, where s is the stride. They are
// the fused primitives of ring algorithms: receive, reduce (with this rank's input), store (in the
// output), send.
//
//   all-gather       send block p; receive, store and send block p-s, ...; receive and store the
//                    last
//   reduce-scatter   send block p-s; receive, reduce and send p-2s, ...; receive, reduce, store p
//   all-reduce       the reduce-scatter, whose last step also sends, then the all-gather from its
//                    second step on
//
// Chunk c of block b is summed in the order of ring c, starting at position b+s. One rank has the
// final sum and all others copy it, so all ranks get the same bits. But the order of summation is
// not that of the ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "partition.h"

namespace fsccl {

// A step of a schedule: the primitives that are applied to one block in one window.
struct PipelineStep {
  size_t block = 0;   // position of the rank whose block is sent or received
  size_t window = 0;  // index of the send inside the chunk
  bool receives = false;
  // Reduces the received data with this rank's input; without `receives`, takes the input alone.
  bool reduces = false;
  bool stores = false;  // in the output
  bool sends = false;
};

enum class PipelineKind { kAllGather, kReduceScatter, kAllReduce };

// The steps of the rank at `position` of `ranks` (at least two) on one ring.
class Schedule {
 public:
  Schedule(PipelineKind kind, size_t ranks, size_t position, size_t stride, size_t windows)
      : kind_(kind), ranks_(ranks), position_(position), stride_(stride), windows_(windows) {}

  size_t steps_per_window() const {
    return kind_ == PipelineKind::kAllReduce ? 2 * ranks_ - 1 : ranks_;
  }
  size_t step_count() const { return windows_ * steps_per_window(); }
  PipelineStep step(size_t i) const;
  // Positions of the neighbours in the ring.
  size_t next() const { return (position_ + stride_) % ranks_; }
  size_t previous() const { return (position_ + ranks_ - stride_) % ranks_; }

 private:
  size_t position_behind(size_t hops) const {
    return (position_ + hops * (ranks_ - stride_)) % ranks_;
  }

  PipelineKind kind_;
  size_t ranks_, position_, stride_, windows_;
};

// Returns the strides of k rings over `ranks` positions: 1, -1, 3, -3, ..., without those that do
// not visit all positions, and repeated if there are fewer than k. With `neighbours_only`, the
// strides are 1 and -1: for several nodes, where only ranks at adjacent positions share memory.
std::vector<size_t> ring_strides(size_t ranks, size_t k, bool neighbours_only);

// Returns the interval of a block of `block_bytes` bytes that is sent in `window` on ring `ring` of
// k. `send_bytes` and the boundaries of chunks are multiples of `grain` bytes.
Interval interval_of_send(size_t block_bytes, size_t k, size_t ring, size_t window,
                          size_t send_bytes, size_t grain);

// Returns the number of windows that the longest block, of `longest_bytes` bytes, needs.
size_t window_count(size_t longest_bytes, size_t k, size_t send_bytes, size_t grain);

}  // namespace fsccl
