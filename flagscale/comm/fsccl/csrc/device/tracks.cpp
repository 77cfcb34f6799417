#include "tracks.h"

#include <sched.h>

namespace fsccl {

void HostTracks::await(Track, Word& word, uint32_t value, int peer) {
  constexpr std::chrono::milliseconds kLook(100);
  for (int i = 0; i < spin_.pauses && !reached(word, value); ++i) cpu_relax();
  for (int i = 0; i < spin_.yields && !reached(word, value); ++i) sched_yield();
  bool looked = false;
  while (!reached(word, value)) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - value) >= 0) break;
    futex_wait(word, seen, kLook);
    if (reached(word, value)) break;
    look_(peer);
    looked = true;
  }
  if (looked) look_(-1);
}

}  // namespace fsccl
