// Why the ranks that share a piece of memory stop: what the first of them to fail has written
// there. It lies in the memory, which is zero at first.
#pragma once

#include <algorithm>
#include <cstring>
#include <thread>

#include "futex.h"
#include "types.h"

namespace fsccl {

class Verdict {
 public:
  // The first one wins, and is returned.
  Error settle(const Error& why) {
    constexpr int kGlances = 1000;  // of who writes now; it may be killed there
    uint32_t state = kNone;
    if (!state_.compare_exchange_strong(state, kWriting)) {
      for (int i = 0; i < kGlances && !settled(); ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      return settled() ? Error(Fault::kAborted, at_fault_, why_) : why;
    }
    at_fault_ = why.rank;
    const size_t n = std::min(std::strlen(why.what()), sizeof why_ - 1);
    std::memcpy(why_, why.what(), n);
    why_[n] = '\0';
    state_.store(kSettled, std::memory_order_release);
    return why;
  }
  void throw_if_settled() const {
    if (settled()) throw Error(Fault::kAborted, at_fault_, why_);
  }

 private:
  static constexpr uint32_t kNone = 0, kWriting = 1, kSettled = 2;
  bool settled() const { return state_.load(std::memory_order_acquire) == kSettled; }

  Word state_;
  int32_t at_fault_;
  char why_[1024];
};

}  // namespace fsccl
