// Data transfer of one bounded all_reduce on one rank. The buffer is divided into shards, one per
// rank, and pieces, one per packet (layout.h). Every rank sends its part of each piece to the owner
// of the piece; owners sum the parts and send the sums to all ranks. Nothing here waits, reads a
// clock or uses a socket: Session (session.h) passes in the time and the network.
//
//   early data  Before all ranks are known to be ready, a rank sends a limited amount of its parts,
//               without waiting for the ready packets of the others.
//   sending     Data is sent at a given rate, to all ranks in turn, a run of packets each
//               (run_length.h): first parts, then parts that have been requested again, then sums
//               in the order in which they became complete, then sums that have been requested
//               again. Flags in each packet show whether all parts, or all sums, have been sent
//               before it. When there is no data to send, kStatus packets carry these flags and the
//               numbers of the requests that have been answered.
//   requesting  A stream is the parts, or the sums, that one rank sends to this rank. Its missing
//               pieces are requested when its sender has sent all of it, or shortly before its
//               deadline. They are requested again when the sender has answered the request, or
//               after some time, ProtocolLimits::max_requests times in all. A request includes the
//               number of ranks to which this rank sends requests. Each of them reduces its rate by
//               that factor, because they share the link of this rank.
//   summing     A piece is summed as soon as the parts of all ranks have arrived. At the end of the
//               reduce phase, or once no more parts are expected, it is summed from the parts that
//               have arrived, scaled by the number of ranks / the number of parts.
//
// 16-bit floats are summed in fp32 and rounded once, in the order of ranks (core/reduce.h), by the
// owner only. So all ranks that receive the sum of a piece get the same bits.
#pragma once

#include <chrono>
#include <deque>
#include <vector>

#include "../core/types.h"
#include "layout.h"
#include "packet.h"

namespace fsccl::datagram {

using Time = std::chrono::nanoseconds;

// Message between two ranks over the reliable transport, in the layout of the wire: the sender is
// ready, or requests the record of the receiver (session.h).
struct Notice {
  enum Kind : uint32_t { kReady = 1, kRequestRecord = 2 };
  uint32_t kind = kReady;
  uint32_t needs_reply = 0;  // of kReady: 1 if the receiver is to send kReady as well
  uint64_t operation = 0;
};

// Network of a session: datagrams, and reliable messages as a fallback.
class Network {
 public:
  virtual ~Network() = default;
  // reserve() returns memory for the next packet, of at most `max_bytes`; send() sends the packet
  // that is there. A packet may be lost, duplicated, reordered or late.
  virtual std::byte* reserve(size_t max_bytes) = 0;
  virtual void send(int to, size_t bytes) = 0;
  // Returns the number of received packets that this host has dropped because its socket buffer was
  // full, modulo 2^32.
  virtual uint32_t overruns() const = 0;
  // Send a message over the reliable transport, which is slow. Used if datagrams do not arrive.
  virtual void send_notice(int to, const Notice& notice) = 0;
  virtual void send_record(int to, const std::vector<std::byte>& record) = 0;
};

// Timing constants of the protocol.
struct ProtocolLimits {
  // Interval at which ready packets and records are sent again, and minimum interval of requests.
  Time resend_interval = std::chrono::milliseconds(4);
  // Maximum time by which packets overtake each other on the network.
  Time max_reorder_delay = std::chrono::milliseconds(1);
  // Time after which a state that does not complete by datagrams also uses the reliable transport.
  Time fallback_delay = std::chrono::milliseconds(60);
  // Maximum step of the clock. A larger one is a jump, of which only this much counts.
  Time max_clock_step = std::chrono::milliseconds(100);
  uint32_t max_requests = 10;  // for the missing pieces of a stream
};

// Parameters of one all_reduce of this rank's bucket.
struct AllReduceJob {
  const std::byte* in = nullptr;
  uint64_t digest = 0;  // fingerprint of the operation, which ranks compare
  size_t bytes = 0;
  Reduction reduction;   // of the parts of all ranks: SUM or AVG of floats
  Time reduce_time{};    // deadline for parts, from the start of the transfer
  Time total_time{};     // deadline for sums, from the start of the transfer
  Time repair_grace{};   // time after the answer to the last request before a stream is given up
  double rate = 0;       // bytes per second
  int run_halvings = 0;  // the run length is the size of a burst, halved this many times
};

// Statistics of an operation on one rank, which all ranks exchange in their records.
struct RankReport {
  uint32_t expected = 0;  // packets that it should receive; it sends as many
  uint32_t lost = 0;      // packets that it has sent and that were requested again
  uint32_t scaled = 0;    // pieces of its shard that were summed without the parts of all ranks
  // Duration of the transfer until nothing was missing or all missing pieces were given up,
  // including the time for early data.
  uint32_t elapsed_us = 0;
  uint64_t overruns = 0;  // packets, or runs of them, that its host has dropped (Network::overruns)
};

// Data transfer of one operation at a time, reused by later ones.
class Transfer {
 public:
  static constexpr size_t kMaxEarlyBytes = 1 << 20;  // bytes to all ranks together

