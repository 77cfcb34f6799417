// Explores every interleaving of ranks that share memory, up to a number of preemptions: a test of
// the step protocol (shm_steps.h) and of channels (channels.h). Usage:
//   interleavings_test <steps, roots, wrap or rings> <ranks> <rounds> <preemptions>
// runs a program on each rank (run_steps, run_roots, run_ring below; "wrap" is run_steps with
// counters that wrap around) and prints "ok N" with the number of interleavings.
//
// The sources of the protocol are compiled with a Word class, every access of which is a point at
// which another rank may run. Ranks are fibers of one thread. The test runs all schedules, one
// after the other, in which a runnable rank is preempted at most so many times (Musuvathi and
// Qadeer, "Iterative context bounding for systematic testing of multithreaded programs", 2007). A
// rank that waits or has ended may be followed by any other one, without limit. Memory is
// sequentially consistent here; weaker orders are tested with ThreadSanitizer. A futex sleeps until
// it is woken, without timeout, so that a lost wake-up is a deadlock.
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define FSCCL_TEST_INTERLEAVINGS

namespace fsccl {

void yield_to_scheduler();

// Replacement of the atomic word: every access is a scheduling point.
class Word {
 public:
  static constexpr bool is_always_lock_free = true;
  uint32_t load(std::memory_order = std::memory_order_seq_cst) const {
    yield_to_scheduler();
    return value_;
  }
  void store(uint32_t v, std::memory_order = std::memory_order_seq_cst) {
    yield_to_scheduler();
    value_ = v;
  }
  uint32_t fetch_add(uint32_t n, std::memory_order = std::memory_order_seq_cst) {
    yield_to_scheduler();
    return std::exchange(value_, value_ + n);
  }
  uint32_t fetch_sub(uint32_t n, std::memory_order = std::memory_order_seq_cst) {
    return fetch_add(0U - n);
  }
  bool compare_exchange_strong(uint32_t& expected, uint32_t v) {
    yield_to_scheduler();
    if (value_ != expected) {
      expected = value_;
      return false;
    }
    value_ = v;
    return true;
  }
  uint32_t now() const { return value_; }

 private:
  uint32_t value_;
};

}  // namespace fsccl

#include "channels.cpp"
#include "collective_fingerprint.cpp"
#include "segment.cpp"
#include "shm_steps.cpp"
#include "types.cpp"

namespace {

using namespace fsccl;

[[noreturn]] void fail_test(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::_Exit(1);
}

// Runs all schedules of some fibers, depth first: the choices of the last schedule are repeated up
// to the last one that has an alternative.
class InterleavingExplorer {
 public:
  explicit InterleavingExplorer(int preemptions) : max_preemptions_(preemptions) {}

  using Program = std::function<void(int rank)>;

  // Explores all schedules of `ranks` ranks and returns their number. `make_program` initialises
  // the shared memory for one schedule and returns the program that each rank runs.
  size_t explore(int ranks, const std::function<Program()>& make_program) {
    fibers_ = std::vector<Fiber>(static_cast<size_t>(ranks));
    size_t schedules = 0;
    do {
      run_one_schedule(make_program);
      ++schedules;
    } while (select_next_schedule());
    return schedules;
  }

  // Called by the running fiber: another one may run here.
  void yield_to_scheduler() {
    if (current_ < 0) return;  // make_program() is running
    Fiber& running_rank = fibers_[static_cast<size_t>(current_)];
    swapcontext(&running_rank.context, &main_);
  }
  // The running fiber sleeps until `word` is woken.
  void sleep_on(const Word& word, uint32_t expected) {
    yield_to_scheduler();
    if (word.now() != expected) return;
    Fiber& running_rank = fibers_[static_cast<size_t>(current_)];
    running_rank.sleeps_on = &word;
    swapcontext(&running_rank.context, &main_);
  }
  void wake_sleepers(const Word& word) {
    yield_to_scheduler();
    for (Fiber& fiber : fibers_) {
      if (fiber.sleeps_on == &word) fiber.sleeps_on = nullptr;
    }
  }

 private:
  static constexpr size_t kStack = 256 << 10;
  // A rank as a fiber.
  struct Fiber {
    ucontext_t context{};
    std::vector<char> stack = std::vector<char>(kStack);
    const Word* sleeps_on = nullptr;
    bool has_ended = false;
  };
  // A choice among runnable fibers.
  struct Choice {
    size_t selected, count;
  };

