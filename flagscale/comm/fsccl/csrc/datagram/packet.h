// What a datagram says, and how it is known to be true. Every one is signed with a key that only the
// ranks of this group have and that no other group ever had, its payload too: who lacks it can
// neither make one nor change one, and what was sent in another group means nothing here. What was
// sent before in this group carries the number of its operation, sender, receiver and place, so that
// the session (session.h) takes it once, in its operation, or not at all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "sign.h"

namespace fsccl::datagram {

enum class Kind : uint8_t {
  kReady = 1,   // the sender has begun the operation
  kPart,        // of its gradient, for the owner of the piece
  kSum,         // of everyone's, by its owner
  kWantParts,   // which pieces the sender lacks: a bit each
  kWantSums,
  kRecord,      // what the sender has of the operation, for good
  kMark,        // nothing but its flags
};

// As it lies on the wire, little-endian.
struct Header {
  static constexpr uint16_t kMagic = 0xd1f5;
  // Of the sender, in data and marks: all of its parts, or sums, have been sent once before this.
  static constexpr uint8_t kPartsSent = 1, kSumsSent = 2;

  uint64_t mac = 0;  // of all that follows, payload included
  uint16_t magic = kMagic;
  uint16_t length = 0;  // of the payload
  uint32_t epoch = 0;   // the group's, drawn anew with its key
  uint32_t group = 0;   // which of the rings of ranks that share an epoch
  uint16_t sender = 0, receiver = 0;
  uint64_t operation = 0;
  uint64_t offset = 0;  // of the payload in the bucket or the record; of wants: the first piece
  uint64_t mask = 0;    // of ranks: whose ready, or whose record, the sender has
  Kind kind = Kind::kReady;
  uint8_t flags = 0;
  uint8_t zero[6] = {};
};
static_assert(sizeof(Header) == 56, "the layout on the wire");

// What both ends know, and a header only repeats.
struct Circle {
  Signer signer;
  uint32_t epoch = 0, group = 0;
  int rank = 0, ranks = 1;

  static Circle of(const Key& group_key, uint32_t number, int rank, int ranks) {
    const Key own = derived(group_key, std::array<uint64_t, 2>{0x64617461'6772616dU, number});
    const Key names = derived(own, uint64_t{1});
    return {Signer(own), static_cast<uint32_t>(names.lo), number, rank, ranks};
  }
};

inline uint64_t mac_of_packet(const Circle& circle, const std::byte* packet, size_t bytes) {
  constexpr size_t own = sizeof(uint64_t);  // the MAC's place
  return circle.signer.of<sizeof(Header) - own>(packet + own, bytes - sizeof(Header));
}

// Makes a packet whole, whose payload is there, at `packet` + sizeof(Header). Its size.
inline size_t seal(const Circle& circle, int to, Header header, std::byte* packet) {
  header.epoch = circle.epoch;
  header.group = circle.group;
  header.sender = static_cast<uint16_t>(circle.rank);
  header.receiver = static_cast<uint16_t>(to);
  std::memcpy(packet, &header, sizeof header);
  const size_t bytes = sizeof header + header.length;
  const uint64_t mac = mac_of_packet(circle, packet, bytes);
  std::memcpy(packet, &mac, sizeof mac);
  return bytes;
}

// What was not taken, by why.
struct Dropped {
  uint64_t forged = 0;     // not signed so, or no packet at all
  uint64_t foreign = 0;    // of another group, for another rank, or not from where its sender is
  uint64_t late = 0;       // of an operation, or a part of one, that is over
  uint64_t repeated = 0;   // of what is there
  uint64_t malformed = 0;  // signed, and yet out of bounds
  uint64_t all() const { return forged + foreign + late + repeated + malformed; }
};

// The header of a packet that came from where rank `from` is; nothing where it is not to be taken.
inline std::optional<Header> open(const Circle& circle, int from, const std::byte* packet,
                                  size_t bytes, Dropped* dropped) {
  Header h;
  if (bytes < sizeof h) return ++dropped->forged, std::nullopt;
  std::memcpy(&h, packet, sizeof h);
  if (h.magic != Header::kMagic || bytes != sizeof h + h.length) {
    return ++dropped->forged, std::nullopt;
  }
  const bool here = h.epoch == circle.epoch && h.group == circle.group &&
                    h.receiver == circle.rank && h.sender == from && from != circle.rank &&
                    from >= 0 && from < circle.ranks;
  if (!here) return ++dropped->foreign, std::nullopt;
  if (h.mac != mac_of_packet(circle, packet, bytes)) return ++dropped->forged, std::nullopt;
  if (h.kind < Kind::kReady || h.kind > Kind::kMark) return ++dropped->malformed, std::nullopt;
  return h;
}

}  // namespace fsccl::datagram
