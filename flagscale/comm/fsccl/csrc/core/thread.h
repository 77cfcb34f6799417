// Setup of the threads that fsccl starts.
#pragma once

#include <pthread.h>

#include <csignal>

namespace fsccl {

// Sets up the calling thread: blocks all signals, so that the threads of the program handle them,
// and sets the thread name (at most 15 characters) that `top` shows.
inline void set_up_thread(const char* name) {
  sigset_t signals;
  sigfillset(&signals);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace fsccl
