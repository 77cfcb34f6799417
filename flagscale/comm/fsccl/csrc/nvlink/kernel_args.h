// Arguments of the NVLink engine's kernels, and the layout of the memory that ranks share.
//
// Included by the kernels and by the host code that launches them (engine.cpp, kernel_plan.cpp).
// This header and those of the kernels are compiled by nvcc or by NVRTC, which has no standard
// headers, for a GPU, and by a C++ compiler for the host code and the tests. In the tests a thread
// of the operating system runs a thread of a CUDA block.
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
constexpr u32 kChannels = 64;                 // blocks of the largest grid
constexpr u32 kMaxThreads = 512;              // per block
constexpr u64 kMaxPartBytes = u64{32} << 30;  // so that 32 bits count the 16-byte vectors of a part
constexpr u32 kSlotsPerChannel = 4;           // staging buffers, see staged.h

// Reduction that a kernel runs, in the order of RedOp in core/types.h.
enum class KernelOp : u32 { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

// Counters of a channel. A channel is a block of the grid: it exchanges data only with the blocks
// of the same number on its peers. Each channel counts its operations in device memory, so that a
// captured graph can be replayed, and every rank's counters are the same. Counters only grow (and
// wrap); nothing is ever reset, so no reset can race.
struct Counters {
  u32 last_step;     // of staged.h and direct.h
  u32 packet_epoch;  // of the last operation that sent packets (cells.h)
  u32 bundle_epoch;  // of the last operation that sent bundles
  u32 gave_up;       // not zero: the channel gave up waiting and does nothing any more (PeerWait)
  u32 unused[28];    // pads to a cache line
};

// Words of host memory by which a group's kernels on this rank and the host communicate.
struct HostFlags {
  u32 stop;              // the host writes 1 to end all waiting
  u32 late_rank_plus_1;  // a kernel writes 1 + the rank that did not come in time
  u32 long_wait;         // a kernel that waits for long writes 1, repeatedly
};

// Packet: eight bytes of data, each half next to the epoch, as a line of NCCL's LL protocol. An
// aligned access of 8 bytes is seen whole or not at all, so a reader that finds the epoch has the
// half that belongs to it.
struct alignas(16) Packet {
  u64 low, high;  // the epoch in the upper 32 bits
};

// Bundle: four lines of 128 bytes, each of 15 words of data and the epoch, as the lines of NCCL's
// LL128 protocol. The 32 threads of a warp write them at once, 16 bytes each.
constexpr u64 kLineBytes = 128;
constexpr u32 kLineWords = kLineBytes / sizeof(u64);
constexpr u32 kBundleWords = 4 * kLineWords;
struct alignas(kLineBytes) Bundle {
  u64 word[kBundleWords];
};
constexpr u64 kBundleDataBytes = 4 * (kLineBytes - sizeof(u64));

// An arena is a group's part of a rank's heap, in which peers write:
//
//   Counters[kChannels]              written by this rank only
//   u32 flags[kChannels][32]         128 bytes per channel: the last step that each peer has posted
//   packet buffers [kChannels][2]    packets for a channel, by parity of the epoch
//   bundle buffers [kChannels][2]    bundles for a channel; in memory of their own, because data of
//                                    a packet may lie where a bundle has its flag
//   slots [kChannels][kSlotsPerChannel]   staging buffers of a channel
//
// Borrowed arenas (engine.h) have no packet and bundle buffers, and fewer slots. Offsets in bytes:
constexpr u64 kFlagsOffset = kChannels * sizeof(Counters);
constexpr u64 kPacketBuffersOffset = kFlagsOffset + kChannels * kLineBytes;
constexpr u64 kPacketBufferBytes = 8 << 10;  // for all sources, one channel and one epoch parity
constexpr u64 kBundleBuffersOffset = kPacketBuffersOffset + kChannels * 2 * kPacketBufferBytes;
constexpr u64 kBundleBufferBytes = 36 << 10;
constexpr u64 kSlotsOffset = kBundleBuffersOffset + kChannels * 2 * kBundleBufferBytes;

// Bytes of an arena whose slots have this many bytes.
FSCCL_FN constexpr u64 arena_bytes(u64 slot_bytes) {
  return kSlotsOffset + kChannels * kSlotsPerChannel * slot_bytes;
}

// Packets or bundles that one source may send to one channel in one operation.
FSCCL_FN constexpr u32 packets_per_source(u32 ranks) {
  return kPacketBufferBytes / sizeof(Packet) / ranks;
}
FSCCL_FN constexpr u32 bundles_per_source(u32 ranks) {
  return kBundleBufferBytes / sizeof(Bundle) / (ranks - 1);
}

struct KernelArgs {
  char* arena[kMaxRanks];              // of every rank, including this one
  char* registered_buffer[kMaxRanks];  // of every rank, for direct.h
  const char* in;
  char* out;
  u64 bytes;       // all_reduce and broadcast: of the whole message, else of one rank's part
  u64 stride_in;   // bytes from the input for one rank to that for the next; 0: all get the same
  u64 stride_out;  // bytes from the output of one rank to that of the next
  u64 timeout_ns;  // 0: no timeout
  HostFlags* host_flags;
  double factor;   // of PREMUL_SUM
  KernelOp op;     // of all_reduce and reduce_scatter
  int rank, ranks;  // this rank, and the number of ranks of the group
  int root;        // of a broadcast, else -1
  u32 slots;       // offset of the slots in an arena
  u32 slot_bytes;
  // Partition of the message. The host computes it once (kernel_plan.h); in a kernel every thread
  // would have to divide.
  u32 cells_per_source;  // cells.h: room for one source in a buffer
  u32 rounds;            // staged.h: pieces per channel
  u64 piece_bytes;       // staged.h: per channel and round; direct.h: per channel or rank
  u32 width_in;          // widest access that every address in `in` allows: 1 to 16 bytes
  u32 width_out;         // the same for `out`
};

}  // namespace nvlink
}  // namespace fsccl
