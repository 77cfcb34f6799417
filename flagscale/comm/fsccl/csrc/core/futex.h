// Sleeping until a word in memory, which processes may share, changes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fsccl {

// The interleavings test (tests/unit/fsccl/core) defines its own, and both functions below.
#ifndef FSCCL_TEST_INTERLEAVINGS
using Word = std::atomic<uint32_t>;
#endif
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free,
              "a futex word is a plain 32-bit word");

// Sleeps while `word == expected`, at most `timeout`. May return early for no reason.
void futex_wait(const Word& word, uint32_t expected, std::chrono::milliseconds timeout);
void futex_wake_all(const Word& word);

// Busy waiting of a rank before it sleeps: so many pause instructions, then so many sched_yield().
// With more ranks than cores, the awaited peer needs this very core, so that spinning only delays
// it; the rank then yields a few times and sleeps.
struct SpinPolicy {
  int pauses = 0;
  int yields = 0;
  static SpinPolicy for_ranks(int ranks_on_host);
};

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace fsccl
