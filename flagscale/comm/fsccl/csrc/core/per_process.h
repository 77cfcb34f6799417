// One object of type T per process.
//
// A forked child gets a new object: the child must not close the parent's resources, and locks in
// the parent's object may be held by threads that do not exist in the child. Objects are never
// destroyed, because threads and objects that outlive all static objects may still use them.
#pragma once

#include <unistd.h>

#include <atomic>

namespace fsccl {

// Returns the object of the calling process, created on first use. Any thread may call.
template <class T>
T& per_process() {
  struct Instance {
    const pid_t owner_pid = getpid();
    T value;
  };
  static std::atomic<Instance*> current{new Instance};
  Instance* instance = current;
  if (instance->owner_pid == getpid()) return instance->value;
  auto* const new_instance = new Instance;
  return current.compare_exchange_strong(instance, new_instance) ? new_instance->value
                                                                 : current.load()->value;
}

}  // namespace fsccl
