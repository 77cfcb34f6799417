// Pipelined schedules: the order in which a rank forwards the chunks of an all-gather, a
// reduce-scatter or an all-reduce. Pure arithmetic; pipeline.h moves the bytes.
//
// The buffer is a sequence of blocks, one per rank, and every block is cut into k chunks. Chunk c
// of all blocks travels around ring c: from the rank at position p to the one at p + stride(c). The
// strides are chosen so that the k rings use the connections of all pairs evenly. Inside a ring,
// data moves in sends of FSCCL_PIPELINE_NELEM elements. A window consists of one send per block. It
// travels around the ring before the next window starts, which limits the data that a rank must
// buffer to two sends per ring. While one ring waits for a neighbour, the other rings move.
//
// In one window, the rank at position p takes these steps, where s is the stride (the fused
// primitives of ring algorithms: receive, reduce with the own input, store in the output, send):
//
//   all-gather       send block p; receive, store and send block p-s, ...; receive and store the
//                    last
//   reduce-scatter   send block p-s; receive, reduce and send p-2s, ...; receive, reduce, store p
//   all-reduce       the reduce-scatter, whose last step also sends, then the all-gather from its
//                    second step on
//
// Block b of a reduction is summed in the order of ring c, from b+s on: in one place and always in
// the same order, so that all ranks get the same bits, but not in the order of ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "partition.h"

namespace fsccl {

// A step of a schedule: the fused primitives that apply to one block and window.
struct PipelineStep {
  size_t block = 0;   // position of the rank whose block moves
  size_t window = 0;  // index of the send inside the chunk
  bool receives = false;
  // The received data with the own input, or the own input alone if nothing is received.
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

  size_t per_window() const { return kind_ == PipelineKind::kAllReduce ? 2 * ranks_ - 1 : ranks_; }
  size_t steps() const { return windows_ * per_window(); }
  PipelineStep step(size_t i) const;
  size_t next() const { return (position_ + stride_) % ranks_; }
  size_t previous() const { return (position_ + ranks_ - stride_) % ranks_; }

 private:
  size_t position_behind(size_t hops) const {
    return (position_ + hops * (ranks_ - stride_)) % ranks_;
  }

  PipelineKind kind_;
  size_t ranks_, position_, stride_, windows_;
};

// Returns the stride of each of k rings over `ranks` positions: 1, -1, 3, -3, ..., as far as they
// visit all positions, repeated. With `neighbours_only` just 1 and -1, for ranks of which only
// adjacent positions share memory.
std::vector<size_t> ring_strides(size_t ranks, size_t k, bool neighbours_only);

// Returns the interval of a block of `bytes` bytes that the send of `window` moves on ring `ring`
// of k. `send` (bytes) and the cuts are multiples of `grain`.
Interval interval_of_send(size_t bytes, size_t k, size_t ring, size_t window, size_t send,
                          size_t grain);

// Returns the number of windows that the longest block needs.
size_t windows_for(size_t longest, size_t k, size_t send, size_t grain);

}  // namespace fsccl
