// Sleeping until a word in memory changes. Processes may share the word.
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

// Sleeps while `word == expected`, at most `timeout`. May wake up spuriously.
void futex_wait(const Word& word, uint32_t expected, std::chrono::milliseconds timeout);
void futex_wake_all(const Word& word);

// Busy waiting of a rank before it sleeps: a number of pause instructions, then a number of
// sched_yield() calls. With more ranks than cores, the awaited peer needs the core on which this
// rank spins, so the rank only yields a few times and sleeps.
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
