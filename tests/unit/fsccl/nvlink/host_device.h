// A device that is a CPU, whose launches run their blocks one after the other, each as one thread;
// and ranks as threads, which meet and expect things.
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

// What a device did, for tests to look at.
struct Log {
  std::vector<std::string> kernels;
  std::vector<u32> blocks;  // of each
  int allocations = 0, clears = 0, orders = 0, closes = 0;
  std::function<void()> again;  // the last launch, as a replayed graph makes it
};

class HostDevice : public Device {
 public:
  explicit HostDevice(Log* log) : log_(log) {}
  ~HostDevice() override {
    for (void* at : all_) free(at);
  }
  std::string identity() override { return "cpu"; }
  bool linked(const std::string&) override { return !apart; }
  bool apart = false;  // from all others
  bool own(const std::string&) override { return !stranger; }
  bool stranger = false;  // takes the others for processes of their own
  char* allocate(u64 bytes) override {
    ++log_->allocations;
    all_.push_back(calloc(1, bytes + 256));
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(all_.back()) + 255) / 256 * 256);
  }
  void clear(char* at, u64 bytes, const Stream*) override {
    ++log_->clears;
    memset(at, 0, bytes);
  }
  std::string share(const char* at, u64* offset) override {
    *offset = 64;
    return std::to_string(reinterpret_cast<uintptr_t>(at) - 64);
  }
  char* open(const std::string& shared) override {
    return reinterpret_cast<char*>(std::stoull(shared));
  }
  void close(const std::string&) override { ++log_->closes; }
  char* host_memory(u64 bytes) override {
    all_.push_back(calloc(1, bytes));
    return static_cast<char*>(all_.back());
  }
  Function function(const std::string& name) override {
    const auto found = kKernels.find(name);
    if (found == kKernels.end()) return nullptr;
    return const_cast<void*>(static_cast<const void*>(&*found));
  }
  void launch(Function f, u32 blocks, u32, const Args& args, Stream, bool) override {
    const auto& kernel = *static_cast<const std::pair<const std::string, Kernel>*>(f);
    log_->kernels.push_back(kernel.first);
    log_->blocks.push_back(blocks);
    log_->again = [&kernel, blocks, args] {
      for (u32 c = 0; c < blocks; ++c) {
        Barrier alone(1);
        Yielding scheduler;
        HostBlock block({0, 1, c, blocks}, &alone, &scheduler);
        kernel.second(block, args);
      }
    };
    log_->again();
  }
  void order(Stream, Stream) override { ++log_->orders; }
  bool idle(Stream) override { return true; }  // a launch returns when all is done

 private:
  Log* const log_;
  std::vector<void*> all_;
};

// Where ranks exchange their cards: everyone gives one and gets all.
class Meeting {
 public:
  explicit Meeting(int ranks) : cards_(static_cast<size_t>(ranks)) {}
  std::vector<std::string> exchange(int rank, const std::string& card) {
    std::unique_lock<std::mutex> hold(mutex_);
    const int turn = turn_;
    cards_[static_cast<size_t>(rank)] = card;
    if (++came_ == static_cast<int>(cards_.size())) {
      out_ = cards_;
      came_ = 0;
      ++turn_;
      changed_.notify_all();
    }
    changed_.wait(hold, [&] { return turn_ != turn; });
    return out_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> cards_, out_;
  int came_ = 0, turn_ = 0;
};

inline void each_rank(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(body, r);
  for (auto& t : threads) t.join();
}

inline std::unique_ptr<Communicator> join(Engine& engine, Meeting& meeting, int rank,
                                          int ranks, u64 timeout_ns = 0) {
  auto out = std::make_unique<Communicator>(engine, rank, ranks, timeout_ns);
  out->connect(meeting.exchange(rank, out->card()));
  return out;
}

// Of small slots, so that little memory is many steps.
inline Engine::Options small() {
  Engine::Options options;
  options.slot_bytes = 4096;
  return options;
}

// Sums of rank + i over all ranks, in place.
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
