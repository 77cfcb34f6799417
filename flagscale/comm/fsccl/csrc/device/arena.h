// Device memory for the steps between: one block an engine, kept from operation to operation.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace fsccl {

// What an operation takes is free again at the next reset. An operation that needs more than there
// is gets the rest from torch's allocator, and the block is larger for the next one.
//
// On CUDA the block belongs to the track kNative, on which every operation begins and ends, so
// that whatever was enqueued before a reset is over before what is enqueued after it.
class Arena {
 public:
  explicit Arena(at::Device device) : options_(at::TensorOptions(at::kByte).device(device)) {}

  void reset() {
    beyond_.clear();
    if (used_ > size_) {
      size_ = used_;
      block_ = at::Tensor();  // before the larger one is made
      block_ = at::empty({size_}, options_);
    }
    used_ = 0;
  }

  // `count` elements, not initialised.
  at::Tensor take(int64_t count, at::ScalarType type) {
    const int64_t bytes = count * static_cast<int64_t>(at::elementSize(type));
    const int64_t at = used_;
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    if (size_ > 0 && used_ <= size_) return block_.narrow(0, at, bytes).view(type);
    beyond_.push_back(at::empty({bytes}, options_));
    return beyond_.back().view(type);
  }

 private:
  static constexpr int64_t kAlign = 512;
  at::TensorOptions options_;
  at::Tensor block_;
  std::vector<at::Tensor> beyond_;
  int64_t size_ = 0, used_ = 0;
};

}  // namespace fsccl
