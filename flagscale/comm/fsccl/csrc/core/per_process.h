// What a process has one of. A forked child has its own: its parent's is not its to end, and locks
// in it may be held by threads that are not here. Never destroyed: threads and objects that outlive
// every static one may still use it.
#pragma once

#include <unistd.h>

#include <atomic>

namespace fsccl {

template <class T>
T& per_process() {
  struct Owned {
    const pid_t process = getpid();
    T value;
  };
  static std::atomic<Owned*> it{new Owned};
  Owned* now = it;
  if (now->process == getpid()) return now->value;
  auto* const own = new Owned;
  return it.compare_exchange_strong(now, own) ? own->value : it.load()->value;
}

}  // namespace fsccl
