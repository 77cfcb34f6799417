// Collectives among the ranks of one lane: every one is a loop of the lane's steps.
//
// Buffers are cut in chunks that fit a slot. What a rank publishes in a step and what it reads is
// written above each operation. Ranks are lane ranks here. Every function must be called by all
// ranks of the lane in the same order; begin() of the lane comes first. With one rank they copy.
#pragma once

#include <vector>

#include "lane.h"
#include "pieces.h"
#include "reduce.h"

namespace fsccl {

class Local {
 public:
  explicit Local(Lane& lane) : lane_(lane) {}

  int rank() const { return lane_.rank(); }
  int size() const { return lane_.size(); }
  Lane& lane() { return lane_; }

  void barrier();

  // `in` and `out` may be the same. Latency-bound: one step, everyone reduces everything.
  void all_reduce_one_shot(const void* in, void* out, size_t count, const Reduction& r);
  // Bandwidth-bound: everyone reduces its share and publishes it, chunk by chunk.
  void all_reduce_two_shot(const void* in, void* out, size_t count, const Reduction& r);

  // Rank i gets the reduction of interval bounds[i] (bytes) of everyone's `in`, in `out`.
  // Intervals may overlap or be empty; `out` must not lie inside `in` unless it is interval i.
  void reduce_scatter(const Pieces& in, const std::vector<Interval>& bounds, const Pieces& out,
                      const Reduction& r);
  // Rank i has interval bounds[i] (bytes) of `buffer`; afterwards everyone has all intervals.
  void all_gather(const Pieces& buffer, const std::vector<Interval>& bounds);

  void broadcast(const Pieces& buffer, int root);
  // `out` matters on the root only and may be `in`.
  void reduce(const void* in, void* out, size_t count, const Reduction& r, int root);

  // send[j] goes to rank j, recv[j] comes from rank j; the sizes must agree pairwise. `longest` is
  // the size of the longest message of any pair, the same on all ranks.
  void all_to_all(const std::vector<Pieces>& send, const std::vector<Pieces>& recv, size_t longest);
  // The longest, where ranks know only their own sizes. Throws Error(kMismatch) when what rank j
  // sends, be it this rank itself, is not what this rank expects of it.
  size_t agree_on_sizes(const std::vector<Pieces>& send, const std::vector<Pieces>& recv);

 private:
  void expect_sent(int from, uint64_t sent, const std::vector<Pieces>& recv) const;
  void two_shot(const void* in, void* out, size_t count, const Reduction& r, int root);

  Lane& lane_;
};

}  // namespace fsccl
