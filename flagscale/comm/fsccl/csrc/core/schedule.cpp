#include "schedule.h"

#include <numeric>

namespace fsccl {

PipelineStep Schedule::at(size_t i) const {
  const size_t t = i % per_window();
  const bool gathers = kind_ == PipelineKind::kAllGather || t >= ranks_;
  PipelineStep step;
  step.window = i / per_window();
  step.receives = t > 0;
  if (gathers) {
    // In an all-reduce the reduced own block was sent on by the last step of the first half.
    const size_t hops = kind_ == PipelineKind::kAllGather ? t : t - ranks_ + 1;
    step.block = behind(hops);
    step.keeps = hops > 0;
    step.sends = hops + 1 < ranks_;
  } else {
    step.block = behind(t + 1);
    step.reduces = true;
    step.keeps = t + 1 == ranks_;
    step.sends = !step.keeps || kind_ == PipelineKind::kAllReduce;
  }
  return step;
}

std::vector<size_t> ring_strides(size_t ranks, size_t k, bool neighbours_only) {
  std::vector<size_t> kinds;
  for (size_t s = 1; s < ranks && (s == 1 || !neighbours_only); ++s) {
    if (std::gcd(s, ranks) != 1 || 2 * s > ranks) continue;
    kinds.push_back(s);
    if (2 * s != ranks) kinds.push_back(ranks - s);
  }
  std::vector<size_t> out;
  for (size_t c = 0; c < k; ++c) out.push_back(kinds[c % kinds.size()]);
  return out;
}

Interval piece_of(size_t bytes, size_t k, size_t ring, size_t window, size_t send, size_t grain) {
  const Interval chunk = cut(bytes, k, ring, grain);
  const size_t lo = std::min(chunk.lo + window * send, chunk.hi);
  return {lo, std::min(lo + send, chunk.hi)};
}

size_t windows_for(size_t longest, size_t k, size_t send, size_t grain) {
  return ceil_div(cut(longest, k, 0, grain).size(), send);
}

}  // namespace fsccl
