// Tests of the kernels against the core's reductions: random operations one after the other, over a
// world and its subgroups, in place and misaligned, without any synchronization of the ranks in
// between.
//
//   kernels_test <threads|processes|fibers|absent> <ranks> <operations> <seed>
//                [early flag steps] [tear lines]
//
// threads, processes: a rank is a pool of threads in this process or in a process of its own.
//
// fibers: all in one thread. The fiber that makes the next access is drawn at random, and for long
// intervals one rank is delayed while the others run as far ahead as they can.
//
// absent: the last rank never comes, and the others have a timeout.
//
// The optional arguments break the protocol (HostBlock::early_flag_steps, HostBlock::tears_lines);
// then a wrong result must be reported.
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

// Element types of every size: integers, and floats that are reduced in float or in their own type.
// clang-format off
const KernelTable kKernels = {
    FSCCL_HOST_COPY_KERNELS
    FSCCL_HOST_REDUCTION_KERNELS(u8, BuiltinElement<u8>)
    FSCCL_HOST_REDUCTION_KERNELS(i16, BuiltinElement<short>)
    FSCCL_HOST_REDUCTION_KERNELS(i64, BuiltinElement<long long>)
    FSCCL_HOST_REDUCTION_KERNELS(f16, Float16)
    FSCCL_HOST_REDUCTION_KERNELS(bf16, BFloat16)
    FSCCL_HOST_REDUCTION_KERNELS(f32, BuiltinElement<float>)
    FSCCL_HOST_REDUCTION_KERNELS(f64, BuiltinElement<double>)};
// clang-format on

// ---------------------------------------------------------------- a rank

struct Rank {
  Rank(const World& w, int r) : world(w), rank(r), rank_barrier(kThreadsPerRank) {
    for (u32 c = 0; c < kThreadsPerRank; ++c) {
      for (u32 t = 0; t <= kThreadsPerRank; ++t)
        block_barriers.push_back(std::make_unique<Barrier>(t));
    }
  }

  // Runs thread number thread_index of the rank.
  void run(u32 thread_index, Scheduler& scheduler) {
    for (const Operation& op : world.operations) {
      const int index = world.groups[op.group].index_of(rank);
      if (index < 0 || rank == world.absent) continue;
      if (thread_index == 0) prepare_kernel(op, index);
      rank_barrier.wait(scheduler);  // the kernel begins
      const KernelArgs own_args = args;
      if (thread_index < op.plan.blocks * op.plan.threads) {
        const u32 channel = thread_index / op.plan.threads;
        HostBlock b({thread_index % op.plan.threads, op.plan.threads, channel, op.plan.blocks},
                    block_barriers[channel * (kThreadsPerRank + 1) + op.plan.threads].get(),
                    &scheduler);
        kKernels.at(op.plan.kernel)(b, own_args);
      }
      rank_barrier.wait(scheduler);  // the kernel has ended
      if (thread_index == 0 && world.absent < 0 && !check_output(op, index)) failed = true;
      rank_barrier.wait(scheduler);
      if (failed) return;
    }
  }

  void prepare_kernel(const Operation& op, int index) {
    const auto& members = world.groups[op.group].members;
    const size_t n = members.size(), part = op.bytes();
    const auto input = input_of(op, index, n);
    char* const out = world.buffer(rank, 1) + kGuardBytes + op.output_offset;
    memset(world.buffer(rank, 1), kUnwrittenByte, kBufferBytes);
    char* in = world.buffer(rank, 0) + kGuardBytes + op.input_offset;
    if (op.in_place) {
      in = out + (op.collective == Collective::kAllGather ? index * part : 0);
    }
    memcpy(in, input.data(), input.size());
    const bool writes_own_part = op.in_place && op.collective == Collective::kReduceScatter;
    char* const to = writes_own_part ? out + index * part : out;
    args = make_kernel_args(op.collective, in, to, part, index, static_cast<int>(n), op.root);
    args.slots = kSlotsOffset;
    args.slot_bytes = kSlotBytes;
    set_partition(op.collective, op.algorithm, op.plan.blocks, &args);
    args.op = kernel_op_of(op.reduction);
    args.factor = op.reduction.factor;
    args.timeout_ns = world.absent < 0 ? 0 : 20000000;
    args.host_flags = world.host_flags;
    const bool peers_read_inputs = op.collective == Collective::kReduceScatter && !op.in_place;
    for (size_t p = 0; p < n; ++p) {
      args.arena[p] = world.arena(op.group, members[p]);
      args.registered_buffer[p] = world.buffer(members[p], peers_read_inputs ? 0 : 1) + kGuardBytes;
    }
  }

  bool check_output(const Operation& op, int index) {
    const size_t n = world.groups[op.group].members.size();
    const auto expected_bytes = expected_output(op, index, n);
    if (memcmp(args.out, expected_bytes.data(), expected_bytes.size()) != 0) {
      return report_error(op, index, "wrong result");
    }
    const char* const begin = world.buffer(rank, 1);
    const char* const end = begin + kBufferBytes;
    const bool writes_into_larger_buffer =
        op.in_place && op.collective == Collective::kReduceScatter;
    for (const char* at = begin; at < begin + kGuardBytes + op.output_offset; ++at) {
      if (*at != kUnwrittenByte) return report_error(op, index, "wrote before the output");
    }
    for (const char* at = args.out + expected_bytes.size(); !writes_into_larger_buffer && at < end;
         ++at) {
      if (*at != kUnwrittenByte) return report_error(op, index, "wrote behind the output");
    }
    return true;
  }

