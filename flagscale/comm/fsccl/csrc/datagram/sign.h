// What signs packets, payload included: UMAC's way (Black and others 1999, RFC 4418) of making a keyed
// hash as fast as memory. NH, which needs a multiplication for eight bytes, brings each block of a
// payload down to 128 bits by a long secret; SipHash (core/mac.h) signs those together with the
// header, by another one. Two unlike payloads of one length have the same NH once in 2^64.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../core/mac.h"

namespace fsccl::datagram {

class Signer {
 public:
  static constexpr size_t kBlock = 1024, kGroup = 32;  // bytes
  static constexpr size_t kMost = 16 * kBlock;         // of a payload

  explicit Signer(const Key& key) : key_(derived(key, uint64_t{2})) {
    const Key words = derived(key, uint64_t{3});
    for (size_t i = 0; i < words_.size(); ++i) {
      words_[i] = static_cast<uint32_t>(mac_of(words, &i, sizeof i));
    }
  }

  // Of a head without padding, and of a payload that is not longer than kMost.
  template <class Head>
  uint64_t of(const Head& head, const std::byte* payload, size_t length) const {
    std::array<std::byte, sizeof head + 16 * (kMost / kBlock)> message;
    std::memcpy(message.data(), &head, sizeof head);
    size_t bytes = sizeof head;
    for (size_t at = 0; at < length; at += kBlock, bytes += 16) {
      const auto sums = nh(payload + at, std::min(kBlock, length - at));
      std::memcpy(message.data() + bytes, sums.data(), 16);
    }
    return mac_of(key_, message.data(), bytes);
  }

 private:
  using Lanes = std::array<uint64_t, 4>;

  // Of the block by the secret, and by the secret from its fifth word on.
  std::array<uint64_t, 2> nh(const std::byte* block, size_t bytes) const {
    Lanes one{}, two{};
    const size_t whole = bytes / kGroup * kGroup;
    for (size_t at = 0; at < whole; at += kGroup) add(block + at, &words_[at / 4], &one, &two);
    if (whole < bytes) {
      std::array<std::byte, kGroup> rest{};
      std::memcpy(rest.data(), block + whole, bytes - whole);
      add(rest.data(), &words_[whole / 4], &one, &two);
    }
    return {one[0] + one[1] + one[2] + one[3], two[0] + two[1] + two[2] + two[3]};
  }
  static void add(const std::byte* group, const uint32_t* secret, Lanes* one, Lanes* two) {
    std::array<uint32_t, 8> words;
    std::memcpy(words.data(), group, sizeof words);  // little-endian, as packets are
    for (size_t j = 0; j < 4; ++j) {
      (*one)[j] += uint64_t{words[j] + secret[j]} * (words[j + 4] + secret[j + 4]);
      (*two)[j] += uint64_t{words[j] + secret[j + 4]} * (words[j + 4] + secret[j + 8]);
    }
  }

  Key key_;
  std::array<uint32_t, kBlock / 4 + 4> words_;
};

}  // namespace fsccl::datagram
