#include "futex.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fsccl {

void futex_wait(const Word& word, uint32_t seen, std::chrono::milliseconds limit) {
  timespec ts{};
  ts.tv_sec = limit.count() / 1000;
  ts.tv_nsec = (limit.count() % 1000) * 1000000;
  // Not FUTEX_PRIVATE: the word is shared between processes.
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT, seen, &ts, nullptr, 0);
}

void futex_wake_all(const Word& word) {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

SpinPolicy SpinPolicy::for_ranks(int ranks_on_host) {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  const int cores = sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine) : 1;
  // About 50 us of pauses where every rank has a core: longer than a rank's skew, shorter than
  // what a busy neighbour would notice.
  if (ranks_on_host <= cores) return {1500, 0};
  return {20, 16};
}

}  // namespace fsccl