  void reset_fiber(Fiber* fiber) {
    fiber->sleeps_on = nullptr;
    fiber->has_ended = false;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.data();
    fiber->context.uc_stack.ss_size = fiber->stack.size();
    fiber->context.uc_link = &main_;
    makecontext(&fiber->context, reinterpret_cast<void (*)()>(&InterleavingExplorer::enter), 0);
  }
  void run_one_schedule(const std::function<Program()>& make_program) {
    current_ = -1;
    program_ = make_program();
    for (Fiber& fiber : fibers_) reset_fiber(&fiber);
    next_choice_ = 0;
    preemptions_left_ = max_preemptions_;
    int running = -1;
    for (;;) {
      const std::vector<int> runnable = runnable_fibers(running);
      if (runnable.empty()) break;
      const int next = runnable[choose(runnable.size())];
      if (running >= 0 && next != running && is_runnable(running)) --preemptions_left_;
      running = current_ = next;
      running_explorer = this;
      swapcontext(&main_, &fibers_[static_cast<size_t>(next)].context);
    }
    current_ = -1;
    for (size_t r = 0; r < fibers_.size(); ++r) {
      if (!fibers_[r].has_ended) fail_test("rank " + std::to_string(r) + " sleeps forever");
    }
    program_ = nullptr;  // destroys the shared state that make_program() has created
  }
  bool is_runnable(int rank) const {
    const Fiber& fiber = fibers_[static_cast<size_t>(rank)];
    return !fiber.has_ended && fiber.sleeps_on == nullptr;
  }
  // The running fiber comes first; it is the only one once no preemption is left.
  std::vector<int> runnable_fibers(int running) const {
    std::vector<int> out;
    if (running >= 0 && is_runnable(running)) out.push_back(running);
    if (!out.empty() && preemptions_left_ == 0) return out;
    for (int r = 0; r < static_cast<int>(fibers_.size()); ++r) {
      if (r != running && is_runnable(r)) out.push_back(r);
    }
    return out;
  }
  size_t choose(size_t count) {
    if (count == 1) return 0;
    if (next_choice_ == choices_.size()) choices_.push_back({0, count});
    if (choices_[next_choice_].count != count) fail_test("a schedule is not reproducible");
    return choices_[next_choice_++].selected;
  }
  bool select_next_schedule() {
    while (!choices_.empty() && choices_.back().selected + 1 == choices_.back().count) {
      choices_.pop_back();
    }
    if (choices_.empty()) return false;
    ++choices_.back().selected;
    return true;
  }
  static void enter() {
    InterleavingExplorer& p = *running_explorer;
    const int running_rank = p.current_;
    try {
      p.program_(running_rank);
    } catch (const Error& e) {
      fail_test(e.what());
    }
    p.fibers_[static_cast<size_t>(running_rank)].has_ended = true;
  }

  static InterleavingExplorer* running_explorer;
  const int max_preemptions_;
  int preemptions_left_ = 0, current_ = -1;
  ucontext_t main_{};
  std::vector<Fiber> fibers_;
  std::vector<Choice> choices_;
  size_t next_choice_ = 0;
  Program program_;
};

InterleavingExplorer* InterleavingExplorer::running_explorer = nullptr;
InterleavingExplorer* explorer = nullptr;

constexpr size_t kSlotBytes = 64;

// Writes a slot: the value in both halves. Other ranks may run between the halves, both while a
// slot is written and while it is read, so that torn reads are detected.
void write(std::byte* at, uint32_t value) {
  std::memcpy(at, &value, sizeof value);
  explorer->yield_to_scheduler();
  std::memcpy(at + kSlotBytes / 2, &value, sizeof value);
}

void read(const std::byte* at, uint32_t expected, const char* description) {
  for (const size_t half : {size_t{0}, kSlotBytes / 2}) {
    uint32_t value = 0;
    std::memcpy(&value, at + half, sizeof value);
    if (value != expected) {
      fail_test(std::string(description) + ": " + std::to_string(value) + " in place of " +
                std::to_string(expected));
    }
    explorer->yield_to_scheduler();
  }
}

uint32_t slot_value(int rank, int round) {
  return static_cast<uint32_t>(1000 * (rank + 1) + round);
}

// The ShmSteps of all ranks, which share zeroed memory, like that of a new segment.
struct SharedWorld {
  SharedWorld(const Segment& memory, int ranks, uint32_t first_step) {
    std::memset(memory.data(), 0, memory.bytes());
    ShmConfig config;
    config.slot_bytes = kSlotBytes;
    config.process_id = 1;
    config.first_step = first_step;
    for (int r = 0; r < ranks; ++r) {
      config.members.push_back(r);
      config.names.push_back("rank " + std::to_string(r));
    }
    for (int r = 0; r < ranks; ++r) shm.push_back(std::make_unique<ShmSteps>(memory, r, config));
  }
  std::vector<std::unique_ptr<ShmSteps>> shm;
};

CollectiveFingerprint fingerprint_of(int round) {
  CollectiveFingerprint fingerprint;
  fingerprint.op = OpCode::kBarrier;
  fingerprint.sequence = static_cast<uint64_t>(round) + 1;
  return fingerprint;
}

Deadline test_deadline() { return Deadline::after(Deadline::Ms(600000)); }

// Program "steps" of a rank: in every step, all ranks read the slots of all ranks.
void run_steps(ShmSteps& shm, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    shm.begin(fingerprint_of(round), test_deadline());
    write(shm.acquire_slot(), slot_value(shm.rank(), round));
    shm.post();
    for (int k = 1; k < shm.size(); ++k) {
      const int peer = (shm.rank() + k) % shm.size();
      read(shm.wait_for_peer(peer), slot_value(peer, round), "a step");
    }
    shm.end();
  }
}

