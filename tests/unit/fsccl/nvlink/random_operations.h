// Random operations for kernels_test.cpp, over a world of ranks and its subgroups: choice, inputs,
// and expected results.
#pragma once

#include <sys/mman.h>

#include <random>
#include <vector>

#include "core/reduce.h"
#include "nvlink/kernel_plan.h"
#include "host_block.h"

namespace fsccl {
namespace nvlink {

constexpr u32 kThreadsPerRank = 4;  // threads of a rank
constexpr u32 kSlotBytes = 1024;    // small, so that messages take many rounds
constexpr size_t kBufferBytes = 64 << 10;
constexpr size_t kGuardBytes = 64;     // before and behind an output, which must not be written
constexpr char kUnwrittenByte = 0x5A;  // content of outputs and guards before an operation

struct Subgroup {
  std::vector<int> members;
  int index_of(int rank) const {
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] == rank) return static_cast<int>(i);
    }
    return -1;
  }
};

struct Operation {
  Collective collective;
  Algorithm algorithm;
  Reduction reduction;
  KernelPlan plan;
  size_t group;                        // index in World::groups
  size_t count;                        // elements of a part, as in KernelArgs::bytes
  size_t input_offset, output_offset;  // bytes by which the buffers are misaligned
  int root;
  bool in_place;
  unsigned seed;
  size_t bytes() const { return count * reduction.width(); }
};

struct World {
  int ranks;
  std::vector<Subgroup> groups;
  std::vector<Operation> operations;
  char* memory;  // shared by all ranks
  HostFlags* host_flags;
  int absent = -1;
  char* arena(size_t group, int rank) const {
    return memory + (group * ranks + rank) * arena_bytes(kSlotBytes);
  }
  char* buffer(int rank, int buffer_index) const {
    char* const all = memory + groups.size() * ranks * arena_bytes(kSlotBytes);
    return all + (rank * 2 + buffer_index) * kBufferBytes;
  }
};

inline size_t input_parts(Collective c, size_t n) {
  return c == Collective::kReduceScatter || c == Collective::kAllToAll ? n : 1;
}
inline size_t output_parts(Collective c, size_t n) {
  return c == Collective::kAllGather || c == Collective::kAllToAll ? n : 1;
}

// ---------------------------------------------------------------- choice of operations

using Random = std::mt19937;

template <class T>
const T& choose(Random& random, const std::vector<T>& list) {
  return list[random() % list.size()];
}

// Draws an operation; returns false if there is no kernel for it.
inline bool draw_operation(Random& random, const World& world, Operation* op) {
  const std::vector<size_t> counts = {1, 2, 3, 5, 8, 16, 17, 31, 64, 100, 257, 511, 1000, 1900};
  const std::vector<DType> types = {DType::kU8,   DType::kI16, DType::kI64, DType::kF16,
                                    DType::kBF16, DType::kF32, DType::kF64};
  op->group = random() % world.groups.size();
  op->collective = static_cast<Collective>(random() % kCollectives);
  op->algorithm = static_cast<Algorithm>(1 + random() % (kAlgorithms - 1));
  op->reduction.dtype = choose(random, types);
  op->reduction.op = static_cast<RedOp>(random() % 9);
  op->reduction.factor = 3;
  const size_t n = world.groups[op->group].members.size();
  op->reduction.divisor = static_cast<int>(n);
  op->count = choose(random, counts);
  const size_t width = op->reduction.width();
  if (op->collective != Collective::kAllReduce) {
    op->count = std::min(op->count, (kBufferBytes - 4 * kGuardBytes) / width / n);
  }
  const bool direct = op->algorithm == Algorithm::kDirect;
  op->input_offset = direct ? 0 : random() % 3 * width;
  op->output_offset = direct ? 0 : random() % 3 * width;
  if (direct && output_parts(op->collective, n) * input_parts(op->collective, n) > 1) {
    op->count = op->count / 16 * 16 + 16;  // parts begin at multiples of 16 bytes
    op->count = std::min(op->count, size_t{1008});
  }
  op->root = static_cast<int>(random() % n);
  op->in_place = random() % 2 == 0 || (direct && op->collective == Collective::kAllReduce) ||
                 op->collective == Collective::kBroadcast;
  if (op->collective == Collective::kAllToAll) op->in_place = false;
  op->seed = random();
  const auto threads = static_cast<u32>(1 + random() % kThreadsPerRank);
  const auto blocks = static_cast<u32>(1 + random() % (kThreadsPerRank / threads));
  const KernelShape shape{op->algorithm, blocks, threads};
  op->plan = plan_kernel(op->collective, shape, op->reduction.dtype, op->bytes(),
                         static_cast<int>(n), kChannels, 1);
  return has_reduction_kernel(op->reduction) && !op->plan.kernel.empty();
}

