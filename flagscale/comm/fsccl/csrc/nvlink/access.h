// Reading and writing memory, sharing work among the threads of a block, and waiting.
//
// `B` is the block (block_cuda.h; on a CPU the tests' own). It has the places thread(), threads(),
// channel(), channels(), kWarp; follow(), sync(), and any() and warp_or(), which tell what any
// thread said of the block and of the warp; plain load() and store() of 1 to 16 bytes; release and
// acquire of flags, post() and seen(); send() and receive() of packets, write_bundle() and
// read_bundle() of a thread's Share of bundles; words of host memory, peek() and poke(); fence(),
// pause(), nanoseconds().
#pragma once

#include "element.h"

namespace fsccl {
namespace nvlink {

FSCCL_FN constexpr u64 least(u64 a, u64 b) { return a < b ? a : b; }
// What of [lo, lo + size) lies below `end`.
FSCCL_FN constexpr u64 clip(u64 lo, u64 size, u64 end) {
  return lo >= end ? 0 : least(size, end - lo);
}

template <class W, class Raw, class B>
FSCCL_FN Raw load_pieces(B& b, const char* from) {
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
FSCCL_FN void store_pieces(B& b, char* to, const Raw& raw) {
  constexpr int kCount = sizeof(Raw) / sizeof(W);
  W piece[kCount];
  memcpy(piece, &raw, sizeof raw);
  FSCCL_UNROLL for (int i = 0; i < kCount; ++i) b.store(to + i * sizeof(W), piece[i]);
}

// Misaligned memory and the end of a buffer: rare, so the code is not repeated at every call.
template <class Raw, class B>
FSCCL_SLOW Raw load_slowly(B b, const char* from, u32 bytes, u32 width) {
  if (bytes >= sizeof(Raw)) {
    if (width >= 4) return load_pieces<u32, Raw>(b, from);
    if (width == 2) return load_pieces<u16, Raw>(b, from);
    return load_pieces<u8, Raw>(b, from);
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
FSCCL_SLOW void store_slowly(B b, char* to, u32 bytes, u32 width, Raw raw) {
  if (bytes >= sizeof(Raw)) {
    if (width >= 4) return store_pieces<u32>(b, to, raw);
    if (width == 2) return store_pieces<u16>(b, to, raw);
    return store_pieces<u8>(b, to, raw);
  }
  u8 piece[sizeof(Raw)];
  memcpy(piece, &raw, sizeof raw);
  FSCCL_UNROLL for (u32 i = 0; i < sizeof(Raw); ++i) {
    if (i < bytes) b.store(to + i, piece[i]);
  }
}

// A Raw (Vec or u64) of which `bytes` exist (zeros for the rest), by accesses of `width` at most.
template <class Raw, class B>
FSCCL_FN Raw load(B& b, const char* from, u64 bytes, u32 width) {
  if (bytes >= sizeof(Raw) && width >= sizeof(Raw)) return b.template load<Raw>(from);
  return load_slowly<Raw>(b, from, static_cast<u32>(least(bytes, sizeof(Raw))), width);
}

template <class Raw, class B>
FSCCL_FN void store(B& b, char* to, u64 bytes, u32 width, const Raw& raw) {
  if (bytes >= sizeof(Raw) && width >= sizeof(Raw)) return b.store(to, raw);
  store_slowly(b, to, static_cast<u32>(least(bytes, sizeof(Raw))), width, raw);
}

// As store(); `whole`, a constant, tells that it is an aligned vector. Only without the slow way in
// it can a loop keep in registers all it has loaded.
template <class B>
FSCCL_FN void put(B& b, bool whole, char* to, u64 bytes, u32 width, const Vec& vec) {
  if (whole) return b.store(to, vec);
  store(b, to, bytes, width, vec);
}

constexpr u32 kVecBytes = sizeof(Vec);

// Every stride-th vector from the first-th on; first < stride. Vectors are counted in 32 bits,
// which saves registers: see kMostBytes.
template <class B>
FSCCL_FN void move(B& b, char* to, u32 to_width, const char* from, u32 from_width, u64 bytes,
                   u32 first, u32 stride) {
  constexpr u32 kAtOnce = 8;  // loads in flight before the first store
  const u32 count = static_cast<u32>((bytes + kVecBytes - 1) / kVecBytes);
  u32 v = first;
  if (to_width == kVecBytes && from_width == kVecBytes) {
    const u32 whole = static_cast<u32>(bytes / kVecBytes);
    for (; v < whole; v += kAtOnce * stride) {
      Vec held[kAtOnce];
      FSCCL_UNROLL for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 at = v + i * stride;
        if (at < whole) held[i] = b.template load<Vec>(from + u64{at} * kVecBytes);
      }
      FSCCL_UNROLL for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 at = v + i * stride;
        if (at < whole) b.store(to + u64{at} * kVecBytes, held[i]);
      }
    }
    v = whole % stride == first ? whole : count;  // the rest is one thread's
  }
  for (; v < count; v += stride) {
    const u64 at = u64{v} * kVecBytes;
    store(b, to + at, bytes - at, to_width, load<Vec>(b, from + at, bytes - at, from_width));
  }
}

// Gives each of `parts` to some warps, so that traffic goes to all peers at once, or each warp
// several: f(part, first, stride), the place of this thread in it. What f does is compiled once.
template <class B, class F>
FSCCL_FN void share_out(B& b, u32 parts, F f) {
  constexpr u32 kWarp = B::kWarp;
  const u32 warps = b.threads() / kWarp, warp = b.thread() / kWarp, lane = b.thread() % kWarp;
  const bool many = warps > parts;
  u32 part = many ? warp % parts : warp;
  const u32 first = many ? warp / parts * kWarp + lane : lane;
  const u32 team = many ? (warps - part + parts - 1) / parts : 1;
  for (; part < parts; part += many ? parts : warps) f(part, first, team * kWarp);
}

// The k-th rank after this one, k < ranks.
FSCCL_FN int peer(const Args& a, int k) {
  const int p = a.rank + k;
  return p < a.ranks ? p : p - a.ranks;
}

template <class B>
FSCCL_FN Counters* counters(B& b, const Args& a) {
  return reinterpret_cast<Counters*>(a.arena[a.rank]) + b.channel();
}

// Waiting for peers, though not for ever: the host can end it, and so can the time limit, which
// then ends it for everything that runs on this rank and is to follow.
//
// Whoever has given up has not got what peers sent, so what it could send would be wrong, and peers
// that came later could not tell. It writes nothing to peers and posts nothing from then on, also
// in kernels that follow (a replayed graph launches them, whatever the host knows): peers find out
// by their own waiting, or are told by the host.
template <class B>
class Patience {
 public:
  FSCCL_FN bool lost() const { return lost_; }

  // Whether the channel gave up in a kernel before: the same for all threads of the block.
  FSCCL_FN static bool lost_before(B& b, const Args& a) {
    return b.template load<u32>(reinterpret_cast<const char*>(&counters(b, a)->lost)) != 0;
  }
  // By every thread, once one has given up.
  FSCCL_FN static void lose(B& b, const Args& a) {
    if (b.thread() == 0) b.store(reinterpret_cast<char*>(&counters(b, a)->lost), u32{1});
  }

  // Until missing() has no bit left; each stands for a rank that is waited for. False once given
  // up: then nothing is waited for any more. Threads that wait together, for whom missing() is the
  // same, give up together: agree() tells what any of them says.
  template <class F, class G>
  FSCCL_FN bool wait(B& b, const Args& a, F missing, G agree) {
    u64 began = 0;
    for (u32 turn = 1;; ++turn) {
      const u32 who = missing();
      if (who == 0 || lost_) return !lost_;
      b.pause();
      if (turn % kTurns == 0) lost_ = agree(over(b, a, who, &began));
    }
  }

 private:
  static constexpr u32 kTurns = 1024;  // a look at host memory takes longer than one at a flag
  static constexpr u64 kLong = 10000000;  // ns; shorter waits are nobody's concern

  FSCCL_FN static bool over(B& b, const Args& a, u32 who, u64* began) {
    if (b.peek(&a.host->stop) != 0) return true;
    const u64 now = b.nanoseconds();
    if (*began == 0) *began = now;
    const u64 waited = now - *began;
    if (waited > kLong) b.poke(&a.host->waits, 1);
    if (a.timeout_ns == 0 || waited < a.timeout_ns) return false;
    u32 rank = 0;
    while ((who >> rank & 1) == 0) ++rank;
    b.poke(&a.host->late, rank + 1);
    b.poke(&a.host->stop, 1);
    return true;
  }

  bool lost_ = false;
};

}  // namespace nvlink
}  // namespace fsccl
