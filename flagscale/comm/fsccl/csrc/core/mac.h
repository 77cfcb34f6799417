// SipHash-2-4 (Aumasson and Bernstein, 2012), a keyed hash for short messages. Without the 128-bit
// key, the 64-bit authentication code of a message cannot be computed, and a guess succeeds with
// probability 2^-64. It authenticates the headers of frames (connection.h) and derives keys from
// keys.
#pragma once

#include <cstdint>
#include <cstring>

namespace fsccl {

// A secret key of 128 bits.
struct Key {
  uint64_t lo = 0, hi = 0;
};

// Returns the message authentication code of `bytes` bytes.
inline uint64_t mac_of(const Key& key, const void* message, size_t bytes) {
  uint64_t v0 = key.lo ^ 0x736f6d6570736575u, v1 = key.hi ^ 0x646f72616e646f6du;
  uint64_t v2 = key.lo ^ 0x6c7967656e657261u, v3 = key.hi ^ 0x7465646279746573u;
  const auto rotate = [](uint64_t x, int by) { return x << by | x >> (64 - by); };
  const auto rounds = [&](int n) {
    for (; n > 0; --n) {
      v0 += v1, v1 = rotate(v1, 13) ^ v0, v0 = rotate(v0, 32);
      v2 += v3, v3 = rotate(v3, 16) ^ v2;
      v0 += v3, v3 = rotate(v3, 21) ^ v0;
      v2 += v1, v1 = rotate(v1, 17) ^ v2, v2 = rotate(v2, 32);
    }
  };
  const auto* at = static_cast<const unsigned char*>(message);
  for (size_t remaining = bytes;; remaining -= 8, at += 8) {
    uint64_t word = remaining < 8 ? static_cast<uint64_t>(bytes) << 56 : 0;
    std::memcpy(&word, at, remaining < 8 ? remaining : 8);  // little-endian, like the frames
    v3 ^= word;
    rounds(2);
    v0 ^= word;
    if (remaining < 8) break;
  }
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

// Derives a key from another one. Each value of `purpose` gives a different key, which reveals
// nothing about the original one. `T` must have no padding.
template <class T>
Key derive_key(const Key& key, const T& purpose) {
  struct {
    T purpose;
    uint64_t index;
  } block{purpose, 0};
  static_assert(sizeof block == sizeof(T) + sizeof block.index, "no uninitialised padding");
  const uint64_t lo = mac_of(key, &block, sizeof block);
  block.index = 1;
  return {lo, mac_of(key, &block, sizeof block)};
}

}  // namespace fsccl
