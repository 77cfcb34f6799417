// Scatter-gather list: several contiguous buffers, such as a list of tensors, used as one buffer,
// their concatenation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "partition.h"
#include "types.h"

namespace fsccl {

// A contiguous buffer, not owned.
struct Buffer {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// Wraps an input by dropping const: functions that take `const BufferList&` as an input only read
// it.
inline Buffer buffer_of(const void* data, size_t bytes) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), bytes};
}

// A scatter-gather list. Offsets and intervals are in bytes of the concatenation. The memory
// belongs to the caller.
class BufferList {
 public:
  BufferList() = default;
  BufferList(const void* data, size_t bytes, DType dtype = DType::kOpaque) : dtype_(dtype) {
    add(buffer_of(data, bytes));
  }

  void add(Buffer buffer) {
    if (buffer.bytes == 0) return;
    // Buffers that are adjacent in memory are merged, so that a contiguous buffer stays one entry.
    if (!buffers_.empty() && buffers_.back().data + buffers_.back().bytes == buffer.data) {
      buffers_.back().bytes += buffer.bytes;
    } else {
      starts_.push_back(total_);
      buffers_.push_back(buffer);
    }
    total_ += buffer.bytes;
  }

  size_t bytes() const { return total_; }
  // Element type, which ranks compare. Slices have none.
  DType dtype() const { return dtype_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }

  // Calls f(pointer, length, offset) for every contiguous part of the interval. `offset` is
  // relative to the start of the interval.
  template <class F>
  void visit(Interval range, F&& f) const {
    if (range.empty()) return;
    size_t i = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), range.lo) -
                                   starts_.begin()) -
               1;
    for (size_t position = range.lo; position < range.hi; ++i) {
      const size_t offset_in_buffer = position - starts_[i];
      const size_t n = std::min(buffers_[i].bytes - offset_in_buffer, range.hi - position);
      f(buffers_[i].data + offset_in_buffer, n, position - range.lo);
      position += n;
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

  // Returns the address of the interval if it is contiguous in memory, else null.
  std::byte* contiguous(Interval range) const {
    std::byte* data = nullptr;
    visit(range, [&](std::byte* p, size_t n, size_t) { data = n == range.size() ? p : nullptr; });
    return data;
  }

  BufferList slice(Interval range) const {
    BufferList out;
    visit(range, [&](std::byte* p, size_t n, size_t) { out.add({p, n}); });
    return out;
  }

 private:
  std::vector<Buffer> buffers_;
  std::vector<size_t> starts_;  // offset of each buffer
  size_t total_ = 0;            // bytes
  DType dtype_ = DType::kOpaque;
};

using BufferLists = std::vector<BufferList>;  // often one entry per rank

// Returns a hash of the sizes of a list. Lists with different sizes have different hashes, also
// where their totals are equal.
inline uint64_t hash_of_sizes(const BufferLists& list) {
  uint64_t h = list.size();
  for (const BufferList& p : list) {
    h = (h ^ p.bytes()) * 0x9E3779B97F4A7C15u;
    h ^= h >> 32;
  }
  return h;
}

// Throws Error(kUsage) unless this rank's input to a gather is as large as its part of the output.
inline void check_gather_sizes(const BufferList& input, const BufferList& output) {
  if (input.bytes() == output.bytes()) return;
  fail_usage("this rank's place has " + std::to_string(output.bytes()) + " bytes for " +
             std::to_string(input.bytes()));
}

}  // namespace fsccl
