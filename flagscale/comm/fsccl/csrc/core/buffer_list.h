// One logical buffer that lies in several places: a list of tensors seen as their concatenation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "partition.h"

namespace fsccl {

struct Buffer {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// Inputs are wrapped by dropping const; whoever takes `const BufferList&` as an input only reads.
inline Buffer buffer_of(const void* data, size_t bytes) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), bytes};
}

class BufferList {
 public:
  BufferList() = default;
  BufferList(const void* data, size_t bytes) { add(buffer_of(data, bytes)); }

  void add(Buffer p) {
    if (p.bytes == 0) return;
    // Neighbours in memory become one, so that a flat buffer stays one piece.
    if (!list_.empty() && list_.back().data + list_.back().bytes == p.data) {
      list_.back().bytes += p.bytes;
    } else {
      starts_.push_back(total_);
      list_.push_back(p);
    }
    total_ += p.bytes;
  }

  size_t bytes() const { return total_; }
  const std::vector<Buffer>& list() const { return list_; }

  // Calls f(pointer, length, offset in [lo, hi)) for every contiguous run of the interval.
  template <class F>
  void visit(Interval range, F&& f) const {
    if (range.empty()) return;
    size_t i = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), range.lo) -
                                   starts_.begin()) -
               1;
    for (size_t at = range.lo; at < range.hi; ++i) {
      const size_t inside = at - starts_[i];
      const size_t n = std::min(list_[i].bytes - inside, range.hi - at);
      f(list_[i].data + inside, n, at - range.lo);
      at += n;
    }
  }

  void copy_to(void* out, Interval range) const {
    auto* to = static_cast<std::byte*>(out);
    visit(range, [to](const std::byte* p, size_t n, size_t off) { std::memcpy(to + off, p, n); });
  }

  void copy_from(const void* in, Interval range) const {
    const auto* from = static_cast<const std::byte*>(in);
    visit(range, [from](std::byte* p, size_t n, size_t off) { std::memcpy(p, from + off, n); });
  }

  // Where the interval lies if it lies in one run, else null.
  std::byte* contiguous(Interval range) const {
    std::byte* found = nullptr;
    visit(range, [&](std::byte* p, size_t n, size_t) { found = n == range.size() ? p : nullptr; });
    return found;
  }

  BufferList slice(Interval range) const {
    BufferList out;
    visit(range, [&](std::byte* p, size_t n, size_t) { out.add({p, n}); });
    return out;
  }

 private:
  std::vector<Buffer> list_;
  std::vector<size_t> starts_;
  size_t total_ = 0;
};

using BufferLists = std::vector<BufferList>;  // often one a rank

// Tells lists of other sizes apart, also where their sums are the same.
inline uint64_t layout_of(const BufferLists& list) {
  uint64_t h = list.size();
  for (const BufferList& p : list) {
    h = (h ^ p.bytes()) * 0x9E3779B97F4A7C15u;
    h ^= h >> 32;
  }
  return h;
}

// A rank's part of what all ranks gather, and the place that it has for it.
inline void expect_place(const BufferList& part, const BufferList& place) {
  if (part.bytes() == place.bytes()) return;
  fail_usage("this rank's place has " + std::to_string(place.bytes()) + " bytes for " +
             std::to_string(part.bytes()));
}

}  // namespace fsccl
