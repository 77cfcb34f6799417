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

// What is signed, with the payload. Both ends know most of it, and it goes as a Wire.
struct Header {
  // Of the sender, in data and marks: all of its parts, or sums, have been sent once before this; and
  // it knows that all ranks are ready.
  static constexpr uint8_t kPartsSent = 1, kSumsSent = 2, kAllReady = 4;

  uint64_t operation = 0;
  uint32_t epoch = 0;  // of this ring of ranks, drawn anew with its group's key
  uint32_t place = 0;  // of data: in the bucket, in grains; of a record: bytes; of wants: pieces
  uint16_t length = 0;  // of what is behind the header
  uint8_t sender = 0, receiver = 0;
  Kind kind = Kind::kReady;
  uint8_t flags = 0;
  uint16_t unused = 0;
};
static_assert(sizeof(Header) == 24, "no byte that is signed is left to chance");

// As it lies on the wire, little-endian. Behind it, but in data, a word: of which ranks the sender has
// the ready, or the record; or which demand of a rank this is, or has been answered.
struct Wire {
  uint64_t mac = 0;
  uint32_t place = 0;
  uint8_t operation = 0;  // its last byte
  uint8_t sender = 0;
  Kind kind = Kind::kReady;
  uint8_t flags = 0;
};
static_assert(sizeof(Wire) == 16, "the layout on the wire");

inline bool is_data(Kind kind) { return kind == Kind::kPart || kind == Kind::kSum; }
inline size_t head_of(Kind kind) { return sizeof(Wire) + (is_data(kind) ? 0 : sizeof(uint64_t)); }

// One that has come, and is true; `length` is the payload's.
struct Packet : Header {
  uint64_t word = 0;
  const std::byte* payload = nullptr;

  // Whether its sender may not know that all ranks are ready.
  bool leads() const { return kind == Kind::kPart && (flags & kAllReady) == 0; }
};

// What both ends know, and a header only repeats.
struct Circle {
  Signer signer;
  uint32_t epoch = 0;
  int rank = 0, ranks = 1;

  static Circle of(const Key& group_key, uint32_t number, int rank, int ranks) {
    const Key own = derived(group_key, std::array<uint64_t, 2>{0x64617461'6772616dU, number});
    const Key names = derived(own, uint64_t{1});
    return {Signer(own), static_cast<uint32_t>(names.lo), rank, ranks};
  }
};

// Makes a packet whole, whose payload of `header.length` bytes is there, at `packet` + head_of(kind).
// Its size.
inline size_t seal(const Circle& circle, int to, Header header, uint64_t word, std::byte* packet) {
  const size_t head = head_of(header.kind), bytes = head + header.length;
  header.length = static_cast<uint16_t>(bytes - sizeof(Wire));
  header.epoch = circle.epoch;
  header.sender = static_cast<uint8_t>(circle.rank);
  header.receiver = static_cast<uint8_t>(to);
  std::memcpy(packet + sizeof(Wire), &word, head - sizeof(Wire));
  Wire wire;
  wire.mac = circle.signer.of(header, packet + sizeof wire, header.length);
  wire.place = header.place;
  wire.operation = static_cast<uint8_t>(header.operation);
  wire.sender = header.sender;
  wire.kind = header.kind;
  wire.flags = header.flags;
  std::memcpy(packet, &wire, sizeof wire);
  return bytes;
}

// What was not taken, by why.
struct Dropped {
  uint64_t forged = 0;     // not signed so: of another group, for another rank, or no packet at all
  uint64_t foreign = 0;    // not from where its sender is
  uint64_t late = 0;       // of an operation, or a part of one, that is over
  uint64_t repeated = 0;   // of what is there
  uint64_t malformed = 0;  // signed, and yet out of bounds
  uint64_t all() const { return forged + foreign + late + repeated + malformed; }
};

// A packet that came from where rank `from` is; nothing where it is not to be taken. Of all numbers
// with its last byte its operation has the one that is nearest to `now`, or it is not true.
inline std::optional<Packet> open(const Circle& circle, int from, const std::byte* packet,
                                  size_t bytes, uint64_t now, Dropped* dropped) {
  Wire wire;
  if (bytes < sizeof wire || bytes > sizeof wire + Signer::kMost) {
    return ++dropped->forged, std::nullopt;
  }
  std::memcpy(&wire, packet, sizeof wire);
  const bool here = wire.sender == from && from != circle.rank && from >= 0 && from < circle.ranks;
  if (!here) return ++dropped->foreign, std::nullopt;
  Packet p;
  Header& h = p;
  const auto ahead = static_cast<int8_t>(wire.operation - static_cast<uint8_t>(now));
  h.operation = now + static_cast<uint64_t>(int64_t{ahead});
  h.epoch = circle.epoch;
  h.place = wire.place;
  h.length = static_cast<uint16_t>(bytes - sizeof wire);
  h.sender = wire.sender;
  h.receiver = static_cast<uint8_t>(circle.rank);
  h.kind = wire.kind;
  h.flags = wire.flags;
  if (wire.mac != circle.signer.of(h, packet + sizeof wire, h.length)) {
    return ++dropped->forged, std::nullopt;
  }
  const size_t head = head_of(h.kind);
  if (h.kind < Kind::kReady || h.kind > Kind::kMark || bytes < head) {
    return ++dropped->malformed, std::nullopt;
  }
  std::memcpy(&p.word, packet + sizeof wire, head - sizeof wire);
  p.payload = packet + head;
  h.length = static_cast<uint16_t>(bytes - head);
  return p;
}

}  // namespace fsccl::datagram
