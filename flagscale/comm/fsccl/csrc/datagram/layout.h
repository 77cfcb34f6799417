// Division of a buffer into pieces, each the payload of one packet, and into shards of whole
// pieces, one per rank. The owner of a shard is the rank that sums it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../core/partition.h"

namespace fsccl::datagram {

// Offsets and sizes of the pieces and shards of one buffer.
struct BucketLayout {
  static constexpr size_t kGrain =
      16;  // alignment of pieces in bytes; whole elements of every type

  size_t bytes = 0;             // of the buffer
  size_t piece_bytes = kGrain;  // a multiple of kGrain
  int ranks = 1;

  size_t pieces() const { return ceil_div(bytes, piece_bytes); }  // number of pieces
  // Returns the indices of the pieces of a rank's shard.
  Interval shard(int rank) const {
    return cut(pieces(), static_cast<size_t>(ranks), static_cast<size_t>(rank));
  }
  // Returns the bytes of piece p.
  Interval piece_interval(size_t p) const {
    return {p * piece_bytes, std::min(bytes, (p + 1) * piece_bytes)};
  }
  // Returns the piece at a byte offset with this length; pieces() if there is none.
  size_t piece_at(uint64_t offset, size_t length) const {
    const size_t p = static_cast<size_t>(offset / piece_bytes);
    if (offset >= bytes || offset % piece_bytes != 0 || piece_interval(p).size() != length)
      return pieces();
    return p;
  }
};

// One bit per piece, in the format of the wire.
class Bitmap {
 public:
  explicit Bitmap(size_t size = 0) : size_(size), bytes_(ceil_div<size_t>(size, 8)) {}

  size_t size() const { return size_; }
  bool test(size_t i) const { return (bytes_[i / 8] >> (i % 8) & 1) != 0; }
  // Returns whether the bit was clear before.
  bool set(size_t i) {
    if (test(i)) return false;
    bytes_[i / 8] = static_cast<uint8_t>(bytes_[i / 8] | 1U << (i % 8));
    ++count_;
    return true;
  }
  size_t count() const { return count_; }
  bool all() const { return count_ == size_; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  size_t size_, count_ = 0;
  std::vector<uint8_t> bytes_;
};

}  // namespace fsccl::datagram
