// Which kernel an operation runs, and in what grid. Ranks must come to the same answer, so it
// depends on nothing but the operation, its size, the number of ranks and the table they share.
#pragma once

#include <string>
#include <vector>

#include "../core/types.h"
#include "args.h"

namespace fsccl {
namespace nvlink {

enum class Collective : uint8_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast };
enum class Algorithm : uint8_t {
  kOther,    // not ours: another library is faster here
  kFlagged,  // flagged.h, of packets
  kLines,    // flagged.h, of bundles
  kTwoShot,  // flagged.h, of bundles: all_reduce in two steps
  kStaged,   // staged.h
  kDirect,   // direct.h, of registered buffers
};
constexpr int kCollectives = 5, kAlgorithms = 6;

// Whether its kernels send cells (boxes.h).
constexpr bool of_cells(Algorithm a) {
  return a == Algorithm::kFlagged || a == Algorithm::kLines || a == Algorithm::kTwoShot;
}

const char* name_of(Collective c);
const char* name_of(Algorithm a);

struct Shape {
  Algorithm algorithm = Algorithm::kOther;
  u32 blocks = 0;   // 0: by size
  u32 threads = 0;  // 0: as many as are of use
};

// The shapes that were measured to be fastest. As text, a line each, which ranks compare:
//   <collective> <ordinary|registered> <most bytes> <algorithm> <blocks> <threads>
// Sizes ascend; the last line of a collective holds for what is larger too. Sizes are what
// benchmarks print: the whole message of all_reduce and broadcast, and ranks times a part.
class Table {
 public:
  // Throws Error(kUsage) naming the line.
  static Table parse(const std::string& text);
  // First guesses for this many ranks.
  static Table guess(int ranks);
  Shape find(Collective c, bool registered, u64 bytes) const;
  std::string text() const;

 private:
  struct Row {
    u64 most;
    Shape shape;
  };
  std::vector<Row>& rows(Collective c, bool registered) {
    return rows_[static_cast<size_t>(c) * 2 + (registered ? 1 : 0)];
  }
  std::vector<Row> rows_[kCollectives * 2];
};

// A kernel and its grid. `kernel` is empty if the algorithm cannot take so large a message, or does
// not exist for the collective.
struct Plan {
  std::string kernel;
  u32 blocks = 0, threads = 0;
};

// `bytes` as Args has them: of the whole for all_reduce and broadcast, else of a part. No more than
// `most` blocks, whatever the shape says; they have a multiple of `warp` threads.
Plan plan(Collective c, const Shape& shape, DType dtype, u64 bytes, int ranks,
          u32 most = kChannels, u32 warp = 32);

// Where a kernel is compiled, see nvlink_compile.py: with those of its element, or the "movers".
std::string unit_of(const std::string& kernel);

// How the kernel cuts the message: sets args->cells, rounds and piece by what the others say.
void cut(Collective c, Algorithm algorithm, u32 blocks, Args* args);

// What of the arguments follows from the call; the group adds its memory.
Args arguments(Collective c, const void* in, void* out, u64 bytes, int rank, int ranks, int root);

// Whether there is a kernel for this reduction; and the operation it is to run: booleans are bytes.
bool reduces(const Reduction& r);
Math math_of(const Reduction& r);

// The widest access, 1 to 16 bytes, that all of these addresses and distances allow.
u32 common_width(std::initializer_list<u64> addresses);

}  // namespace nvlink
}  // namespace fsccl
