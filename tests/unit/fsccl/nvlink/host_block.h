// A thread of a CUDA block on the CPU, run by a thread of the operating system or by a fiber: the
// same kernels, with flags and packets as atomics of the memory orders of the GPU's instructions,
// and all other data as plain memory, so that ThreadSanitizer detects accesses that the protocol
// does not order.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "nvlink/kernels.h"

namespace fsccl {
namespace nvlink {

// Called between any two accesses; `spins` when the thread can only wait.
struct Scheduler {
  virtual ~Scheduler() = default;
  virtual void point(bool spins) = 0;
};

class Barrier {
 public:
  explicit Barrier(u32 size) : size_(size) {}
  void wait(Scheduler& scheduler) {
    const u32 turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    while (turn_.load(std::memory_order_acquire) == turn) scheduler.point(true);
  }
  std::atomic<bool> disjunction{false};  // of any(); a thread gave up waiting: it stays true

 private:
  const u32 size_;
  std::atomic<u32> arrived_{0}, turn_{0};
};

class HostBlock {
 public:
  static constexpr u32 kWarp = 1;
  struct Place {
    u32 thread, threads, channel, channels;
  };

  HostBlock(Place place, Barrier* barrier, Scheduler* scheduler)
      : place_(place), barrier_(barrier), scheduler_(scheduler) {}

  u32 thread() const { return place_.thread; }
  u32 threads() const { return place_.threads; }
  u32 channel() const { return place_.channel; }
  u32 channels() const { return place_.channels; }
  void wait_previous_kernel() {}  // a launch begins when the one before has ended
  void sync() { barrier_->wait(*scheduler_); }
  bool any(bool mine) {
    if (mine) barrier_->disjunction.store(true, std::memory_order_relaxed);
    sync();
    return barrier_->disjunction.load(std::memory_order_relaxed);
  }
  void fence() {  // a fence that ThreadSanitizer supports
    static std::atomic<u32> word{0};
    word.fetch_add(1, std::memory_order_seq_cst);
  }
  void pause() { scheduler_->point(true); }

  template <class W>
  W load(const char* from) const {
    aligned(from, sizeof(W));
    scheduler_->point(false);
    W value;
    memcpy(&value, from, sizeof value);
    return value;
  }
  template <class W>
  void store(char* to, const W& value) {
    aligned(to, sizeof(W));
    scheduler_->point(false);
    memcpy(to, &value, sizeof value);
  }

  void post_flag(u32* flag, u32 step) {
    scheduler_->point(false);
    atomic(flag)->store(step, std::memory_order_release);
  }
  u32 load_flag(const u32* flag) {
    scheduler_->point(false);
    return atomic(flag)->load(std::memory_order_acquire) + eager;
  }
  void send(Packet* to, u64 low, u64 high) {
    aligned(to, sizeof *to);
    scheduler_->point(false);
    atomic(&to->low)->store(low, std::memory_order_relaxed);
    scheduler_->point(false);
    atomic(&to->high)->store(high, std::memory_order_relaxed);
  }
  void receive(const Packet* from, u64* low, u64* high) {
    aligned(from, sizeof *from);
    scheduler_->point(false);
    *high = atomic(&from->high)->load(std::memory_order_relaxed);
    scheduler_->point(false);
    *low = atomic(&from->low)->load(std::memory_order_relaxed);
  }
  // One thread stands for a warp. A line whose flag has arrived has arrived whole: the protocol
  // assumes that of GPUs, and nothing else.
  struct Share {
    u64 word[kBundleWords];
  };
  void write_bundle(Bundle* to, const Share& share) {
    aligned(to, sizeof(u64) * kLineWords);
    for (u32 i = 0; i < kBundleWords; ++i) {
      if (i % 5 == 0) scheduler_->point(false);
      const u32 w = torn ? i ^ (kLineWords - 1) : i;
      const bool flag = w % kLineWords == kLineWords - 1;
      atomic(&to->word[w])
          ->store(share.word[w], flag ? std::memory_order_release : std::memory_order_relaxed);
    }
  }
  Share read_bundle(const Bundle* from) {
    Share share;
    for (u32 w = kBundleWords; w-- > 0;) {
      if (w % 5 == 0) scheduler_->point(false);
      const bool flag = w % kLineWords == kLineWords - 1;
      share.word[w] = atomic(&from->word[w])
                          ->load(flag ? std::memory_order_acquire : std::memory_order_relaxed);
    }
    return share;
  }
  u32 warp_or(u32 bits) { return bits; }

  u32 load_host(const u32* word) { return atomic(word)->load(std::memory_order_relaxed); }
  void store_host(u32* word, u32 value) { atomic(word)->store(value, std::memory_order_relaxed); }
  u64 nanoseconds() {
    return static_cast<u64>(std::chrono::steady_clock::now().time_since_epoch().count());
  }

  // Break the protocol on purpose: flags are read as set so many steps too early, and lines arrive
  // with their flags first.
  static inline u32 eager = 0;
  static inline bool torn = false;

 private:
  template <class T>
  static std::atomic<T>* atomic(T* word) {
    static_assert(sizeof(std::atomic<T>) == sizeof(T));
    return reinterpret_cast<std::atomic<T>*>(word);
  }
  template <class T>
  static const std::atomic<T>* atomic(const T* word) {
    return reinterpret_cast<const std::atomic<T>*>(word);
  }
  // A GPU faults on an access that is not aligned to its size.
  static void aligned(const void* at, size_t width) {
    if (reinterpret_cast<uintptr_t>(at) % width == 0) return;
    fprintf(stderr, "misaligned access of %zu bytes\n", width);
    abort();
  }

  Place place_;
  Barrier* barrier_;
  Scheduler* scheduler_;
};

using Kernel = void (*)(HostBlock&, const KernelArgs&);

// Entries of a table of kernels by name.
using Kernels = std::map<std::string, Kernel>;
#define FSCCL_HOST_MOVER(name) {#name, name<HostBlock>},
#define FSCCL_HOST_REDUCER(name, most, suffix, E) \
  {#name "_" #suffix "_" #most, name<E, most, HostBlock>},
#define FSCCL_HOST_SIZED_MOVER(name, most) {#name "_" #most, name<most, HostBlock>},
#define FSCCL_HOST_MOVERS FSCCL_MOVERS(FSCCL_HOST_MOVER, FSCCL_HOST_SIZED_MOVER)
#define FSCCL_HOST_REDUCERS(suffix, E) FSCCL_REDUCERS(FSCCL_HOST_REDUCER, suffix, E)

}  // namespace nvlink
}  // namespace fsccl
