// Primitives of the kernels: memory access, work distribution among the threads of a block, and
// waiting for peers.
//
// `B` is the block (block_cuda.h; on a CPU the tests' own). It provides:
//
//   thread(), threads(), channel(), channels(), kWarp   the thread's place in the grid
//   wait_previous_kernel(), sync()                      barriers
//   any(), warp_or()                                    a disjunction over the block, over the warp
//   load(), store()                                     plain accesses of 1 to 16 bytes
//   post_flag(), load_flag()                            release and acquire of flags
//   send(), receive()                                   packets
//   write_bundle(), read_bundle()                       a thread's Share of a bundle
//   load_host(), store_host()                           words of host memory
//   fence(), pause(), nanoseconds()
#pragma once

#include "element.h"

namespace fsccl {
namespace nvlink {

FSCCL_FN constexpr u64 least(u64 a, u64 b) { return a < b ? a : b; }
// Bytes of [lo, lo + size) below `end`.
FSCCL_FN constexpr u64 clip(u64 lo, u64 size, u64 end) {
  return lo >= end ? 0 : least(size, end - lo);
}

template <class W, class Raw, class B>
FSCCL_FN Raw load_in_pieces(B& b, const char* from) {
  constexpr int kCount = sizeof(Raw) / sizeof(W);
  W piece[kCount];
  FSCCL_UNROLL for (int i = 0; i < kCount; ++i) {
    piece[i] = b.template load<W>(from + i * sizeof(W));
  }
  Raw raw;
  memcpy(&raw, piece, sizeof raw);
  return raw;
}

template <class W, class Raw, class B>
FSCCL_FN void store_in_pieces(B& b, char* to, const Raw& raw) {
  constexpr int kCount = sizeof(Raw) / sizeof(W);
  W piece[kCount];
  memcpy(piece, &raw, sizeof raw);
  FSCCL_UNROLL for (int i = 0; i < kCount; ++i) b.store(to + i * sizeof(W), piece[i]);
}

// Slow path for misaligned memory and the end of a buffer. Out of line, because it is rare and
// would be repeated at every call.
template <class Raw, class B>
FSCCL_SLOW Raw load_slow(B b, const char* from, u32 bytes, u32 width) {
  if (bytes >= sizeof(Raw)) {
    if (width >= 4) return load_in_pieces<u32, Raw>(b, from);
    if (width == 2) return load_in_pieces<u16, Raw>(b, from);
    return load_in_pieces<u8, Raw>(b, from);
  }
  u8 piece[sizeof(Raw)];
  FSCCL_UNROLL for (u32 i = 0; i < sizeof(Raw); ++i) {
    piece[i] = i < bytes ? b.template load<u8>(from + i) : u8{0};
  }
  Raw raw;
  memcpy(&raw, piece, sizeof raw);
  return raw;
}

template <class Raw, class B>
FSCCL_SLOW void store_slow(B b, char* to, u32 bytes, u32 width, Raw raw) {
  if (bytes >= sizeof(Raw)) {
    if (width >= 4) return store_in_pieces<u32>(b, to, raw);
    if (width == 2) return store_in_pieces<u16>(b, to, raw);
    return store_in_pieces<u8>(b, to, raw);
  }
  u8 piece[sizeof(Raw)];
  memcpy(piece, &raw, sizeof raw);
  FSCCL_UNROLL for (u32 i = 0; i < sizeof(Raw); ++i) {
    if (i < bytes) b.store(to + i, piece[i]);
  }
}

// Loads a Raw (Vec or u64) of which `bytes` exist (zeros for the rest), by accesses of at most
// `width` bytes.
template <class Raw, class B>
FSCCL_FN Raw load(B& b, const char* from, u64 bytes, u32 width) {
  if (bytes >= sizeof(Raw) && width >= sizeof(Raw)) return b.template load<Raw>(from);
  return load_slow<Raw>(b, from, static_cast<u32>(least(bytes, sizeof(Raw))), width);
}

template <class Raw, class B>
FSCCL_FN void store(B& b, char* to, u64 bytes, u32 width, const Raw& raw) {
  if (bytes >= sizeof(Raw) && width >= sizeof(Raw)) return b.store(to, raw);
  store_slow(b, to, static_cast<u32>(least(bytes, sizeof(Raw))), width, raw);
}

// As store(). `whole`, a constant, means that it is an aligned vector. Only without the slow path
// in it can a loop keep in registers all it has loaded.
template <class B>
FSCCL_FN void store_vector(B& b, bool whole, char* to, u64 bytes, u32 width, const Vec& vec) {
  if (whole) return b.store(to, vec);
  store(b, to, bytes, width, vec);
}

constexpr u32 kVecBytes = sizeof(Vec);

// Copies every stride-th vector from the first-th on; first < stride. Vectors are counted in 32
// bits, which saves registers: see kMaxPartBytes.
template <class B>
FSCCL_FN void move(B& b, char* to, u32 to_width, const char* from, u32 from_width, u64 bytes,
                   u32 first, u32 stride) {
  constexpr u32 kInFlight = 8;  // loads in flight before the first store
  const u32 count = static_cast<u32>((bytes + kVecBytes - 1) / kVecBytes);
  u32 v = first;
  if (to_width == kVecBytes && from_width == kVecBytes) {
    const u32 whole = static_cast<u32>(bytes / kVecBytes);
    for (; v < whole; v += kInFlight * stride) {
      Vec loaded[kInFlight];
      FSCCL_UNROLL for (u32 i = 0; i < kInFlight; ++i) {
        const u32 at = v + i * stride;
        if (at < whole) loaded[i] = b.template load<Vec>(from + u64{at} * kVecBytes);
      }
      FSCCL_UNROLL for (u32 i = 0; i < kInFlight; ++i) {
        const u32 at = v + i * stride;
        if (at < whole) b.store(to + u64{at} * kVecBytes, loaded[i]);
      }
    }
    v = whole % stride == first ? whole : count;  // one thread copies the rest
  }
  for (; v < count; v += stride) {
    const u64 at = u64{v} * kVecBytes;
    store(b, to + at, bytes - at, to_width, load<Vec>(b, from + at, bytes - at, from_width));
  }
}

// Distributes `parts` over the warps, so that traffic goes to all peers at once: each part gets
// some warps, or each warp several parts. Calls f(part, first, stride), with the place of this
// thread in the part. The body of f is compiled once.
template <class B, class F>
FSCCL_FN void for_each_part(B& b, u32 parts, F f) {
  constexpr u32 kWarp = B::kWarp;
  const u32 warps = b.threads() / kWarp, warp = b.thread() / kWarp, lane = b.thread() % kWarp;
  const bool several = warps > parts;
  u32 part = several ? warp % parts : warp;
  const u32 first = several ? warp / parts * kWarp + lane : lane;
  const u32 team = several ? (warps - part + parts - 1) / parts : 1;
  for (; part < parts; part += several ? parts : warps) f(part, first, team * kWarp);
}

// The k-th rank after this one, k < ranks.
FSCCL_FN int peer(const KernelArgs& a, int k) {
  const int p = a.rank + k;
  return p < a.ranks ? p : p - a.ranks;
}

template <class B>
FSCCL_FN Counters* counters(B& b, const KernelArgs& a) {
  return reinterpret_cast<Counters*>(a.arena[a.rank]) + b.channel();
}

// A wait for peers that the host can end, and so can the timeout, which then ends all later waits
// of this rank, too.
//
// A thread that has given up lacks the data of peers, so whatever it sent would be wrong, and peers
// that came later could not detect that. It writes nothing to peers and posts nothing from then on,
// also in kernels that follow (a replayed graph launches them, whatever the host does). Peers time
// out themselves, or their hosts end their waits.
template <class B>
class PeerWait {
 public:
  FSCCL_FN bool gave_up() const { return gave_up_; }

