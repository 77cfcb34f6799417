// One object of type T per process.
//
// A forked child gets an object of its own: that of the parent is not the child's to close, and its
// locks may be held by threads that do not exist in the child. Objects are never destroyed, because
// threads and objects that outlive all static objects may still use them.
#pragma once

#include <unistd.h>

#include <atomic>

namespace fsccl {

// Returns the object of the calling process, created on first use. Any thread may call.
template <class T>
T& per_process() {
  struct Instance {
    const pid_t process = getpid();
    T value;
  };
  static std::atomic<Instance*> current{new Instance};
  Instance* instance = current;
  if (instance->process == getpid()) return instance->value;
  auto* const fresh = new Instance;
  return current.compare_exchange_strong(instance, fresh) ? fresh->value : current.load()->value;
}

}  // namespace fsccl