  // `payload`: maximum bytes of a packet after its header.
  Transfer(const Rail& rail, size_t payload, const ProtocolLimits& limits);

  // Begins an operation, with early data.
  void begin_early_phase(const AllReduceJob& job, uint64_t operation, Time now);
  // Called when all ranks are ready. The deadlines are relative to the first packet from a rank
  // that knows so, too, or to fallback_delay from now if there is none before: other ranks may not
  // know yet that all are ready.
  void start(Time now) {
    if (!may_send()) credit_time_ = now;  // no credit accumulates while it waits
    start_time_ = clock_start_ = last_status_sent_ = now;
    is_transferring_ = true;
    start_confirmed_ = false;
  }
  bool is_transferring() const { return is_transferring_; }
  void finish() { is_transferring_ = false, max_early_bytes_ = 0; }

  // Handles kPart, kSum, kStatus and requests of this operation.
  void handle_packet(const Packet& p, Time now, DropCounters* drop_counters);
  void check_deadlines(Time now, Network& network);
  // Sends as much as the rate allows.
  void send_due(Time now, Network& network);
  // Returns the time at which to call send_due() again; Time::max() if there is no data to send.
  Time next_send_time(Time now) const;
  // Returns whether the transfer is over: all sums are here, or no more will be accepted.
  bool is_finished(Time now) const;

  const BucketLayout& layout() const { return layout_; }
  const Bitmap& received_pieces() const { return available_sums_; }  // sums of all shards
  RankReport report(Time now) const;
  std::byte* result() { return result_.data(); }

 private:
  // The parts, or the sums, that one peer sends to this rank.
  struct Stream {
    size_t missing = 0;
    bool all_sent = false;  // its sender has sent all of it once
    // Number of requests for missing pieces; number of the last request that was answered.
    uint32_t requests = 0, answered_request = 0;
    // Time of the last change of `all_sent` or `answered_request`; time of the last request.
    Time last_status{}, last_request{};
  };
  // Numbers of the last requests of a peer for missing parts and sums.
  struct RequestNumbers {
    uint32_t parts = 0, sums = 0;
  };
  // A piece to send to a rank.
  struct QueuedPiece {
    int to;
    PacketKind kind;
    size_t piece;
    // Number of ranks that send repairs to the same rank now, including this one.
    int concurrent_senders = 1;
  };

