// Collectives among the ranks of one host: every one is a loop of the transport's steps.
//
// Buffers are cut in chunks that fit a slot. What a rank publishes in a step and what it reads is
// written above each operation. Ranks are local ranks here. Every function must be called by all
// ranks of the host in the same order; begin() of the transport comes first. With one rank they
// copy.
#pragma once

#include <vector>

#include "shm_steps.h"
#include "buffer_list.h"
#include "reduce.h"

namespace fsccl {

class Local {
 public:
  explicit Local(ShmSteps& shm) : shm_(shm) {}

  int rank() const { return shm_.rank(); }
  int size() const { return shm_.size(); }
  ShmSteps& shm() { return shm_; }

  void barrier();

  // `in` and `out` may be the same. Latency-bound: one step, everyone reduces everything.
  void all_reduce_one_shot(const void* in, void* out, size_t count, const Reduction& r);
  // Bandwidth-bound: everyone reduces its share and publishes it, chunk by chunk.
  void all_reduce_two_shot(const void* in, void* out, size_t count, const Reduction& r);

  // Rank i gets the reduction of interval bounds[i] (bytes) of everyone's `in`, in `out`.
  // Intervals may overlap or be empty; `out` must not lie inside `in` unless it is interval i.
  void reduce_scatter(const BufferList& in, const std::vector<Interval>& bounds,
                      const BufferList& out, const Reduction& r);
  // Rank i has interval bounds[i] (bytes) of `buffer`; afterwards everyone has all intervals.
  void all_gather(const BufferList& buffer, const std::vector<Interval>& bounds);

  void broadcast(const BufferList& buffer, int root);
  // `out` matters on the root only and may be `in`.
  void reduce(const void* in, void* out, size_t count, const Reduction& r, int root);

  // send[j] goes to rank j, recv[j] comes from rank j; the sizes must agree pairwise. `longest` is
  // the size of the longest message of any pair, the same on all ranks.
  void all_to_all(const BufferLists& send, const BufferLists& recv, size_t longest);
  // The longest, where ranks know only their own sizes. Throws Error(kMismatch) when what rank j
  // sends, be it this rank itself, is not what this rank expects of it.
  size_t agree_on_sizes(const BufferLists& send, const BufferLists& recv);

 private:
  void expect_sent(int from, uint64_t sent, const BufferLists& recv) const;
  void two_shot(const void* in, void* out, size_t count, const Reduction& r, int root);

  ShmSteps& shm_;
};

}  // namespace fsccl