// Program "roots" of a rank: in every step, all other ranks read the slot of a root, which reads
// none. The root changes every round.
void run_roots(ShmSteps& shm, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int root = round % shm.size();
    shm.begin(fingerprint_of(round), test_deadline());
    write(shm.acquire_slot(), slot_value(shm.rank(), round));
    shm.post();
    if (shm.rank() != root) read(shm.wait_for_peer(root), slot_value(root, round), "a root's step");
    shm.end();
  }
}

// Program "rings" of a rank: it sends to the next rank while a slot is free, and receives from the
// previous one.
void run_ring(ShmSteps& shm, Channels& channels, int rounds) {
  const int next = (shm.rank() + 1) % shm.size();
  const int previous = (shm.rank() + shm.size() - 1) % shm.size();
  shm.begin(fingerprint_of(0), test_deadline());
  for (int sent = 0, received = 0; sent < rounds || received < rounds;) {
    const uint32_t doorbell_seen = channels.doorbell();
    bool progressed = false;
    if (sent < rounds && !channels.is_send_full(0, next)) {
      write(channels.send_slot(0), slot_value(shm.rank(), sent++));
      channels.post(0, next);
      progressed = true;
    }
    if (received < rounds && !channels.is_recv_empty(0, previous)) {
      read(channels.recv_slot(0, previous), slot_value(previous, received++), "a send");
      channels.release(0, previous);
      progressed = true;
    }
    if (!progressed)
      channels.wait_for_progress({received < rounds ? previous : next}, doorbell_seen);
  }
  shm.end();
}

}  // namespace

void fsccl::yield_to_scheduler() { explorer->yield_to_scheduler(); }

void fsccl::futex_wait(const Word& word, uint32_t expected, std::chrono::milliseconds) {
  explorer->sleep_on(word, expected);
}

void fsccl::futex_wake_all(const Word& word) { explorer->wake_sleepers(word); }

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const std::string program = argv[1];
  const int ranks = std::atoi(argv[2]), rounds = std::atoi(argv[3]);
  InterleavingExplorer explorer_object(std::atoi(argv[4]));
  explorer = &explorer_object;
  const uint32_t first_step = program == "wrap" ? 0xFFFFFFFE : 0;
  const size_t bytes = ShmSteps::segment_bytes(ranks, kSlotBytes);
  const Segment memory = Segment::create(bytes, bytes, "");
  std::shared_ptr<Segment> ring_segment;  // one segment for all schedules
  const size_t schedules = explorer_object.explore(ranks, [&]() -> InterleavingExplorer::Program {
    const auto world = std::make_shared<SharedWorld>(memory, ranks, first_step);
    if (program != "rings") {
      return [=](int rank) {
        ShmSteps& shm = *world->shm[static_cast<size_t>(rank)];
        program == "roots" ? run_roots(shm, rounds) : run_steps(shm, rounds);
      };
    }
    auto channels = std::make_shared<std::vector<std::unique_ptr<Channels>>>();
    const auto make = [&ring_segment](size_t size, size_t first, int) {
      if (!ring_segment) ring_segment = std::make_shared<Segment>(Segment::create(size, first, ""));
      return *ring_segment;
    };
    if (ring_segment) std::memset(ring_segment->data(), 0, ring_segment->bytes());
    for (const auto& shm : world->shm) {
      channels->push_back(std::make_unique<Channels>(*shm, 1, make));
      channels->back()->reserve_slots(kSlotBytes);
    }
    return [=](int rank) {
      const auto r = static_cast<size_t>(rank);
      run_ring(*world->shm[r], *(*channels)[r], rounds);
    };
  });
  std::printf("ok %zu\n", schedules);
  return 0;
}
