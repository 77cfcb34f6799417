// What every thread of fsccl's own begins with.
#pragma once

#include <pthread.h>

#include <csignal>

namespace fsccl {

// Signals belong to the program's own threads. The name, of at most 15 characters, is for `top`.
inline void begin_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace fsccl
