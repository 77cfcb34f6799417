// Primitives of the kernels: memory access, work distribution among the threads of a block, and
// waiting for peers.
//
// The template parameter `B` is a thread of a block: CudaBlock on a GPU (block_cuda.h), HostBlock
// in the tests. It provides:
//
//   thread(), threads()             index of the thread in the block, and threads of the block
//   channel(), channels()           index of the block in the grid, and blocks of the grid
//   kWarp                           threads of a warp
//   wait_previous_kernel(), sync()  barriers: with the stream's previous kernel, of the block
//   any(), warp_or()                logical OR over the block, bitwise OR over the warp
//   load(), store()                 plain accesses of 1 to 16 bytes
//   post_flag(), load_flag()        store-release and load-acquire of a flag
//   send(), receive()               a packet (kernel_args.h)
//   write_bundle(), read_bundle()   this thread's Share, 16 bytes, of a bundle (kernel_args.h)
//   load_host(), store_host()       words of host memory
//   fence(), pause()                system-wide memory fence; hint that the thread polls
//   nanoseconds()                   a clock
#pragma once

#include "element.h"

namespace fsccl {
namespace nvlink {

FSCCL_FN constexpr u64 min_u64(u64 a, u64 b) { return a < b ? a : b; }
// Returns how many bytes of [lo, lo + size) lie below `end`.
FSCCL_FN constexpr u64 clipped_size(u64 lo, u64 size, u64 end) {
  return lo >= end ? 0 : min_u64(size, end - lo);
}

// Loads a Raw by accesses of type W.
template <class W, class Raw, class B>
FSCCL_FN Raw load_in_pieces(B& b, const char* from) {
  constexpr int kCount = sizeof(Raw) / sizeof(W);
  W pieces[kCount];
  FSCCL_UNROLL for (int i = 0; i < kCount; ++i) {
    pieces[i] = b.template load<W>(from + i * sizeof(W));
  }
  Raw raw;
  memcpy(&raw, pieces, sizeof raw);
  return raw;
}

template <class W, class Raw, class B>
FSCCL_FN void store_in_pieces(B& b, char* to, const Raw& raw) {
  constexpr int kCount = sizeof(Raw) / sizeof(W);
  W pieces[kCount];
  memcpy(pieces, &raw, sizeof raw);
  FSCCL_UNROLL for (int i = 0; i < kCount; ++i) b.store(to + i * sizeof(W), pieces[i]);
}

// Slow path of load() for misaligned memory and the end of a buffer. Not inlined, because it is
// rare and its code would be repeated at every call.
template <class Raw, class B>
FSCCL_SLOW Raw load_slow(B b, const char* from, u32 bytes, u32 width) {
  if (bytes >= sizeof(Raw)) {
    if (width >= 4) return load_in_pieces<u32, Raw>(b, from);
    if (width == 2) return load_in_pieces<u16, Raw>(b, from);
    return load_in_pieces<u8, Raw>(b, from);
  }
  u8 pieces[sizeof(Raw)];
  FSCCL_UNROLL for (u32 i = 0; i < sizeof(Raw); ++i) {
    pieces[i] = i < bytes ? b.template load<u8>(from + i) : u8{0};
  }
  Raw raw;
  memcpy(&raw, pieces, sizeof raw);
  return raw;
}

template <class Raw, class B>
FSCCL_SLOW void store_slow(B b, char* to, u32 bytes, u32 width, Raw raw) {
  if (bytes >= sizeof(Raw)) {
    if (width >= 4) return store_in_pieces<u32>(b, to, raw);
    if (width == 2) return store_in_pieces<u16>(b, to, raw);
    return store_in_pieces<u8>(b, to, raw);
  }
  u8 pieces[sizeof(Raw)];
  memcpy(pieces, &raw, sizeof raw);
  FSCCL_UNROLL for (u32 i = 0; i < sizeof(Raw); ++i) {
    if (i < bytes) b.store(to + i, pieces[i]);
  }
}

// Loads a Raw (Vec or u64) by accesses of at most `width` bytes. Only the first `bytes` are read;
// the rest is zero.
template <class Raw, class B>
FSCCL_FN Raw load(B& b, const char* from, u64 bytes, u32 width) {
  if (bytes >= sizeof(Raw) && width >= sizeof(Raw)) return b.template load<Raw>(from);
  return load_slow<Raw>(b, from, static_cast<u32>(min_u64(bytes, sizeof(Raw))), width);
}

template <class Raw, class B>
FSCCL_FN void store(B& b, char* to, u64 bytes, u32 width, const Raw& raw) {
  if (bytes >= sizeof(Raw) && width >= sizeof(Raw)) return b.store(to, raw);
  store_slow(b, to, static_cast<u32>(min_u64(bytes, sizeof(Raw))), width, raw);
}

// Stores the first `bytes` of a vector. If is_whole, a constant of the caller, is true, all of it
// exists and is aligned, and the compiler drops the slow path: a loop that contains a call of it
// cannot keep all loaded vectors in registers.
template <class B>
FSCCL_FN void store_vector(B& b, bool is_whole, char* to, u64 bytes, u32 width, const Vec& vec) {
  if (is_whole) return b.store(to, vec);
  store(b, to, bytes, width, vec);
}

constexpr u32 kVecBytes = sizeof(Vec);

// Copies the 16-byte vectors number first, first + stride, ... (first < stride) of `bytes`. Vectors
// are counted in 32 bits, which saves registers: see kMaxPartBytes.
template <class B>
FSCCL_FN void copy_vectors(B& b, char* to, u32 to_width, const char* from, u32 from_width,
                           u64 bytes, u32 first, u32 stride) {
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
// several warps, or each warp several parts. Calls f(part, first, stride); the thread processes the
// vectors number first, first + stride, ... of the part. There is one call in the code, so the body
// of f is compiled once.
template <class B, class F>
FSCCL_FN void for_each_part(B& b, u32 parts, F f) {
  constexpr u32 kWarp = B::kWarp;
  const u32 warps = b.threads() / kWarp, warp = b.thread() / kWarp, lane = b.thread() % kWarp;
  const bool several_warps_per_part = warps > parts;
  u32 part = several_warps_per_part ? warp % parts : warp;
  const u32 first = several_warps_per_part ? warp / parts * kWarp + lane : lane;
  const u32 warps_of_part = several_warps_per_part ? (warps - part + parts - 1) / parts : 1;
  for (; part < parts; part += several_warps_per_part ? parts : warps)
    f(part, first, warps_of_part * kWarp);
}

// The k-th rank after this one in cyclic order, k < ranks; this rank for k = 0.
FSCCL_FN int peer_rank(const KernelArgs& a, int k) {
  const int p = a.rank + k;
  return p < a.ranks ? p : p - a.ranks;
}

// This channel's counters.
template <class B>
FSCCL_FN Counters* counters(B& b, const KernelArgs& a) {
  return reinterpret_cast<Counters*>(a.arena[a.rank]) + b.channel();
}

// Wait for peers that ends when the peers have come, when the host stops it, or at the timeout,
// which also ends all later waits of this rank.
//
// A thread that has given up lacks the data of peers, so any data it sent would be wrong, and peers
// that came later could not detect that. From then on it writes nothing to peers and posts no flag,
// also in later kernels (a replayed graph launches them without asking the host). Peers time out
// themselves, or their hosts stop their waits.
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

  // Polls until find_missing() returns 0; a set bit p means that rank p has not come. Returns false
  // if the wait was given up; later waits return at once. Threads that wait together, with the same
  // find_missing(), give up together: agree_to_give_up(wants) returns true if any of them wants to.
  template <class F, class G>
  FSCCL_FN bool wait(B& b, const KernelArgs& a, F find_missing, G agree_to_give_up) {
    u64 start = 0;
    for (u32 poll = 1;; ++poll) {
      const u32 ranks = find_missing();
      if (ranks == 0 || gave_up_) return !gave_up_;
      b.pause();
      if (poll % kPollsPerCheck == 0)
        gave_up_ = agree_to_give_up(should_give_up(b, a, ranks, &start));
    }
  }

 private:
  static constexpr u32 kPollsPerCheck = 1024;  // host memory is slower to poll than flags
  static constexpr u64 kLongWait = 10000000;   // ns; shorter waits are not reported

  FSCCL_FN static bool should_give_up(B& b, const KernelArgs& a, u32 ranks, u64* start) {
    if (b.load_host(&a.host_flags->stop) != 0) return true;
    const u64 now = b.nanoseconds();
    if (*start == 0) *start = now;
    const u64 elapsed = now - *start;
    if (elapsed > kLongWait) b.store_host(&a.host_flags->long_wait, 1);
    if (a.timeout_ns == 0 || elapsed < a.timeout_ns) return false;
    u32 rank = 0;
    while ((ranks >> rank & 1) == 0) ++rank;
    b.store_host(&a.host_flags->late_rank_plus_1, rank + 1);
    b.store_host(&a.host_flags->stop, 1);
    return true;
  }

  bool gave_up_ = false;
};

}  // namespace nvlink
}  // namespace fsccl
