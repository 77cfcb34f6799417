// Choice of the kernel of an operation and its grid, for engine.h. All ranks must choose the same,
// so the choice depends only on the operation, its size, the number of ranks, and the tuning table
// that they share.
#pragma once

#include <string>
#include <vector>

#include "../core/types.h"
#include "kernel_args.h"

namespace fsccl {
namespace nvlink {

enum class Collective : uint8_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast };
// Algorithms. Their names in tables and output are `other`, `flagged`, `lines`, ... A cell is data
// with its flag, written by one access (cells.h): a packet of 8 bytes of data, as in NCCL's
// protocol LL, or a bundle of lines of 128 bytes, as in LL128.
enum class Algorithm : uint8_t {
  kOther,    // no kernel of this engine: another library, such as NCCL, is faster at this size
  kFlagged,  // each rank sends all data to all peers in one step, as packets (flagged.h)
  kLines,    // the same as bundles, for larger messages
  kTwoShot,  // reduce_scatter and all_gather in one kernel, as bundles (flagged.h)
  kStaged,   // data in staging buffers of the peers, and flags apart from it (staged.h)
  kDirect,   // access to registered buffers of the peers, without staging (direct.h)
};
constexpr int kCollectives = 5, kAlgorithms = 6;

// Returns whether the algorithm's kernels send cells (cells.h).
constexpr bool uses_cells(Algorithm a) {
  return a == Algorithm::kFlagged || a == Algorithm::kLines || a == Algorithm::kTwoShot;
}

const char* name_of(Collective c);
const char* name_of(Algorithm a);

// An algorithm, and the grid of its kernel.
struct KernelShape {
  Algorithm algorithm = Algorithm::kOther;
  u32 blocks = 0;   // 0: chosen by size
  u32 threads = 0;  // 0: as many as are useful
};

// The fastest measured kernel for each message size. The text form, which ranks exchange and
// flagscale/comm/fsccl/tune.py stores, has one line per range of sizes:
//
//   <collective> <ordinary|registered> <max bytes> <algorithm> <blocks> <threads>
//
// `registered`: for buffers that peers have mapped (engine.h); `ordinary`: for all others. Sizes
// ascend; the last line of a collective also applies to larger sizes. Sizes are counted as
// benchmarks print them: the whole message of all_reduce and broadcast, and the number of ranks
// times a part of the others.
class TuningTable {
 public:
  // Throws Error(kUsage) naming the line.
  static TuningTable parse(const std::string& text);
  // The table for machines on which nothing was measured.
  static TuningTable default_table(int ranks);
  KernelShape choose_shape(Collective c, bool registered, u64 bytes) const;
  std::string text() const;

 private:
  struct Entry {
    u64 max_bytes;
    KernelShape shape;
  };
  std::vector<Entry>& rows(Collective c, bool registered) {
    return rows_[static_cast<size_t>(c) * 2 + (registered ? 1 : 0)];
  }
  std::vector<Entry> rows_[kCollectives * 2];
};

// Name of a kernel, and its grid. `kernel` is empty if the algorithm does not support such a large
// message or the collective.
struct KernelPlan {
  std::string kernel;
  u32 blocks = 0, threads = 0;
};

// Plans the kernel of an operation. `bytes` is that of KernelArgs. The grid has at most
// `max_blocks` blocks, even if the shape has more, and a block has a multiple of `warp` threads.
KernelPlan plan_kernel(Collective c, const KernelShape& shape, DType dtype, u64 bytes, int ranks,
                       u32 max_blocks = kChannels, u32 warp = 32);

// The compilation unit of a kernel (UNITS in nvlink_compile.py): its element, or "copy".
std::string unit_of(const std::string& kernel);

// Partitions the message: sets args->cells_per_source, rounds and piece_bytes from the other
// fields.
void set_partition(Collective c, Algorithm algorithm, u32 blocks, KernelArgs* args);

// Returns the arguments that follow from the call; Communicator::run() adds the group's memory.
KernelArgs make_kernel_args(Collective c, const void* in, void* out, u64 bytes, int rank, int ranks,
                            int root);

// Returns whether there is a kernel for this reduction.
bool has_reduction_kernel(const Reduction& r);
// Returns the operation that the kernel runs. Booleans are reduced as bytes, by bitwise operations.
KernelOp kernel_op_of(const Reduction& r);

// The widest access, 1 to 16 bytes, that all of these addresses and strides allow.
u32 common_width(std::initializer_list<u64> addresses);

}  // namespace nvlink
}  // namespace fsccl
