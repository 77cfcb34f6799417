// SipHash-2-4 (Aumasson, Bernstein, 2012), a keyed hash made for short messages: nobody who lacks
// the key of 128 bits can tell, or guess but once in 2^64, the 64 bits that belong to a message.
// Here it signs the headers of frames, and makes keys of keys.
#pragma once

#include <cstdint>
#include <cstring>

namespace fsccl {

struct Key {
  uint64_t lo = 0, hi = 0;
};

inline uint64_t mac_of(const Key& key, const void* message, size_t bytes) {
  uint64_t v0 = key.lo ^ 0x736f6d6570736575u, v1 = key.hi ^ 0x646f72616e646f6du;
  uint64_t v2 = key.lo ^ 0x6c7967656e657261u, v3 = key.hi ^ 0x7465646279746573u;
  const auto turn = [](uint64_t x, int by) { return x << by | x >> (64 - by); };
  const auto rounds = [&](int n) {
    for (; n > 0; --n) {
      v0 += v1, v1 = turn(v1, 13) ^ v0, v0 = turn(v0, 32);
      v2 += v3, v3 = turn(v3, 16) ^ v2;
      v0 += v3, v3 = turn(v3, 21) ^ v0;
      v2 += v1, v1 = turn(v1, 17) ^ v2, v2 = turn(v2, 32);
    }
  };
  const auto* at = static_cast<const unsigned char*>(message);
  for (size_t left = bytes;; left -= 8, at += 8) {
    uint64_t word = left < 8 ? static_cast<uint64_t>(bytes) << 56 : 0;
    std::memcpy(&word, at, left < 8 ? left : 8);  // little-endian, as the frames are
    v3 ^= word;
    rounds(2);
    v0 ^= word;
    if (left < 8) break;
  }
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

// A key for one purpose, which tells nothing of the one that it was made of.
template <class T>
Key derived(const Key& key, const T& purpose) {
  struct {
    T purpose;
    uint64_t half;
  } of{purpose, 0};
  static_assert(sizeof of == sizeof(T) + sizeof of.half, "nothing between that is not set");
  const uint64_t lo = mac_of(key, &of, sizeof of);
  of.half = 1;
  return {lo, mac_of(key, &of, sizeof of)};
}

}  // namespace fsccl
