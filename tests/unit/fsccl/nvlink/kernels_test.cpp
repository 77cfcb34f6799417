// Tests of the kernels against the core's reductions: random operations one after the other, over a
// world and its subgroups, in place and misaligned, without any synchronization of the ranks in
// between.
//
//   kernels_test <threads|processes|fibers|absent> <ranks> <operations> <seed> [eager steps] [1]
//
// threads, processes: a rank is a pool of threads in this process or in one of its own.
//
// fibers: one thread; the fiber that makes the next access is drawn at random, and for long
// stretches one rank is held back while the others run as far ahead as they can.
//
// absent: the last rank never comes, and the others have a timeout.
//
// The last argument tears lines.
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <thread>

#include "random_operations.h"

using namespace fsccl;
using namespace fsccl::nvlink;

namespace {

// An element of every size and kind.
// clang-format off
const Kernels kKernels = {
    FSCCL_HOST_MOVERS
    FSCCL_HOST_REDUCERS(u8, Plain<u8>)
    FSCCL_HOST_REDUCERS(i16, Plain<short>)
    FSCCL_HOST_REDUCERS(i64, Plain<long long>)
    FSCCL_HOST_REDUCERS(f16, Float16)
    FSCCL_HOST_REDUCERS(bf16, BFloat16)
    FSCCL_HOST_REDUCERS(f32, Plain<float>)
    FSCCL_HOST_REDUCERS(f64, Plain<double>)};
// clang-format on

// ---------------------------------------------------------------- a rank

struct Rank {
  Rank(const World& w, int r) : world(w), rank(r), whole(kPool) {
    for (u32 c = 0; c < kPool; ++c) {
      for (u32 t = 0; t <= kPool; ++t) blocks.push_back(std::make_unique<Barrier>(t));
    }
  }

  // Runs thread `me` of the pool.
  void run(u32 me, Scheduler& scheduler) {
    for (const Operation& op : world.operations) {
      const int index = world.groups[op.group].index_of(rank);
      if (index < 0 || rank == world.absent) continue;
      if (me == 0) prepare_kernel(op, index);
      whole.wait(scheduler);  // the kernel's beginning on its stream
      const KernelArgs own_args = args;
      if (me < op.plan.blocks * op.plan.threads) {
        const u32 channel = me / op.plan.threads;
        HostBlock b({me % op.plan.threads, op.plan.threads, channel, op.plan.blocks},
                    blocks[channel * (kPool + 1) + op.plan.threads].get(), &scheduler);
        kKernels.at(op.plan.kernel)(b, own_args);
      }
      whole.wait(scheduler);  // and its end
      if (me == 0 && world.absent < 0 && !check(op, index)) failed = true;
      whole.wait(scheduler);
      if (failed) return;
    }
  }

  void prepare_kernel(const Operation& op, int index) {
    const auto& members = world.groups[op.group].members;
    const size_t n = members.size(), part = op.bytes();
    const auto input = input_of(op, index, n);
    char* const out = world.buffer(rank, 1) + kGuard + op.shift_out;
    memset(world.buffer(rank, 1), 0x5A, kBufferBytes);
    char* in = world.buffer(rank, 0) + kGuard + op.shift_in;
    if (op.in_place) {
      in = out + (op.collective == Collective::kAllGather ? index * part : 0);
    }
    memcpy(in, input.data(), input.size());
    const bool slice = op.in_place && op.collective == Collective::kReduceScatter;
    char* const to = slice ? out + index * part : out;
    args = make_kernel_args(op.collective, in, to, part, index, static_cast<int>(n), op.root);
    args.slots = kSlots;
    args.slot_bytes = kSlotBytes;
    set_partition(op.collective, op.algorithm, op.plan.blocks, &args);
    args.math = math_of(op.reduction);
    args.factor = op.reduction.factor;
    args.timeout_ns = world.absent < 0 ? 0 : 20000000;
    args.host = world.host;
    const bool reads = op.collective == Collective::kReduceScatter && !op.in_place;
    for (size_t p = 0; p < n; ++p) {
      args.arena[p] = world.arena(op.group, members[p]);
      args.peer[p] = world.buffer(members[p], reads ? 0 : 1) + kGuard;
    }
  }

  bool check(const Operation& op, int index) {
    const size_t n = world.groups[op.group].members.size();
    const auto correct = expected(op, index, n);
    if (memcmp(args.out, correct.data(), correct.size()) != 0) {
      return report(op, index, "wrong result");
    }
    const char* const begin = world.buffer(rank, 1);
    const char* const end = begin + kBufferBytes;
    const bool larger = op.in_place && op.collective == Collective::kReduceScatter;
    for (const char* at = begin; at < begin + kGuard + op.shift_out; ++at) {
      if (*at != 0x5A) return report(op, index, "wrote before the output");
    }
    for (const char* at = args.out + correct.size(); !larger && at < end; ++at) {
      if (*at != 0x5A) return report(op, index, "wrote behind the output");
    }
    return true;
  }

  bool report(const Operation& op, int index, const char* what) {
    fprintf(stderr, "%s: %s %s, %s of %zu %s, group %zu rank %d, %u blocks of %u\n", what,
            name_of(op.collective), op.plan.kernel.c_str(), name_of(op.reduction.op), op.count,
            name_of(op.reduction.dtype), op.group, index, op.plan.blocks, op.plan.threads);
    return false;
  }

