// A device that is a CPU, whose launches run their blocks one after the other, each as one thread;
// and ranks as threads.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <functional>
#include <thread>

#include "nvlink/engine.h"
#include "host_block.h"

namespace fsccl {
namespace nvlink {

inline const Kernels kKernels = {FSCCL_HOST_MOVERS FSCCL_HOST_REDUCERS(f32, Plain<float>)};

inline std::atomic<int> failures{0};

inline void expect(bool holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "line %d: expected %s\n", line, what);
  ++failures;
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

struct Yielding : Scheduler {
  void point(bool spins) override {
    if (spins) sched_yield();
  }
};

// Calls of a device, for tests to check.
struct Log {
  std::vector<std::string> kernels;
  std::vector<u32> blocks;  // of each
  int allocations = 0, clears = 0, orders = 0, closes = 0;
  std::function<void()> replay;  // repeats the last launch, as a replayed graph does
};

class HostDevice : public Device {
 public:
  explicit HostDevice(Log* log) : log_(log) {}
  ~HostDevice() override {
    for (void* at : allocations_) free(at);
  }
  std::string identity() override { return "cpu"; }
  bool has_nvlink_to(const std::string&) override { return !unlinked; }
  bool unlinked = false;  // no GPU is linked to this one
  bool is_own_memory(const std::string&) override { return !foreign; }
  bool foreign = false;  // memory of other ranks is that of other processes
  char* allocate(u64 bytes) override {
    ++log_->allocations;
    allocations_.push_back(calloc(1, bytes + 256));
    const auto address = reinterpret_cast<uintptr_t>(allocations_.back());
    return reinterpret_cast<char*>((address + 255) / 256 * 256);
  }
  void clear(char* at, u64 bytes, const Stream*) override {
    ++log_->clears;
    memset(at, 0, bytes);
  }
  std::string export_memory(const char* at, u64* offset) override {
    *offset = 64;
    return std::to_string(reinterpret_cast<uintptr_t>(at) - 64);
  }
  char* import_memory(const std::string& shared) override {
    return reinterpret_cast<char*>(std::stoull(shared));
  }
  void release_memory(const std::string&) override { ++log_->closes; }
  char* allocate_host(u64 bytes) override {
    allocations_.push_back(calloc(1, bytes));
    return static_cast<char*>(allocations_.back());
  }
  Function find_kernel(const std::string& name) override {
    const auto found = kKernels.find(name);
    if (found == kKernels.end()) return nullptr;
    return const_cast<void*>(static_cast<const void*>(&*found));
  }
  void launch(Function f, u32 blocks, u32, const KernelArgs& args, Stream, bool) override {
    const auto& kernel = *static_cast<const std::pair<const std::string, Kernel>*>(f);
    log_->kernels.push_back(kernel.first);
    log_->blocks.push_back(blocks);
    log_->replay = [&kernel, blocks, args] {
      for (u32 c = 0; c < blocks; ++c) {
        Barrier alone(1);
        Yielding scheduler;
        HostBlock block({0, 1, c, blocks}, &alone, &scheduler);
        kernel.second(block, args);
      }
    };
    log_->replay();
  }
  void order_streams(Stream, Stream) override { ++log_->orders; }
  bool is_idle(Stream) override { return true; }  // a launch returns when its kernel has ended

 private:
  Log* const log_;
  std::vector<void*> allocations_;
};

// All-gather of one text per rank.
class TextExchange {
 public:
  explicit TextExchange(int ranks) : texts_(static_cast<size_t>(ranks)) {}
  std::vector<std::string> exchange(int rank, const std::string& card) {
    std::unique_lock<std::mutex> hold(mutex_);
    const int turn = turn_;
    texts_[static_cast<size_t>(rank)] = card;
    if (++arrived_ == static_cast<int>(texts_.size())) {
      out_ = texts_;
      arrived_ = 0;
      ++turn_;
      changed_.notify_all();
    }
    changed_.wait(hold, [&] { return turn_ != turn; });
    return out_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_, out_;
  int arrived_ = 0, turn_ = 0;
};

inline void each_rank(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(body, r);
  for (auto& t : threads) t.join();
}

inline std::unique_ptr<Communicator> join(Engine& engine, TextExchange& peers, int rank,
                                          int ranks, u64 timeout_ns = 0) {
  auto out = std::make_unique<Communicator>(engine, rank, ranks, timeout_ns);
  out->connect(peers.exchange(rank, out->peer_info()));
  return out;
}

// Options with small slots, so that little memory takes many steps.
inline Engine::Options small() {
  Engine::Options options;
  options.slot_bytes = 4096;
  return options;
}

// All-reduces values that depend on rank and index, in place, and checks the result.
inline bool all_reduce(Communicator& c, int rank, int ranks, std::vector<float>& memory,
                       size_t count, Stream stream = nullptr) {
  constexpr float kBase = 100;
  for (size_t i = 0; i < count; ++i) memory[i] = kBase * static_cast<float>(rank) + (i % 7);
  Call call;
  call.in = call.out = memory.data();
  call.bytes = count * sizeof(float);
  call.stream = stream;
  if (!c.run(call)) return false;
  const float ids = kBase * static_cast<float>(ranks * (ranks - 1) / 2);
  for (size_t i = 0; i < count; ++i) {
    if (memory[i] != ids + static_cast<float>(ranks) * (i % 7)) return false;
  }
  return true;
}

}  // namespace nvlink
}  // namespace fsccl
