// Sleeping until a word in (shared) memory changes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fsccl {

#ifndef FSCCL_PLAYS_INTERLEAVINGS  // a test brings its own, and both functions below
using Word = std::atomic<uint32_t>;
#endif
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free,
              "a futex word is a plain 32-bit word");

// Sleeps while `word == seen`, at most `limit`. May return early for no reason.
void futex_wait(const Word& word, uint32_t seen, std::chrono::milliseconds limit);
void futex_wake_all(const Word& word);

// How long a waiting rank stays awake before it sleeps. With more ranks than cores the peer that is
// waited for needs this very core, so spinning only delays it: yield a few times, then sleep.
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
