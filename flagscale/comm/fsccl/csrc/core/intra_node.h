// Collectives among the ranks of one node, through shared memory. Each is a loop of steps
// (shm_steps.h).
//
// Buffers are divided into chunks that fit a slot. The comment above each definition describes the
// data that a rank publishes and reads in a step. Ranks are local ranks here: indices in the node.
// All ranks of the node call the same functions in the same order, between ShmSteps::begin() and
// end(). With one rank, the functions copy the input to the output.
#pragma once

#include <vector>

#include "shm_steps.h"
#include "buffer_list.h"
#include "reduce.h"

namespace fsccl {

// Collectives of the ranks of one node. One thread at a time calls.
class IntraNodeCollectives {
 public:
  explicit IntraNodeCollectives(ShmSteps& shm) : shm_(shm) {}

  int rank() const { return shm_.rank(); }
  int size() const { return shm_.size(); }
  ShmSteps& shm() { return shm_; }

  void barrier();

  // Latency-bound: a single step in which every rank reduces everything. `in` and `out` may be the
  // same.
  void all_reduce_one_shot(const void* in, void* out, size_t count, const Reduction& r);
  // Bandwidth-bound: every rank reduces its share of a chunk and publishes the result.
  void all_reduce_two_shot(const void* in, void* out, size_t count, const Reduction& r);

  // Rank i gets in `out` the reduction of interval bounds[i] (bytes) of all `in`. Intervals may
  // overlap or be empty. `out` must not lie inside `in` unless it is interval i.
  void reduce_scatter(const BufferList& in, const std::vector<Interval>& bounds,
                      const BufferList& out, const Reduction& r);
  // Rank i contributes interval bounds[i] (bytes) of `buffer`. Afterwards all ranks have all
  // intervals.
  void all_gather(const BufferList& buffer, const std::vector<Interval>& bounds);

  void broadcast(const BufferList& buffer, int root);
  // Only the root writes `out`, which may be `in`.
  void reduce(const void* in, void* out, size_t count, const Reduction& r, int root);

  // send[j] is sent to rank j, recv[j] is received from rank j. Sizes must agree pairwise.
  // `longest_bytes` is the size of the longest message of any pair, the same on all ranks.
  void all_to_all(const BufferLists& send, const BufferLists& recv, size_t longest_bytes);
  // Returns `longest_bytes` for all_to_all() if ranks know only their own sizes. Throws
  // Error(kMismatch) if rank j, which may be this rank, sends another size than this rank expects
  // from it.
  size_t exchange_sizes(const BufferLists& send, const BufferLists& recv);

 private:
  void check_sent_size(int from, uint64_t sent, const BufferLists& recv) const;
  void two_shot(const void* in, void* out, size_t count, const Reduction& r, int root);

  ShmSteps& shm_;
};

}  // namespace fsccl