  void handle_part(const Packet& p, DropCounters* drop_counters);
  void handle_sum(const Packet& p, DropCounters* drop_counters);
  void handle_request(const Packet& p, DropCounters* drop_counters);
  void update_stream(Stream* stream, bool all_sent, uint32_t answered_request, Time now);
  void request_missing(std::vector<Stream>* streams, int from, PacketKind kind, Time deadline,
                       Time now, Network& network);
  bool is_given_up(const std::vector<Stream>& streams, int rank, Time now) const;
  Time request_interval(const std::vector<Stream>& streams) const;
  void sum_piece(size_t piece);
  uint8_t flags() const;
  void send_status(Time now, Network& network);
  bool may_send() const { return is_transferring_ || early_bytes_sent_ < max_early_bytes_; }
  bool next_piece(QueuedPiece* out);
  bool next_repair(std::deque<QueuedPiece>* from, QueuedPiece* out);
  bool next_part(QueuedPiece* out);
  bool next_sum(QueuedPiece* out);
  bool is_part_sent(int to, size_t index) const;
  bool is_sum_sent(int to, size_t index) const;
  int turn_of(int rank) const { return (rank - rail_.rank + rail_.ranks) % rail_.ranks; }
  size_t max_packet_bytes() const { return sizeof(WireHeader) + payload_; }
  double burst_bytes() const { return static_cast<double>(burst_packets_ * max_packet_bytes()); }
  // Shard 0 is one of the longest.
  bool all_parts_sent() const { return part_run_start_ >= layout_.shard(0).size(); }
  void send(const QueuedPiece& out, Network& network);
  Stream& part_stream(int rank) { return part_streams_[static_cast<size_t>(rank)]; }
  Stream& sum_stream(int rank) { return sum_streams_[static_cast<size_t>(rank)]; }

  const Rail rail_;
  const size_t payload_;
  const ProtocolLimits limits_;
  AllReduceJob job_;
  uint64_t operation_ = 0;
  BucketLayout layout_;
  bool is_transferring_ = false;  // start() was called
  bool start_confirmed_ = false;  // a packet has arrived whose sender knows that all are ready
  // Time of start(); time to which the deadlines are relative; time of `credit_bytes_`; time of the
  // last kStatus packets, or Time::min() if data has been sent since.
  Time start_time_{}, clock_start_{}, credit_time_{}, last_status_sent_{};
  Interval own_shard_;  // this rank's shard, in pieces

  // Received parts of this rank's shard: those of rank 0, then those of rank 1, and so on.
  std::vector<std::byte> received_parts_;
  std::vector<std::byte> result_;
  std::vector<Bitmap> part_received_;  // by rank: parts of this rank's shard
  std::vector<int> part_counts_;  // by piece of this rank's shard: parts, including this rank's
  Bitmap summed_;                 // pieces of this rank's shard
  Bitmap available_sums_;         // pieces of the buffer whose sum is in `result_`
  std::vector<Stream> part_streams_, sum_streams_;
  size_t lost_ = 0, scaled_ = 0, expected_ = 0;  // as in RankReport

  // Progress of sending: parts to all ranks in turn, sums in the order in which they became
  // complete. In a turn, a run of `run_length_` pieces is sent to one rank, the one `part_turn_`
  // (or `sum_turn_`) ranks after this one. A burst of up to `burst_packets_` packets, one or more
  // runs, is sent at once.
  size_t burst_packets_ = 1, run_length_ = 1;
  int part_turn_ = 1;
  // Position in the shards at which the current run begins, the same for all ranks, and number of
  // pieces of it that have been sent in this turn.
  size_t part_run_start_ = 0, part_run_position_ = 0;
  // Summed pieces in sending order, and the position of each piece of this rank's shard in that
  // order.
  std::vector<size_t> sum_order_, sum_positions_;
  size_t sum_run_start_ = 0, sum_run_length_ = 0, sum_run_position_ = 0;
  int sum_turn_ = 1;
  std::deque<QueuedPiece> part_repairs_, sum_repairs_;
  std::vector<RequestNumbers> peer_requests_;
  // Token bucket of the rate: bytes that may be sent now. Maximum and sent bytes of early data.
  double credit_bytes_ = 0, max_early_bytes_ = 0, early_bytes_sent_ = 0;
};

}  // namespace fsccl::datagram
