// What has been excluded of this rank's own gradients: kept, and added to the next of the same
// bucket, so that over operations nothing is lost. Buckets are told apart by their memory, their
// size and type; only the latest kMost are kept.
#pragma once

#include <list>
#include <utility>
#include <vector>

#include "../core/reduce.h"
#include "layout.h"

namespace fsccl::datagram {

class Feedback {
 public:
  static constexpr size_t kMost = 256;
  struct Bucket {
    const void* memory = nullptr;
    size_t bytes = 0;
    DType dtype = DType::kF32;
    bool operator==(const Bucket& o) const {
      return memory == o.memory && bytes == o.bytes && dtype == o.dtype;
    }
  };

  bool has(const Bucket& bucket) const {
    for (const Kept& k : kept_) {
      if (k.bucket == bucket) return true;
    }
    return false;
  }
  // Adds what is kept of the bucket to `gradient`, which is another place than the bucket's.
  void add(const Bucket& bucket, std::byte* gradient) const {
    Reduction sum;
    sum.dtype = bucket.dtype;
    for (const Kept& k : kept_) {
      if (!(k.bucket == bucket)) continue;
      for (const auto& [at, bytes] : k.pieces) {
        const void* both[] = {gradient + at, bytes.data()};
        reduce(sum, gradient + at, both, 2, bytes.size() / sum.width());
      }
    }
  }
  // Keeps what has been excluded of `gradient`, in place of what was kept before.
  void keep(const Bucket& bucket, const std::byte* gradient, const Layout& layout,
            const Bits& excluded) {
    kept_.remove_if([&](const Kept& k) { return k.bucket == bucket; });
    if (excluded.count() == 0) return;
    Kept now{bucket, {}};
    for (size_t p = 0; p < layout.pieces(); ++p) {
      const Interval span = layout.span(p);
      if (!excluded.test(p)) continue;
      now.pieces.emplace_back(span.lo, std::vector<std::byte>(gradient + span.lo, gradient + span.hi));
    }
    kept_.push_front(std::move(now));
    if (kept_.size() > kMost) kept_.pop_back();
  }

 private:
  struct Kept {
    Bucket bucket;
    std::vector<std::pair<size_t, std::vector<std::byte>>> pieces;  // by offset
  };
  std::list<Kept> kept_;
};

}  // namespace fsccl::datagram
