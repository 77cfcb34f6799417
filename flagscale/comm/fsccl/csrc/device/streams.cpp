#include "streams.h"

#include <sched.h>

namespace fsccl {

void HostStreams::wait_word(StreamId, Word& word, uint32_t value, int peer) {
  constexpr std::chrono::milliseconds kCheckInterval(100);
  for (int i = 0; i < spin_.pauses && !has_reached(word, value); ++i) cpu_relax();
  for (int i = 0; i < spin_.yields && !has_reached(word, value); ++i) sched_yield();
  bool has_checked = false;
  while (!has_reached(word, value)) {
    const uint32_t current = word.load(std::memory_order_acquire);
    if (static_cast<int32_t>(current - value) >= 0) break;
    futex_wait(word, current, kCheckInterval);
    if (has_reached(word, value)) break;
    check_wait_(peer);
    has_checked = true;
  }
  if (has_checked) check_wait_(-1);
}

}  // namespace fsccl
