#include "futex.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fsccl {

void futex_wait(const Word& word, uint32_t expected, std::chrono::milliseconds timeout) {
  timespec ts{};
  ts.tv_sec = timeout.count() / 1000;
  ts.tv_nsec = (timeout.count() % 1000) * 1000000;
  // Not FUTEX_PRIVATE_FLAG, because processes share the word.
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT, expected, &ts, nullptr,
          0);
}

void futex_wake_all(const Word& word) {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

SpinPolicy SpinPolicy::for_ranks(int ranks_on_host) {
  cpu_set_t affinity;
  CPU_ZERO(&affinity);
  const int cores =
      sched_getaffinity(0, sizeof affinity, &affinity) == 0 ? CPU_COUNT(&affinity) : 1;
  // If every rank has its own core: about 50 us of pauses, which is longer than the usual skew
  // between ranks, and too short to slow down other programs.
  if (ranks_on_host <= cores) return {1500, 0};
  return {20, 16};
}

}  // namespace fsccl