  bool report_error(const Operation& op, int index, const char* what) {
    fprintf(stderr, "%s: %s %s, %s of %zu %s, group %zu rank %d, %u blocks of %u\n", what,
            name_of(op.collective), op.plan.kernel.c_str(), name_of(op.reduction.op), op.count,
            name_of(op.reduction.dtype), op.group, index, op.plan.blocks, op.plan.threads);
    return false;
  }

  const World& world;
  const int rank;
  Barrier rank_barrier;
  std::vector<std::unique_ptr<Barrier>> block_barriers;
  KernelArgs args{};
  std::atomic<bool> failed{false};
};

// ---------------------------------------------------------------- schedulers

struct ThreadScheduler : Scheduler {
  explicit ThreadScheduler(unsigned seed) : random(seed) {}
  void on_access(bool is_polling) override {
    if (is_polling || random() % 64 == 0) sched_yield();
  }
  std::minstd_rand random;
};

bool run_threads(const World& world, const std::vector<int>& ranks, unsigned seed) {
  std::vector<std::unique_ptr<Rank>> all;
  std::vector<std::thread> threads;
  for (const int r : ranks) all.push_back(std::make_unique<Rank>(world, r));
  for (auto& rank : all) {
    for (u32 thread_index = 0; thread_index < kThreadsPerRank; ++thread_index) {
      threads.emplace_back([&rank, thread_index, seed] {
        ThreadScheduler scheduler(seed * 97 + static_cast<unsigned>(rank->rank) * kThreadsPerRank +
                                  thread_index + 1);
        rank->run(thread_index, scheduler);
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
  for (size_t running = children.size(); running > 0; --running) {
    int status = 0;
    wait(&status);
    if (status == 0) continue;
    passed = false;
    reinterpret_cast<std::atomic<u32>*>(&world.host_flags->stop)
        ->store(1);  // the others stop waiting
  }
  return passed;
}

// Returns whether all present ranks end, and one of them reports the absent rank.
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
  return world.host_flags->stop == 1 &&
         world.host_flags->late_rank_plus_1 == static_cast<u32>(world.absent) + 1;
}

class FiberScheduler : public Scheduler {
 public:
  FiberScheduler(const World& world, unsigned seed) : random_(seed), ranks_(world.ranks) {
    for (int r = 0; r < world.ranks; ++r) all_.push_back(std::make_unique<Rank>(world, r));
    for (auto& rank : all_) {
      for (u32 thread_index = 0; thread_index < kThreadsPerRank; ++thread_index) {
        fibers_.push_back(std::make_unique<Fiber>());
        Fiber& f = *fibers_.back();
        f.rank = rank->rank;
        f.body = [this, &rank, thread_index] { rank->run(thread_index, *this); };
        f.stack.resize(256 << 10);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = &main_;
        makecontext(&f.context, reinterpret_cast<void (*)()>(&FiberScheduler::enter), 0);
      }
    }
  }

  bool run() {
    current_ = this;
    constexpr u64 kMaxTurns = 2000000000;  // turns without an end are a deadlock
    for (u64 turn = 0; turn < kMaxTurns; ++turn) {
      if (turn % 4096 == 0) delayed_rank_ = random_() % (ranks_ + 1);
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

  void on_access(bool is_polling) override {
    if (is_polling || random_() % 8 == 0) swapcontext(&fiber_->context, &main_);
  }

 private:
  struct Fiber {
    int rank;
    bool finished = false;
    std::function<void()> body;
    std::vector<char> stack;
    ucontext_t context;
  };

  static void enter() {
    Fiber* const self = current_->fiber_;
    self->body();
    self->finished = true;
  }

  // Returns the fibers that may run: all but those of the delayed rank, which run rarely.
  std::vector<Fiber*>& candidates() {
    ready_.clear();
    const bool run_anyway = random_() % 256 == 0;
    for (auto& f : fibers_) {
      const bool is_delayed = f->rank == static_cast<int>(delayed_rank_) && !run_anyway;
      if (!f->finished && !is_delayed) ready_.push_back(f.get());
    }
    if (ready_.empty()) {
      for (auto& f : fibers_) {
        if (!f->finished) ready_.push_back(f.get());
      }
    }
    return ready_;
  }

  static inline FiberScheduler* current_ = nullptr;
  Random random_;
  const int ranks_;
  u64 delayed_rank_ = 0;
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
  if (argc > 5) HostBlock::early_flag_steps = static_cast<u32>(atoi(argv[5]));
  HostBlock::tears_lines = argc > 6;
  bool passed = false;
  if (mode == "fibers") {
    passed = FiberScheduler(world, seed).run();
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
