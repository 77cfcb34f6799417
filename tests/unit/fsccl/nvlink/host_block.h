// HostBlock: the template argument `B` of the NVLink engine's kernels (nvlink/block_primitives.h)
// on a CPU. A thread of a CUDA block is run by a thread of the operating system or by a fiber.
// Flags and packets are atomics with the memory orders of the GPU's instructions, and all other
// data is plain memory, so that ThreadSanitizer detects accesses that the protocol does not order.
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

// Interleaves the threads: on_access() is called before each memory access, and may run other
// threads. `is_polling`: the thread cannot progress until another one does.
struct Scheduler {
  virtual ~Scheduler() = default;
  virtual void on_access(bool is_polling) = 0;
};

class Barrier {
 public:
  explicit Barrier(u32 size) : size_(size) {}
  void wait(Scheduler& scheduler) {
    const u32 generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    while (generation_.load(std::memory_order_acquire) == generation) scheduler.on_access(true);
  }
  // Result of HostBlock::any(). It is true once a thread has given up waiting, and then for ever.
  std::atomic<bool> disjunction{false};

 private:
  const u32 size_;
  std::atomic<u32> arrived_{0}, generation_{0};
};

class HostBlock {
 public:
  static constexpr u32 kWarp = 1;
  struct GridPosition {
    u32 thread, threads, channel, channels;
  };

  HostBlock(GridPosition position, Barrier* barrier, Scheduler* scheduler)
      : position_(position), barrier_(barrier), scheduler_(scheduler) {}

  u32 thread() const { return position_.thread; }
  u32 threads() const { return position_.threads; }
  u32 channel() const { return position_.channel; }
  u32 channels() const { return position_.channels; }
  void wait_previous_kernel() {}  // the tests launch a kernel when the previous one has ended
  void sync() { barrier_->wait(*scheduler_); }
  bool any(bool condition) {
    if (condition) barrier_->disjunction.store(true, std::memory_order_relaxed);
    sync();
    return barrier_->disjunction.load(std::memory_order_relaxed);
  }
  void fence() {  // a fence that ThreadSanitizer supports
    static std::atomic<u32> word{0};
    word.fetch_add(1, std::memory_order_seq_cst);
  }
  void pause() { scheduler_->on_access(true); }

  template <class W>
  W load(const char* from) const {
    check_aligned(from, sizeof(W));
    scheduler_->on_access(false);
    W value;
    memcpy(&value, from, sizeof value);
    return value;
  }
  template <class W>
  void store(char* to, const W& value) {
    check_aligned(to, sizeof(W));
    scheduler_->on_access(false);
    memcpy(to, &value, sizeof value);
  }

  void post_flag(u32* flag, u32 step) {
    scheduler_->on_access(false);
    atomic(flag)->store(step, std::memory_order_release);
  }
  u32 load_flag(const u32* flag) {
    scheduler_->on_access(false);
    return atomic(flag)->load(std::memory_order_acquire) + early_flag_steps;
  }
  void send(Packet* to, u64 low, u64 high) {
    check_aligned(to, sizeof *to);
    scheduler_->on_access(false);
    atomic(&to->low)->store(low, std::memory_order_relaxed);
    scheduler_->on_access(false);
    atomic(&to->high)->store(high, std::memory_order_relaxed);
  }
  void receive(const Packet* from, u64* low, u64* high) {
    check_aligned(from, sizeof *from);
    scheduler_->on_access(false);
    *high = atomic(&from->high)->load(std::memory_order_relaxed);
    scheduler_->on_access(false);
    *low = atomic(&from->low)->load(std::memory_order_relaxed);
  }
  // One thread simulates a warp. A line whose flag has arrived has arrived whole, which is all that
  // the protocol assumes of GPUs.
  struct Share {
    u64 word[kBundleWords];
  };
  void write_bundle(Bundle* to, const Share& share) {
    check_aligned(to, sizeof(u64) * kLineWords);
    for (u32 i = 0; i < kBundleWords; ++i) {
      if (i % 5 == 0) scheduler_->on_access(false);
      const u32 w = tears_lines ? i ^ (kLineWords - 1) : i;
      const bool flag = w % kLineWords == kLineWords - 1;
      atomic(&to->word[w])
          ->store(share.word[w], flag ? std::memory_order_release : std::memory_order_relaxed);
    }
  }
  Share read_bundle(const Bundle* from) {
    Share share;
    for (u32 w = kBundleWords; w-- > 0;) {
      if (w % 5 == 0) scheduler_->on_access(false);
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

  // Break the protocol on purpose: flags are read as posted so many steps too early, and lines
  // arrive with their flags first.
  static inline u32 early_flag_steps = 0;
  static inline bool tears_lines = false;

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
  static void check_aligned(const void* at, size_t width) {
    if (reinterpret_cast<uintptr_t>(at) % width == 0) return;
    fprintf(stderr, "misaligned access of %zu bytes\n", width);
    abort();
  }

  GridPosition position_;
  Barrier* barrier_;
  Scheduler* scheduler_;
};

using Kernel = void (*)(HostBlock&, const KernelArgs&);

// Kernels by name, and macros for the table's entries.
using KernelTable = std::map<std::string, Kernel>;
#define FSCCL_HOST_COPY_KERNEL(name) {#name, name<HostBlock>},
#define FSCCL_HOST_REDUCTION_KERNEL(name, most, suffix, E) \
  {#name "_" #suffix "_" #most, name<E, most, HostBlock>},
#define FSCCL_HOST_SIZED_COPY_KERNEL(name, most) {#name "_" #most, name<most, HostBlock>},
#define FSCCL_HOST_COPY_KERNELS \
  FSCCL_COPY_KERNELS(FSCCL_HOST_COPY_KERNEL, FSCCL_HOST_SIZED_COPY_KERNEL)
#define FSCCL_HOST_REDUCTION_KERNELS(suffix, E) \
  FSCCL_REDUCTION_KERNELS(FSCCL_HOST_REDUCTION_KERNEL, suffix, E)

}  // namespace nvlink
}  // namespace fsccl
