// Arguments of the kernels, and the layout of the memory that ranks share.
//
// This header and those of the kernels are compiled three times: by nvcc or NVRTC, which has no
// standard headers, for a GPU, and by a C++ compiler for the tests, where a thread of the operating
// system plays a thread of a block.
#pragma once

#if defined(__CUDACC__)
#define FSCCL_FN __device__ __forceinline__
#define FSCCL_SLOW __device__ __noinline__
#define FSCCL_UNROLL _Pragma("unroll")
#define FSCCL_NO_UNROLL _Pragma("unroll 1")
#else
#include <cstring>
#define FSCCL_FN inline
#define FSCCL_SLOW inline
#define FSCCL_UNROLL
#define FSCCL_NO_UNROLL
#endif

namespace fsccl {
namespace nvlink {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int kMaxRanks = 8;
constexpr u32 kChannels = 64;  // the blocks of the largest grid
constexpr u32 kMaxThreads = 512;
constexpr u64 kMaxPartBytes = u64{32} << 30;  // of a part, whose vectors must be countable
constexpr u32 kDepth = 4;      // slots of a channel, see staged.h

// In the order of RedOp in core/types.h.
enum class Math : u32 { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

// A block of a grid is a channel: it works with the blocks of the same number of its peers and with
// no other block. Each channel counts its operations in device memory, so that a captured graph can
// be replayed, and every rank's count is the same. Counts only grow (and wrap); nothing is ever
// reset, so no reset can race.
struct Counters {
  u32 step;     // the last one, of staged.h and direct.h
  u32 packets;  // the last epoch of packets (cells.h)
  u32 bundles;  // the last epoch of bundles
  u32 gave_up;     // not zero: it gave up waiting and does nothing any more (PeerWait)
  u32 unused[28];
};

// Words of host memory by which a group's kernels on this rank and the host communicate.
struct HostFlags {
  u32 stop;   // the host writes 1 to end all waiting
  u32 late;   // a kernel writes 1 + the rank that did not come in time
  u32 waits;  // a kernel that waits for long writes 1, repeatedly
};

// Eight bytes of data, each half next to the epoch: NCCL's LL line. An aligned access of 8 bytes is
// seen whole or not at all, so a reader that finds the epoch has the half that belongs to it.
struct alignas(16) Packet {
  u64 low, high;  // the epoch in the upper 32 bits
};

// Four lines of 128 bytes, each of 15 words of data and the epoch: NCCL's LL128 lines. The 32
// threads of a warp write them at once, 16 bytes each.
constexpr u64 kLine = 128;
constexpr u32 kLineWords = kLine / sizeof(u64);
constexpr u32 kBundleWords = 4 * kLineWords;
struct alignas(kLine) Bundle {
  u64 word[kBundleWords];
};
constexpr u64 kBundleData = 4 * (kLine - sizeof(u64));

// A group's part of a rank's heap:
//
//   Counters[kChannels]              the rank's own
//   u32 flags[kChannels][32]         a line per channel: the step that each peer has posted
//   Packet boxes[kChannels][2][..]   a channel's packets for odd and even epochs
//   Bundle racks[kChannels][2][..]   and its bundles; kept apart, because a flag of the one may lie
//                                    where the other has data
//   slots[kChannels][kDepth][..]     a channel's staging buffers
//
// Borrowed arenas (engine.h) have neither boxes nor racks, and fewer slots.
constexpr u64 kFlags = kChannels * sizeof(Counters);
constexpr u64 kBoxes = kFlags + kChannels * kLine;
constexpr u64 kBoxBytes = 8 << 10;  // of all sources, for one parity of one channel
constexpr u64 kRacks = kBoxes + kChannels * 2 * kBoxBytes;
constexpr u64 kRackBytes = 36 << 10;
constexpr u64 kSlots = kRacks + kChannels * 2 * kRackBytes;

FSCCL_FN constexpr u64 arena_bytes(u64 slot_bytes) {
  return kSlots + kChannels * kDepth * slot_bytes;
}

// Packets and bundles that one source may send to one channel in one operation.
FSCCL_FN constexpr u32 box_packets(u32 ranks) { return kBoxBytes / sizeof(Packet) / ranks; }
FSCCL_FN constexpr u32 rack_bundles(u32 ranks) { return kRackBytes / sizeof(Bundle) / (ranks - 1); }

struct KernelArgs {
  char* arena[kMaxRanks];  // of every rank, including this one
  char* peer[kMaxRanks];   // direct.h: registered buffer of every rank
  const char* in;
  char* out;
  u64 bytes;       // all_reduce and broadcast: of the whole message, else of one rank's part
  u64 stride_in;   // between the inputs for two ranks; 0: all ranks get the same
  u64 stride_out;  // between the outputs of two ranks
  u64 timeout_ns;  // 0: no timeout
  HostFlags* host;
  double factor;   // PREMUL_SUM
  Math math;
  int rank, ranks;
  int root;        // of a broadcast, else -1
  u32 slots;       // offset in an arena
  u32 slot_bytes;
  // Partition of the message, by the host (kernel_plan.h), which divides once; threads would divide
  // every time.
  u32 cells;       // cells.h: of one source, in a box
  u32 rounds;      // staged.h: rounds of a channel
  u64 piece;       // bytes: staged.h: per channel and round; direct.h: per channel or rank
  u32 width_in;    // widest access that every address in `in` allows: 1 to 16 bytes
  u32 width_out;
};

}  // namespace nvlink
}  // namespace fsccl
