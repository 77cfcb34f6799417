// Data transfer of one bounded all_reduce: every rank sends each shard of its bucket to the owner
// of the shard; owners sum the received parts and send the sums to all ranks. Nothing here waits,
// reads a clock or uses a socket: the time and the network are passed in.
//
//   leading     A little data is sent before all ranks are known to be ready; it travels while the
//               ready announcements do.
//   sending     At a given rate, to all ranks in turn, a run of packets each (run_length.h): first
//               parts, then parts that have been requested again, then sums in the order in which
//               they became complete, then sums again. All packets say whether all parts, or sums,
//               have been sent before them. When there is nothing else to send, marks say so, and
//               which requests have been answered.
//   requesting  A stream (the parts, or the sums, of one rank) that is said to be sent completely,
//               or whose time is nearly over, is asked for its missing pieces; and again when that
//               request is said to be answered, or after a while, ProtocolLimits::repairs times in
//               all. A request includes the number of ranks that are asked. They send that many
//               times slower, because they share the link of the rank that asks.
//   summing     A piece is summed at once when the parts of all ranks are there. When the reduce
//               phase is over, or no rank has anything left to send again, it is summed from the
//               parts that are there, scaled by ranks / parts.
//
// 16-bit floats are summed in fp32 and rounded once, in the order of ranks (core/reduce.h), by the
// owner alone. All ranks that receive a piece get the same bits.
#pragma once

#include <chrono>
#include <deque>
#include <vector>

#include "../core/types.h"
#include "layout.h"
#include "packet.h"

namespace fsccl::datagram {

using Time = std::chrono::nanoseconds;

// Message between two ranks over the reliable transport (session.h).
struct Notice {
  enum PacketKind : uint32_t { kReady = 1, kAsk = 2 };
  uint32_t kind = kReady;
  uint32_t wants_answer = 0;
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
  // Counts packets that this host dropped because it had no room for them; modulo 2^32.
  virtual uint32_t overruns() const = 0;
  // Reliable and slow; used where datagrams do not arrive.
  virtual void send_notice(int to, const Notice& notice) = 0;
  virtual void send_record(int to, const std::vector<std::byte>& record) = 0;
};

// Timing constants of the protocol.
struct ProtocolLimits {
  // Interval of resending ready and records, and between requests.
  Time resend = std::chrono::milliseconds(4);
  Time reorder = std::chrono::milliseconds(1);  // maximum time by which packets overtake each other
  // Time without success by datagrams before the reliable transport is used.
  Time patience = std::chrono::milliseconds(60);
  // A larger step of the clock counts as a jump.
  Time longest_step = std::chrono::milliseconds(100);
  uint32_t repairs = 10;
};

// Parameters of one all_reduce of this rank's bucket.
struct AllReduceJob {
  const std::byte* in = nullptr;
  uint64_t digest = 0;  // fingerprint of the operation, which ranks compare
  size_t bytes = 0;
  Reduction reduction;   // of the parts of all ranks: SUM or AVG of floats
  Time reduce_time{};    // deadline for parts
  Time total_time{};     // deadline for sums, since the start as well
  Time repair_grace{};   // time after the last repair before missing data is given up
  double rate = 0;       // bytes per second
  int run_halvings = 0;  // halvings of a burst that give the run of packets to one rank
};

// Statistics of an operation on one rank, which all ranks exchange.
struct RankReport {
  uint32_t expected = 0;  // packets that it receives, and as many that it sends
  uint32_t lost = 0;      // packets that it has sent and that were requested again
  uint32_t scaled = 0;    // pieces of its shard that lack a part
  // Until nothing was missing, or it was given up; includes the time of the lead.
  uint32_t elapsed_us = 0;
  uint64_t overruns = 0;  // packets, or runs of them, that this host had no room for
};

// Data transfer of one operation at a time, reused by later ones.
class Transfer {
 public:
  static constexpr size_t kMaxLeadBytes = 1 << 20;  // bytes to all ranks together

  // `payload`: most bytes of a packet behind its header.
  Transfer(const Rail& rail, size_t payload, const ProtocolLimits& limits);

  // Begins the leading phase.
  void begin_leading(const AllReduceJob& job, uint64_t operation, Time now);
  // All ranks are ready. The time of the operation runs from the first packet of another rank, or a
  // while later: others may not know yet that all are ready.
  void start(Time now) {
    if (!may_send()) credit_time_ = now;  // no credit accumulates while it waits
    start_time_ = clock_start_ = last_mark_ = now;
    moving_ = true;
    heard_start_ = false;
  }
  bool moving() const { return moving_; }
  void finish() { moving_ = false, lead_limit_ = 0; }

