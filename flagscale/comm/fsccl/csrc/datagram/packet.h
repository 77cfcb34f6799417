// Packets of the bounded all_reduce, and their authentication. Every packet is signed, including
// its payload, with a key that only the ranks of this group have and that no other group has used.
// So nobody without the key can create or modify packets, and packets of other groups are rejected.
// A repeated packet of this group is harmless: a packet includes the number of its operation, its
// sender, receiver and position, so that the session (session.h) accepts it only in its operation,
// and once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "packet_signer.h"

namespace fsccl::datagram {

enum class PacketKind : uint8_t {
  kReady = 1,     // the sender has begun the operation
  kPart,          // part of the sender's gradient, for the owner of the piece
  kSum,           // sum over all ranks, from its owner
  kRequestParts,  // bitmap of the pieces whose parts the sender has not received
  kRequestSums,   // bitmap of the pieces whose sums the sender has not received
  kRecord,        // fragment of the sender's record: its final state in the operation
  kStatus,        // flags only; sent when there is no data to send
};

// The signed header. The receiver knows most of it, so only a WireHeader is sent.
struct PacketHeader {
  // Flags of kPart, kSum and kStatus. Before this packet, the sender has sent all of its parts, or
  // all of its sums, once; it knows that all ranks are ready.
  static constexpr uint8_t kPartsSent = 1, kSumsSent = 2, kAllReady = 4;

  uint64_t operation = 0;
  uint32_t epoch = 0;  // random number of the rail
  // Parts and sums: offset in the buffer, in units of BucketLayout::kGrain. Record: offset in
  // bytes. Requests: index of the first piece of the bitmap.
  uint32_t position = 0;
  uint16_t length = 0;  // bytes of the payload
  uint8_t sender = 0, receiver = 0;
  PacketKind kind = PacketKind::kReady;
  uint8_t flags = 0;  // in requests: the number of ranks that are requested to send
  uint16_t reserved = 0;
};
static_assert(sizeof(PacketHeader) == 24, "no padding, because all bytes are signed");

// Header as it is sent, little-endian. In all packets except parts and sums, a 64-bit status word
// follows: in kReady and kRecord, a mask of the ranks whose ready, or whole record, the sender has;
// in requests, the number of the request; in kStatus, the numbers of the last requests of the
// receiver that have been answered (low half: for parts, high half: for sums).
struct WireHeader {
  uint64_t mac = 0;
  uint32_t position = 0;
  uint8_t operation = 0;  // low byte of PacketHeader::operation
  uint8_t sender = 0;
  PacketKind kind = PacketKind::kReady;
  uint8_t flags = 0;
};
static_assert(sizeof(WireHeader) == 16, "the layout on the wire");

inline bool is_data(PacketKind kind) {
  return kind == PacketKind::kPart || kind == PacketKind::kSum;
}
inline size_t header_bytes(PacketKind kind) {
  return sizeof(WireHeader) + (is_data(kind) ? 0 : sizeof(uint64_t));
}

// A received packet whose signature has been verified. `length` is the payload size in bytes.
struct Packet : PacketHeader {
  uint64_t status_word = 0;
  const std::byte* payload = nullptr;

  // Returns whether this is early data (transfer.h): its sender does not know that all ranks are
  // ready.
  bool is_early() const { return kind == PacketKind::kPart && (flags & kAllReady) == 0; }
};

// Rail, the ranks with the same index in each node, as seen by one of them.
struct Rail {
  PacketSigner signer;
  uint32_t epoch = 0;       // random number that its packets include
  int rank = 0, ranks = 1;  // this rank's index in the rail, and number of ranks

  // Returns the rail of the ranks with index `index` in their nodes.
  static Rail derive(const Key& group_key, uint32_t index, int rank, int ranks) {
    const Key rail_key =
        derive_key(group_key, std::array<uint64_t, 2>{0x64617461'6772616dU, index});
    const Key id_key = derive_key(rail_key, uint64_t{1});
    return {PacketSigner(rail_key), static_cast<uint32_t>(id_key.lo), rank, ranks};
  }
};

// Completes and signs a packet to rank `to` of the rail. Its payload of `header.length` bytes is at
// `packet` + header_bytes(kind). Returns the size of the packet in bytes.
inline size_t sign_packet(const Rail& rail, int to, PacketHeader header, uint64_t status_word,
                          std::byte* packet) {
  const size_t head = header_bytes(header.kind), bytes = head + header.length;
  header.length = static_cast<uint16_t>(bytes - sizeof(WireHeader));
  header.epoch = rail.epoch;
  header.sender = static_cast<uint8_t>(rail.rank);
  header.receiver = static_cast<uint8_t>(to);
  std::memcpy(packet + sizeof(WireHeader), &status_word, head - sizeof(WireHeader));
  WireHeader wire;
  wire.mac = rail.signer.sign(header, packet + sizeof wire, header.length);
  wire.position = header.position;
  wire.operation = static_cast<uint8_t>(header.operation);
  wire.sender = header.sender;
  wire.kind = header.kind;
  wire.flags = header.flags;
  std::memcpy(packet, &wire, sizeof wire);
  return bytes;
}

// Counters of packets that were not accepted, by reason.
struct DropCounters {
  uint64_t forged = 0;     // wrong signature: of another group, for another rank, or not a packet
  uint64_t foreign = 0;    // not sent from the address of its sender
  uint64_t late = 0;       // of an operation, or a phase, that is over
  uint64_t repeated = 0;   // duplicate
  uint64_t malformed = 0;  // correctly signed, but out of bounds
  uint64_t total() const { return forged + foreign + late + repeated + malformed; }
};

// Verifies a packet from the address of rank `from`. Returns nothing, and counts the reason, if it
// is not accepted. Only the low byte of the operation number is sent; it is completed to the number
// closest to `current_operation`.
inline std::optional<Packet> verify_packet(const Rail& rail, int from, const std::byte* packet,
                                           size_t bytes, uint64_t current_operation,
                                           DropCounters* drop_counters) {
  WireHeader wire;
  if (bytes < sizeof wire || bytes > sizeof wire + PacketSigner::kMaxPayload) {
    return ++drop_counters->forged, std::nullopt;
  }
  std::memcpy(&wire, packet, sizeof wire);
  const bool from_peer = wire.sender == from && from != rail.rank && from >= 0 && from < rail.ranks;
  if (!from_peer) return ++drop_counters->foreign, std::nullopt;
  Packet packet_out;
  PacketHeader& header = packet_out;
  const auto distance =
      static_cast<int8_t>(wire.operation - static_cast<uint8_t>(current_operation));
  header.operation = current_operation + static_cast<uint64_t>(int64_t{distance});
  header.epoch = rail.epoch;
  header.position = wire.position;
  header.length = static_cast<uint16_t>(bytes - sizeof wire);
  header.sender = wire.sender;
  header.receiver = static_cast<uint8_t>(rail.rank);
  header.kind = wire.kind;
  header.flags = wire.flags;
  if (wire.mac != rail.signer.sign(header, packet + sizeof wire, header.length)) {
    return ++drop_counters->forged, std::nullopt;
  }
  const size_t head = header_bytes(header.kind);
  if (header.kind < PacketKind::kReady || header.kind > PacketKind::kStatus || bytes < head) {
    return ++drop_counters->malformed, std::nullopt;
  }
  std::memcpy(&packet_out.status_word, packet + sizeof wire, head - sizeof wire);
  packet_out.payload = packet + head;
  header.length = static_cast<uint16_t>(bytes - head);
  return packet_out;
}

}  // namespace fsccl::datagram
