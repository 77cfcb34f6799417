#include "schedule.h"

#include <numeric>

namespace fsccl {

PipelineStep Schedule::step(size_t i) const {
  const size_t t = i % steps_per_window();
  const bool gathers = kind_ == PipelineKind::kAllGather || t >= ranks_;
  PipelineStep s;
  s.window = i / steps_per_window();
  s.receives = t > 0;
  if (gathers) {
    // In an all-reduce, the last step of the reduce-scatter has sent this rank's reduced block.
    const size_t hops = kind_ == PipelineKind::kAllGather ? t : t - ranks_ + 1;
    s.block = position_behind(hops);
    s.stores = hops > 0;
    s.sends = hops + 1 < ranks_;
  } else {
    s.block = position_behind(t + 1);
    s.reduces = true;
    s.stores = t + 1 == ranks_;
    s.sends = !s.stores || kind_ == PipelineKind::kAllReduce;
  }
  return s;
}

std::vector<size_t> ring_strides(size_t ranks, size_t k, bool neighbours_only) {
  std::vector<size_t> strides;
  for (size_t s = 1; s < ranks && (s == 1 || !neighbours_only); ++s) {
    if (std::gcd(s, ranks) != 1 || 2 * s > ranks) continue;
    strides.push_back(s);
    if (2 * s != ranks) strides.push_back(ranks - s);
  }
  std::vector<size_t> out;
  for (size_t c = 0; c < k; ++c) out.push_back(strides[c % strides.size()]);
  return out;
}

Interval interval_of_send(size_t block_bytes, size_t k, size_t ring, size_t window,
                          size_t send_bytes, size_t grain) {
  const Interval chunk = cut(block_bytes, k, ring, grain);
  const size_t lo = std::min(chunk.lo + window * send_bytes, chunk.hi);
  return {lo, std::min(lo + send_bytes, chunk.hi)};
}

size_t window_count(size_t longest_bytes, size_t k, size_t send_bytes, size_t grain) {
  return ceil_div(cut(longest_bytes, k, 0, grain).size(), send_bytes);
}

}  // namespace fsccl