  const World& world;
  const int rank;
  Barrier whole;
  std::vector<std::unique_ptr<Barrier>> blocks;
  KernelArgs args{};
  std::atomic<bool> failed{false};
};

// ---------------------------------------------------------------- schedulers

struct Threads : Scheduler {
  explicit Threads(unsigned seed) : random(seed) {}
  void point(bool spins) override {
    if (spins || random() % 64 == 0) sched_yield();
  }
  std::minstd_rand random;
};

bool run_threads(const World& world, const std::vector<int>& ranks, unsigned seed) {
  std::vector<std::unique_ptr<Rank>> all;
  std::vector<std::thread> threads;
  for (const int r : ranks) all.push_back(std::make_unique<Rank>(world, r));
  for (auto& rank : all) {
    for (u32 me = 0; me < kPool; ++me) {
      threads.emplace_back([&rank, me, seed] {
        Threads scheduler(seed * 97 + static_cast<unsigned>(rank->rank) * kPool + me + 1);
        rank->run(me, scheduler);
        // No rank may wait for one that has found an error.
        if (rank->failed) _exit(1);
      });
    }
  }
  for (auto& t : threads) t.join();
  return true;
}

bool run_processes(const World& world, unsigned seed) {
  std::vector<pid_t> children;
  for (int r = 0; r < world.ranks; ++r) {
    const pid_t pid = fork();
    if (pid == 0) _exit(run_threads(world, {r}, seed) ? 0 : 1);
    children.push_back(pid);
  }
  bool passed = true;
  for (size_t left = children.size(); left > 0; --left) {
    int status = 0;
    wait(&status);
    if (status == 0) continue;
    passed = false;
    reinterpret_cast<std::atomic<u32>*>(&world.host->stop)->store(1);  // the others stop waiting
  }
  return passed;
}

// All ranks end, and one of them reports the absent rank.
bool run_absent(World& world, unsigned seed) {
  world.absent = world.ranks - 1;
  world.groups.resize(1);
  std::vector<int> present;
  for (int r = 0; r < world.absent; ++r) present.push_back(r);
  std::vector<Operation> all;
  for (const Operation& op : world.operations) {
    if (op.group == 0) all.push_back(op);
  }
  world.operations = all;
  run_threads(world, present, seed);
  return world.host->stop == 1 && world.host->late == static_cast<u32>(world.absent) + 1;
}

class Fibers : public Scheduler {
 public:
  Fibers(const World& world, unsigned seed) : random_(seed), ranks_(world.ranks) {
    for (int r = 0; r < world.ranks; ++r) all_.push_back(std::make_unique<Rank>(world, r));
    for (auto& rank : all_) {
      for (u32 me = 0; me < kPool; ++me) {
        fibers_.push_back(std::make_unique<Fiber>());
        Fiber& f = *fibers_.back();
        f.rank = rank->rank;
        f.body = [this, &rank, me] { rank->run(me, *this); };
        f.stack.resize(256 << 10);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = &main_;
        makecontext(&f.context, reinterpret_cast<void (*)()>(&Fibers::enter), 0);
      }
    }
  }

  bool run() {
    current_ = this;
    constexpr u64 kMaxTurns = 2000000000;  // turns without an end are a deadlock
    for (u64 turn = 0; turn < kMaxTurns; ++turn) {
      if (turn % 4096 == 0) held_back_ = random_() % (ranks_ + 1);
      std::vector<Fiber*>& ready = candidates();
      if (ready.empty()) return true;
      fiber_ = ready[random_() % ready.size()];
      swapcontext(&main_, &fiber_->context);
      for (auto& rank : all_) {
        if (rank->failed) return false;
      }
    }
    fprintf(stderr, "nothing moves\n");
    return false;
  }

  void point(bool spins) override {
    if (spins || random_() % 8 == 0) swapcontext(&fiber_->context, &main_);
  }

 private:
  struct Fiber {
    int rank;
    bool over = false;
    std::function<void()> body;
    std::vector<char> stack;
    ucontext_t context;
  };

  static void enter() {
    Fiber* const self = current_->fiber_;
    self->body();
    self->over = true;
  }

  // All fibers but those of the rank that is held back, unless chance gives it a turn.
  std::vector<Fiber*>& candidates() {
    ready_.clear();
    const bool run_anyway = random_() % 256 == 0;
    for (auto& f : fibers_) {
      const bool held_back = f->rank == static_cast<int>(held_back_) && !run_anyway;
      if (!f->over && !held_back) ready_.push_back(f.get());
    }
    if (ready_.empty()) {
      for (auto& f : fibers_) {
        if (!f->over) ready_.push_back(f.get());
      }
    }
    return ready_;
  }

  static inline Fibers* current_ = nullptr;
  Random random_;
  const int ranks_;
  u64 held_back_ = 0;
  std::vector<std::unique_ptr<Rank>> all_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> ready_;
  Fiber* fiber_ = nullptr;
  ucontext_t main_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string mode = argv[1];
  const auto seed = static_cast<unsigned>(atoi(argv[4]));
  World world = make_world(atoi(argv[2]), static_cast<size_t>(atoi(argv[3])), seed);
  if (argc > 5) HostBlock::eager = static_cast<u32>(atoi(argv[5]));
  HostBlock::torn = argc > 6;
  bool passed = false;
  if (mode == "fibers") {
    passed = Fibers(world, seed).run();
  } else if (mode == "processes") {
    passed = run_processes(world, seed);
  } else if (mode == "absent") {
    passed = run_absent(world, seed);
  } else {
    std::vector<int> ranks;
    for (int r = 0; r < world.ranks; ++r) ranks.push_back(r);
    passed = run_threads(world, ranks, seed);
  }
  if (passed) puts("ok");
  return passed ? 0 : 1;
}
