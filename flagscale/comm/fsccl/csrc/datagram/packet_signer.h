// Message authentication of packets including their payload, by the construction of UMAC (Black et
// al. 1999, RFC 4418). The hash function NH with a long secret compresses each block of the payload
// to 128 bits, with one multiplication per eight bytes. SipHash (core/mac.h) with another secret
// authenticates these hashes together with the header. Two different payloads of one length have
// the same NH value with probability 2^-64.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../core/mac.h"

namespace fsccl::datagram {

// Signs and verifies packets with one key. Immutable.
class PacketSigner {
 public:
  static constexpr size_t kBlockBytes = 1024,
                          kGroupBytes = 32;                // of a block, and of one step of NH
  static constexpr size_t kMaxPayload = 16 * kBlockBytes;  // bytes

  explicit PacketSigner(const Key& key) : key_(derive_key(key, uint64_t{2})) {
    const Key words = derive_key(key, uint64_t{3});
    for (size_t i = 0; i < secret_.size(); ++i) {
      secret_[i] = static_cast<uint32_t>(mac_of(words, &i, sizeof i));
    }
  }

  // Returns the authentication code of a header, which has no padding, and a payload of `length`
  // bytes, at most kMaxPayload.
  template <class Header>
  uint64_t sign(const Header& header, const std::byte* payload, size_t length) const {
    std::array<std::byte, sizeof header + 16 * (kMaxPayload / kBlockBytes)> message;
    std::memcpy(message.data(), &header, sizeof header);
    size_t bytes = sizeof header;
    for (size_t at = 0; at < length; at += kBlockBytes, bytes += 16) {
      const auto hashes = nh(payload + at, std::min(kBlockBytes, length - at));
      std::memcpy(message.data() + bytes, hashes.data(), 16);
    }
    return mac_of(key_, message.data(), bytes);
  }

 private:
  using Lanes = std::array<uint64_t, 4>;

  // Returns the NH value of a block with the secret, and with the secret from its fifth word on.
  std::array<uint64_t, 2> nh(const std::byte* block, size_t bytes) const {
    Lanes first{}, second{};
    const size_t whole_groups_bytes = bytes / kGroupBytes * kGroupBytes;
    for (size_t at = 0; at < whole_groups_bytes; at += kGroupBytes)
      add(block + at, &secret_[at / 4], &first, &second);
    if (whole_groups_bytes < bytes) {
      std::array<std::byte, kGroupBytes> padded{};
      std::memcpy(padded.data(), block + whole_groups_bytes, bytes - whole_groups_bytes);
      add(padded.data(), &secret_[whole_groups_bytes / 4], &first, &second);
    }
    return {first[0] + first[1] + first[2] + first[3],
            second[0] + second[1] + second[2] + second[3]};
  }
  static void add(const std::byte* data, const uint32_t* secret, Lanes* first, Lanes* second) {
    std::array<uint32_t, 8> data_words;
    std::memcpy(data_words.data(), data, sizeof data_words);  // little-endian, like packets
    for (size_t j = 0; j < 4; ++j) {
      (*first)[j] += uint64_t{data_words[j] + secret[j]} * (data_words[j + 4] + secret[j + 4]);
      (*second)[j] += uint64_t{data_words[j] + secret[j + 4]} * (data_words[j + 4] + secret[j + 8]);
    }
  }

  Key key_;
  std::array<uint32_t, kBlockBytes / 4 + 4> secret_;
};

}  // namespace fsccl::datagram
