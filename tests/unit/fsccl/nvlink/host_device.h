// Helpers of the tests of the NVLink engine: HostDevice, a CPU in place of a GPU, whose launches
// run a kernel's blocks one after the other with one thread each; ranks as threads, and checks.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <functional>
#include <thread>

#include "nvlink/engine.h"
#include "host_block.h"

namespace fsccl {
namespace nvlink {

inline const KernelTable kKernels = {
    FSCCL_HOST_COPY_KERNELS FSCCL_HOST_REDUCTION_KERNELS(f32, BuiltinElement<float>)};

inline std::atomic<int> failures{0};

inline void expect(bool condition_holds, const char* what, int line) {
  if (condition_holds) return;
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

struct YieldingScheduler : Scheduler {
  void on_access(bool is_polling) override {
    if (is_polling) sched_yield();
  }
};

// Record of the calls of a device, for tests to check.
struct DeviceLog {
  std::vector<std::string> kernels;
  std::vector<u32> blocks;  // of each launched kernel
  int allocations = 0, clears = 0, stream_orderings = 0, releases = 0;
  std::function<void()> replay;  // repeats the last launch, as a replayed graph does
};

class HostDevice : public Device {
 public:
  explicit HostDevice(DeviceLog* log) : log_(log) {}
  ~HostDevice() override {
    for (void* at : allocations_) free(at);
  }
  std::string identity() override { return "cpu"; }
  bool has_nvlink_to(const std::string&) override { return !has_no_links; }
  bool has_no_links = false;  // set by tests: no GPU has an NVLink to this one
  bool is_own_memory(const std::string&) override { return !memory_is_foreign; }
  bool memory_is_foreign = false;  // set by tests: memory of other ranks is that of other processes
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
  void release_memory(const std::string&) override { ++log_->releases; }
  char* allocate_host(u64 bytes) override {
    allocations_.push_back(calloc(1, bytes));
    return static_cast<char*>(allocations_.back());
  }
  Function find_kernel(const std::string& name) override {
    const auto entry = kKernels.find(name);
    if (entry == kKernels.end()) return nullptr;
    return const_cast<void*>(static_cast<const void*>(&*entry));
  }
  void launch(Function f, u32 blocks, u32, const KernelArgs& args, Stream, bool) override {
    const auto& kernel = *static_cast<const std::pair<const std::string, Kernel>*>(f);
    log_->kernels.push_back(kernel.first);
    log_->blocks.push_back(blocks);
    log_->replay = [&kernel, blocks, args] {
      for (u32 c = 0; c < blocks; ++c) {
        Barrier single_thread_barrier(1);
        YieldingScheduler scheduler;
        HostBlock block({0, 1, c, blocks}, &single_thread_barrier, &scheduler);
        kernel.second(block, args);
      }
    };
    log_->replay();
  }
  void order_streams(Stream, Stream) override { ++log_->stream_orderings; }
  bool is_idle(Stream) override { return true; }  // a launch returns when its kernel has ended

 private:
  DeviceLog* const log_;
  std::vector<void*> allocations_;
};

// All-gather of one string per rank, among ranks that are threads.
class TextExchange {
 public:
  explicit TextExchange(int ranks) : texts_(static_cast<size_t>(ranks)) {}
  std::vector<std::string> exchange(int rank, const std::string& own_text) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    texts_[static_cast<size_t>(rank)] = own_text;
    if (++arrived_count_ == static_cast<int>(texts_.size())) {
      gathered_texts_ = texts_;
      arrived_count_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    return gathered_texts_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_, gathered_texts_;
  int arrived_count_ = 0, round_ = 0;
};

inline void run_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(body, r);
  for (auto& t : threads) t.join();
}

// Creates this rank's communicator and connects it to its peers.
inline std::unique_ptr<Communicator> connect_communicator(Engine& engine, TextExchange& peers,
                                                          int rank, int ranks, u64 timeout_ns = 0) {
  auto out = std::make_unique<Communicator>(engine, rank, ranks, timeout_ns);
  out->connect(peers.exchange(rank, out->peer_info()));
  return out;
}

// Options with small slots, so that small messages take many steps.
inline Engine::Options small_slot_options() {
  Engine::Options options;
  options.slot_bytes = 4096;
  return options;
}

// All-reduces values that depend on rank and index, in place. Returns false if the engine does not
// run the operation or the result is wrong.
inline bool all_reduce(Communicator& c, int rank, int ranks, std::vector<float>& memory,
                       size_t count, Stream stream = nullptr) {
  constexpr float kBase = 100;
  for (size_t i = 0; i < count; ++i) memory[i] = kBase * static_cast<float>(rank) + (i % 7);
  Call call;
  call.in = call.out = memory.data();
  call.bytes = count * sizeof(float);
  call.stream = stream;
  if (!c.run(call)) return false;
  const float rank_sum = kBase * static_cast<float>(ranks * (ranks - 1) / 2);
  for (size_t i = 0; i < count; ++i) {
    if (memory[i] != rank_sum + static_cast<float>(ranks) * (i % 7)) return false;
  }
  return true;
}

}  // namespace nvlink
}  // namespace fsccl