  // Handles kPart, kSum, kMark and requests of this operation.
  void handle_packet(const Packet& p, Time now, DropCounters* drop_counters);
  void check_deadlines(Time now, Network& net);
  // Sends as much as the rate allows.
  void send_due(Time now, Network& net);
  // Returns when to call send_due() again because there is data to send; Time::max(): never.
  Time next_send_time(Time now) const;
  // Returns whether nothing more will arrive.
  bool is_finished(Time now) const;

  const BucketLayout& layout() const { return layout_; }
  const Bitmap& received_pieces() const { return have_sums_; }  // sums of all shards
  RankReport report(Time now) const;
  std::byte* result() { return result_.data(); }

 private:
  // The parts, or the sums, that one peer sends to this rank.
  struct Stream {
    size_t missing = 0;
    bool all_sent = false;  // according to its sender
    // Number of requests; number of the last one that was answered.
    uint32_t requests = 0, answered_request = 0;
    Time last_status{}, last_request{};  // time of the last report about either
  };
  // Number of the last request of a peer, by kind of stream.
  struct RequestNumbers {
    uint32_t parts = 0, sums = 0;
  };
  // A piece to send to a rank.
  struct QueuedPiece {
    int to;
    PacketKind kind;
    size_t piece;
    // Ranks that send to the same rank now, including this one: they share its link.
    int concurrent_senders = 1;
  };

  void handle_part(const Packet& p, DropCounters* drop_counters);
  void handle_sum(const Packet& p, DropCounters* drop_counters);
  void handle_request(const Packet& p, DropCounters* drop_counters);
  void update_stream(Stream* stream, bool all_sent, uint32_t answered_request, Time now);
  void request_missing(std::vector<Stream>* streams, int from, PacketKind kind, Time until,
                       Time now, Network& net);
  bool is_given_up(const std::vector<Stream>& streams, int rank, Time now) const;
  Time request_interval(const std::vector<Stream>& streams) const;
  void sum_piece(size_t piece);
  uint8_t flags() const;
  void send_marks(Time now, Network& net);
  bool may_send() const { return moving_ || lead_sent_ < lead_limit_; }
  bool next_piece(QueuedPiece* out);
  bool next_repair(std::deque<QueuedPiece>* from, QueuedPiece* out);
  bool next_part(QueuedPiece* out);
  bool next_sum(QueuedPiece* out);
  bool is_part_sent(int to, size_t index) const;
  bool is_sum_sent(int to, size_t index) const;
  int turn_of(int rank) const { return (rank - rail_.rank + rail_.ranks) % rail_.ranks; }
  size_t max_packet_bytes() const { return sizeof(WireHeader) + payload_; }
  double burst_bytes() const { return static_cast<double>(burst_packets_ * max_packet_bytes()); }
  // No shard is longer.
  bool all_parts_sent() const { return part_run_start_ >= layout_.shard(0).size(); }
  void send(const QueuedPiece& out, Network& net);
  Stream& part_stream(int rank) { return part_streams_[static_cast<size_t>(rank)]; }
  Stream& sum_stream(int rank) { return sum_streams_[static_cast<size_t>(rank)]; }

  const Rail rail_;
  const size_t payload_;
  const ProtocolLimits limits_;
  AllReduceJob job_;
  uint64_t operation_ = 0;
  BucketLayout layout_;
  bool moving_ = false, heard_start_ = false;
  Time start_time_{}, clock_start_{}, credit_time_{}, last_mark_{};
  Interval own_shard_;  // this rank's shard, in pieces

  // Parts of the own shard: those of each rank, one after the other.
  std::vector<std::byte> received_parts_;
  std::vector<std::byte> result_;
  std::vector<Bitmap> part_received_;  // by rank, of the own shard
  std::vector<int> part_counts_;  // parts of each piece of the own shard, including this rank's
  Bitmap summed_, have_sums_;
  std::vector<Stream> part_streams_, sum_streams_;
  size_t lost_ = 0, scaled_ = 0, expected_ = 0;

  // Progress of sending: parts to all ranks in turn, sums in the order in which they were made. A
  // turn is a run of pieces to one rank; a burst of one or more runs is sent at once.
  size_t burst_packets_ = 1, run_length_ = 1;
  int part_turn_ = 1;
  // Position in the shards at which all turns of this run begin, and progress inside the run.
  size_t part_run_start_ = 0, part_run_position_ = 0;
  // Sums in sending order, and the place of each piece of the own shard in that order.
  std::vector<size_t> sum_order_, sum_positions_;
  size_t sum_run_start_ = 0, sum_run_length_ = 0, sum_run_position_ = 0;
  int sum_turn_ = 1;
  std::deque<QueuedPiece> part_repairs_, sum_repairs_;
  std::vector<RequestNumbers> peer_requests_;
  // Bytes: may be sent now; may lead, at most; has led.
  double credit_ = 0, lead_limit_ = 0, lead_sent_ = 0;
};

}  // namespace fsccl::datagram
