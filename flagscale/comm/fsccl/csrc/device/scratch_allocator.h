// Device memory for intermediate results of operations: one block per engine, kept between
// operations.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace fsccl {

// Bump allocator. reset() frees all memory that an operation has allocated. If an operation needs
// more than the block, torch's allocator provides the rest, and the next reset enlarges the block.
//
// On CUDA the block belongs to the stream kNative (streams.h), on which every operation begins and
// ends, so steps enqueued before a reset end before steps enqueued after it begin. One thread at a
// time may call.
class ScratchAllocator {
 public:
  explicit ScratchAllocator(at::Device device)
      : options_(at::TensorOptions(at::kByte).device(device)) {}

  void reset() {
    overflow_.clear();
    if (used_ > size_) {
      size_ = used_;
      block_ = at::Tensor();  // freed before the larger one is made
      block_ = at::empty({size_}, options_);
    }
    used_ = 0;
  }

  // Returns `count` elements, not initialised.
  at::Tensor allocate(int64_t count, at::ScalarType type) {
    const int64_t bytes = count * static_cast<int64_t>(at::elementSize(type));
    const int64_t offset = used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (size_ > 0 && used_ <= size_) return block_.narrow(0, offset, bytes).view(type);
    overflow_.push_back(at::empty({bytes}, options_));
    return overflow_.back().view(type);
  }

 private:
  static constexpr int64_t kAlignment = 512;  // bytes
  at::TensorOptions options_;
  at::Tensor block_;
  std::vector<at::Tensor> overflow_;
  int64_t size_ = 0, used_ = 0;  // bytes
};

}  // namespace fsccl
