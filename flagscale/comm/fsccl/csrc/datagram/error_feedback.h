// Error feedback: the part of this rank's gradient that an operation has excluded (the residual) is
// stored, and added to the next gradient of the same bucket, so that over several operations the
// sum is complete. A bucket is identified by its address, size and type. Only the most recent
// kMaxBuckets are stored.
#pragma once

#include <list>
#include <utility>
#include <vector>

#include "../core/reduce.h"
#include "layout.h"

namespace fsccl::datagram {

// Residuals of the buckets of one rank. One thread at a time calls.
class ErrorFeedback {
 public:
  static constexpr size_t kMaxBuckets = 256;
  // Identity of a bucket.
  struct BucketKey {
    const void* memory = nullptr;
    size_t bytes = 0;
    DType dtype = DType::kF32;
    bool operator==(const BucketKey& other) const {
      return memory == other.memory && bytes == other.bytes && dtype == other.dtype;
    }
  };

  bool has(const BucketKey& bucket) const {
    for (const Residual& residual : residuals_) {
      if (residual.bucket == bucket) return true;
    }
    return false;
  }
  // Adds the stored residual of a bucket to `gradient`, which is a copy of the bucket's memory.
  void add(const BucketKey& bucket, std::byte* gradient) const {
    Reduction sum;
    sum.dtype = bucket.dtype;
    for (const Residual& residual : residuals_) {
      if (!(residual.bucket == bucket)) continue;
      for (const auto& [offset, bytes] : residual.pieces) {
        const void* sources[] = {gradient + offset, bytes.data()};
        reduce(sum, gradient + offset, sources, 2, bytes.size() / sum.width());
      }
    }
  }
  // Replaces the residual of a bucket by the excluded pieces of `gradient`.
  void store(const BucketKey& bucket, const std::byte* gradient, const BucketLayout& layout,
             const Bitmap& excluded) {
    residuals_.remove_if([&](const Residual& residual) { return residual.bucket == bucket; });
    if (excluded.count() == 0) return;
    Residual residual{bucket, {}};
    for (size_t p = 0; p < layout.pieces(); ++p) {
      const Interval span = layout.piece_interval(p);
      if (!excluded.test(p)) continue;
      residual.pieces.emplace_back(span.lo,
                                   std::vector<std::byte>(gradient + span.lo, gradient + span.hi));
    }
    residuals_.push_front(std::move(residual));
    if (residuals_.size() > kMaxBuckets) residuals_.pop_back();
  }

 private:
  // The excluded pieces of a bucket.
  struct Residual {
    BucketKey bucket;
    std::vector<std::pair<size_t, std::vector<std::byte>>> pieces;  // by offset
  };
  std::list<Residual> residuals_;
};

}  // namespace fsccl::datagram