inline World make_world(int ranks, size_t operations, unsigned seed) {
  World world{ranks, {}, {}, nullptr, nullptr};
  Subgroup all, even, last_two;
  for (int r = 0; r < ranks; ++r) all.members.push_back(r);
  for (int r = 0; r < ranks; r += 2) even.members.push_back(r);
  for (int r = ranks - 1; r >= 0 && r >= ranks - 2; --r) last_two.members.push_back(r);
  world.groups = {all};
  if (ranks > 2) world.groups.insert(world.groups.end(), {even, last_two});
  Random random(seed);
  while (world.operations.size() < operations) {
    Operation op{};
    if (draw_operation(random, world, &op)) world.operations.push_back(op);
  }
  const size_t bytes =
      world.groups.size() * ranks * arena_bytes(kSlotBytes) + ranks * 2 * kBufferBytes + 4096;
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) abort();
  world.memory = static_cast<char*>(at);
  world.host_flags = reinterpret_cast<HostFlags*>(world.memory + bytes - 4096);
  // Counters begin shortly before they wrap, so that every test covers the wrap.
  for (size_t g = 0; g < world.groups.size(); ++g) {
    for (int r = 0; r < ranks; ++r) {
      auto* const counters = reinterpret_cast<Counters*>(world.arena(g, r));
      auto* const flags = reinterpret_cast<u32*>(world.arena(g, r) + kFlagsOffset);
      for (u32 c = 0; c < kChannels; ++c) {
        counters[c].packet_epoch = 0xFFFFFFF0u;
        counters[c].bundle_epoch = 0xFFFFFFF0u;
        counters[c].last_step = 0xFFFFFFF0u;
        for (int p = 0; p < kMaxRanks; ++p) flags[c * 32 + p] = 0xFFFFFFF0u;
      }
    }
  }
  return world;
}

// ---------------------------------------------------------------- inputs and results

// Small numbers, exact in every type, and a few that round.
inline void fill_input(const Operation& op, int rank, size_t count, char* out) {
  Random random(op.seed * 31 + static_cast<unsigned>(rank));
  const size_t width = op.reduction.width();
  for (size_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(static_cast<int>(random() % 13) - 6) +
                        (random() % 4 == 0 ? 0.37f : 0.0f);
    switch (op.reduction.dtype) {
      case DType::kF16: {
        const uint16_t h = float_to_f16(value);
        memcpy(out + i * width, &h, width);
        break;
      }
      case DType::kBF16: {
        const uint16_t h = float_to_bf16(value);
        memcpy(out + i * width, &h, width);
        break;
      }
      case DType::kF32:
        memcpy(out + i * width, &value, width);
        break;
      case DType::kF64: {
        const double d = value;
        memcpy(out + i * width, &d, width);
        break;
      }
      default: {
        const auto integer = static_cast<int64_t>(value * 3);
        memcpy(out + i * width, &integer, width);
      }
    }
  }
}

inline std::vector<char> input_of(const Operation& op, int rank, size_t n) {
  std::vector<char> out(input_parts(op.collective, n) * op.bytes());
  fill_input(op, rank, input_parts(op.collective, n) * op.count, out.data());
  return out;
}

inline std::vector<char> expected_output(const Operation& op, int rank, size_t n) {
  const size_t part = op.bytes();
  std::vector<std::vector<char>> inputs;
  for (size_t p = 0; p < n; ++p) inputs.push_back(input_of(op, static_cast<int>(p), n));
  std::vector<char> out(output_parts(op.collective, n) * part);
  const bool scattered = input_parts(op.collective, n) > 1;
  const size_t own_part_offset = scattered ? static_cast<size_t>(rank) * part : 0;
  if (op.collective == Collective::kAllReduce || op.collective == Collective::kReduceScatter) {
    std::vector<const void*> sources;
    for (const auto& in : inputs) sources.push_back(in.data() + own_part_offset);
    reduce(op.reduction, out.data(), sources.data(), static_cast<int>(n), op.count);
  } else if (op.collective == Collective::kBroadcast) {
    out = inputs[static_cast<size_t>(op.root)];
  } else {
    for (size_t p = 0; p < n; ++p)
      memcpy(out.data() + p * part, inputs[p].data() + own_part_offset, part);
  }
  return out;
}

}  // namespace nvlink
}  // namespace fsccl
