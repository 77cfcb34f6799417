// Choice of the kernel and the grid of an operation. Ranks must come to the same answer, so it
// depends only on the operation, its size, the number of ranks, and the table that they share.
#pragma once

#include <string>
#include <vector>

#include "../core/types.h"
#include "kernel_args.h"

namespace fsccl {
namespace nvlink {

enum class Collective : uint8_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast };
enum class Algorithm : uint8_t {
  kOther,    // none: another library is faster here
  kFlagged,  // flagged.h, of packets
  kLines,    // flagged.h, of bundles
  kTwoShot,  // flagged.h, of bundles: all_reduce in two steps
  kStaged,   // staged.h
  kDirect,   // direct.h, of registered buffers
};
constexpr int kCollectives = 5, kAlgorithms = 6;

// Returns whether its kernels send cells (cells.h).
constexpr bool uses_cells(Algorithm a) {
  return a == Algorithm::kFlagged || a == Algorithm::kLines || a == Algorithm::kTwoShot;
}

const char* name_of(Collective c);
const char* name_of(Algorithm a);

struct KernelShape {
  Algorithm algorithm = Algorithm::kOther;
  u32 blocks = 0;   // 0: chosen by size
  u32 threads = 0;  // 0: as many as are useful
};

// The kernels that were measured to be fastest, by size. As text, a line each, which ranks compare:
//
//   <collective> <ordinary|registered> <most bytes> <algorithm> <blocks> <threads>
//
// Sizes ascend; the last line of a collective holds for larger sizes, too. Sizes are those that
// benchmarks print: the whole message of all_reduce and broadcast, and ranks times a part of the
// others.
class TuningTable {
 public:
  // Throws Error(kUsage) naming the line.
  static TuningTable parse(const std::string& text);
  // The table without measurements on this machine.
  static TuningTable default_table(int ranks);
  KernelShape find(Collective c, bool registered, u64 bytes) const;
  std::string text() const;

 private:
  struct Entry {
    u64 most;
    KernelShape shape;
  };
  std::vector<Entry>& rows(Collective c, bool registered) {
    return rows_[static_cast<size_t>(c) * 2 + (registered ? 1 : 0)];
  }
  std::vector<Entry> rows_[kCollectives * 2];
};

// A kernel and its grid. `kernel` is empty if the algorithm cannot take so large a message, or does
// not exist for the collective.
struct KernelPlan {
  std::string kernel;
  u32 blocks = 0, threads = 0;
};

// Plans the kernel of an operation. `bytes` as in KernelArgs: of the whole for all_reduce and
// broadcast, else of a part. The grid has no more than `most` blocks, whatever the shape has, and
// blocks have a multiple of `warp` threads.
KernelPlan plan_kernel(Collective c, const KernelShape& shape, DType dtype, u64 bytes, int ranks,
                       u32 most = kChannels, u32 warp = 32);

// The unit in which a kernel is compiled (nvlink_compile.py): that of its element, or "movers".
std::string unit_of(const std::string& kernel);

// Partitions the message: sets args->cells, rounds and piece by the other fields.
void set_partition(Collective c, Algorithm algorithm, u32 blocks, KernelArgs* args);

// The arguments that follow from the call; the group adds its memory.
KernelArgs make_kernel_args(Collective c, const void* in, void* out, u64 bytes, int rank, int ranks,
                            int root);

// Returns whether there is a kernel for this reduction; and the operation that it runs: booleans
// are bytes.
bool has_reduction_kernel(const Reduction& r);
Math math_of(const Reduction& r);

// The widest access, 1 to 16 bytes, that all of these addresses and strides allow.
u32 common_width(std::initializer_list<u64> addresses);

}  // namespace nvlink
}  // namespace fsccl
