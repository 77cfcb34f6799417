// Interval arithmetic: dividing a buffer among ranks, and intersecting two divisions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "types.h"

namespace fsccl {

// The half-open interval [lo, hi), in bytes or elements.
struct Interval {
  size_t lo = 0, hi = 0;
  FSCCL_HD size_t size() const { return hi > lo ? hi - lo : 0; }
  FSCCL_HD bool empty() const { return hi <= lo; }
};

// Divides [0, n) into `parts` intervals and returns the i-th. Their boundaries, except n, are
// multiples of `grain`, and their sizes differ by at most one grain, so that ranks have equal
// amounts of work.
FSCCL_HD inline Interval cut(size_t n, size_t parts, size_t i, size_t grain = 1) {
  const size_t grains = (n + grain - 1) / grain;
  const size_t grains_per_part = grains / parts, extra_grains = grains % parts;
  const size_t lo = (i * grains_per_part + (i < extra_grains ? i : extra_grains)) * grain;
  const size_t hi = lo + (grains_per_part + (i < extra_grains ? 1 : 0)) * grain;
  return {lo < n ? lo : n, hi < n ? hi : n};
}

// Returns the intersection, which may be empty.
FSCCL_HD inline Interval overlap(Interval a, Interval b) {
  return {a.lo > b.lo ? a.lo : b.lo, a.hi < b.hi ? a.hi : b.hi};
}

// Returns all `parts` intervals of [base, base + n), as cut() divides them.
inline std::vector<Interval> cut_all(size_t base, size_t n, size_t parts, size_t grain = 1) {
  std::vector<Interval> out(parts);
  for (size_t i = 0; i < parts; ++i) {
    const Interval c = cut(n, parts, i, grain);
    out[i] = {base + c.lo, base + c.hi};
  }
  return out;
}

}  // namespace fsccl
