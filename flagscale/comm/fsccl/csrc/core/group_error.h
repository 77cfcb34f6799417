// The first error of the ranks that share a segment. It is stored in the segment, whose memory is
// initially zero. Once it is set, all ranks throw it.
#pragma once

#include <algorithm>
#include <cstring>
#include <thread>

#include "futex.h"
#include "types.h"

namespace fsccl {

// Error in shared memory: it has no pointers, and zeroed memory is a valid GroupError without an
// error.
class GroupError {
 public:
  // Records `error` unless another rank was first. Returns the error that is recorded. Any thread
  // of any process may call.
  Error set_first(const Error& error) {
    constexpr int kWriterPolls = 1000;  // of a concurrent writer, which may be killed while writing
    uint32_t state = kNone;
    if (!state_.compare_exchange_strong(state, kWriting)) {
      for (int i = 0; i < kWriterPolls && !is_set(); ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      return is_set() ? Error(Fault::kAborted, rank_, reason_) : error;
    }
    rank_ = error.rank;
    const size_t n = std::min(std::strlen(error.what()), sizeof reason_ - 1);
    std::memcpy(reason_, error.what(), n);
    reason_[n] = '\0';
    state_.store(kSet, std::memory_order_release);
    return error;
  }
  // Throws the recorded error as kAborted, if there is one.
  void throw_if_set() const {
    if (is_set()) throw Error(Fault::kAborted, rank_, reason_);
  }

 private:
  static constexpr uint32_t kNone = 0, kWriting = 1, kSet = 2;
  bool is_set() const { return state_.load(std::memory_order_acquire) == kSet; }

  Word state_;
  int32_t rank_;
  char reason_[1024];
};

}  // namespace fsccl