  // Returns whether the channel gave up in an earlier kernel: the same for all threads of the
  // block.
  FSCCL_FN static bool gave_up_before(B& b, const KernelArgs& a) {
    return b.template load<u32>(reinterpret_cast<const char*>(&counters(b, a)->gave_up)) != 0;
  }
  // Called by every thread, once one has given up.
  FSCCL_FN static void mark_given_up(B& b, const KernelArgs& a) {
    if (b.thread() == 0) b.store(reinterpret_cast<char*>(&counters(b, a)->gave_up), u32{1});
  }

  // Waits until missing() returns no bit; each bit stands for a rank that is waited for. Returns
  // false once given up: then nothing is waited for any more. Threads that wait together, for whom
  // missing() is the same, give up together: agree() returns whether any of them wants to.
  template <class F, class G>
  FSCCL_FN bool wait(B& b, const KernelArgs& a, F missing, G agree) {
    u64 start = 0;
    for (u32 poll = 1;; ++poll) {
      const u32 ranks = missing();
      if (ranks == 0 || gave_up_) return !gave_up_;
      b.pause();
      if (poll % kPollsPerCheck == 0) gave_up_ = agree(is_over(b, a, ranks, &start));
    }
  }

 private:
  static constexpr u32 kPollsPerCheck = 1024;  // host memory is slower to poll than flags
  static constexpr u64 kLongWait = 10000000;  // ns; shorter waits are not reported

  FSCCL_FN static bool is_over(B& b, const KernelArgs& a, u32 ranks, u64* start) {
    if (b.load_host(&a.host->stop) != 0) return true;
    const u64 now = b.nanoseconds();
    if (*start == 0) *start = now;
    const u64 elapsed = now - *start;
    if (elapsed > kLongWait) b.store_host(&a.host->waits, 1);
    if (a.timeout_ns == 0 || elapsed < a.timeout_ns) return false;
    u32 rank = 0;
    while ((ranks >> rank & 1) == 0) ++rank;
    b.store_host(&a.host->late, rank + 1);
    b.store_host(&a.host->stop, 1);
    return true;
  }

  bool gave_up_ = false;
};

}  // namespace nvlink
}  // namespace fsccl
