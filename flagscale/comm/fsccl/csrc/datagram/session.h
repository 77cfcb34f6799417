// Session: the operations that the ranks of a rail (bounded_all_reduce.h) execute over datagrams,
// one after the other, as seen by one rank. It is a state machine without sockets or clocks:
// Endpoint (endpoint.h) passes received packets and the time to it, and it sends packets through a
// Network. An operation goes through these states:
//
//   ready         Every rank sends kReady packets: it has begun the operation. Until all ranks are
//                 ready, a rank sends only a limited amount of early data
//                 (Transfer::kMaxEarlyBytes), which the others buffer if they have not begun. So
//                 the deadlines of a rank do not run while other ranks compute. Data sent after
//                 this state implies that all ranks are ready.
//   transferring  Parts are sent to owners, sums to all ranks (transfer.h), in bounded time.
//   agreeing      Every rank sends its record: a bitmap of the pieces of the result that it has. A
//                 rank that has all records is done. Pieces that any rank lacks are excluded.
//
// Why results cannot differ between ranks: the outcome depends on the records only. A record is
// signed and does not change once it has been sent, and each piece has a single sum, computed by
// its owner. So two ranks that finish an operation have the same outcome. A rank that lacks a
// record has no outcome; it waits, and fails the group at its deadline.
//
// Ready packets and records are sent as datagrams, repeatedly, until the other side is known to
// have them. If the state does not complete within ProtocolLimits::fallback_delay, they are also
// sent over the reliable transport, so that ranks agree even if no datagram arrives at all.
//
// A rank that is done still answers those that are not. No rank begins the next operation before
// all are done with the last but one, so that a rank keeps only two of its own records.
//
// Clocks: only forward steps of the time count, each with at most ProtocolLimits::max_clock_step.
// So a clock that jumps backward does not stop an operation, and one that jumps forward does not
// end it.
//
// One thread at a time calls.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "transfer.h"

namespace fsccl::datagram {

// Header of a record. It is followed by a bitmap of the pieces that the rank has.
struct RecordHeader {
  uint64_t operation = 0, digest = 0;
  RankReport report;
};

// Outcome of an operation. It is the same on all ranks, except for `missing_pieces` and
// `ready_wait`.
struct Outcome {
  Bitmap excluded;                  // pieces whose result is zero
  std::vector<RankReport> reports;  // by rank
  size_t missing_pieces = 0;        // pieces that this rank did not have
  Time ready_wait{};                // time until all ranks were ready
  double lost_share() const;        // share of packets that were lost, 0 to 1
  uint64_t overruns() const;        // RankReport::overruns of all ranks
  double excluded_share() const {   // share of pieces, 0 to 1
    return static_cast<double>(excluded.count()) / static_cast<double>(excluded.size());
  }
};

// One rank's end of the operations of a rail.
class Session {
 public:
  static constexpr int kMaxRanks = 64;

  Session(const Rail& rail, size_t payload, const ProtocolLimits& limits, Network& network);

  // Begins the next operation. The input is read until the operation is done or cancelled.
  void start(const AllReduceJob& job, Time now);
  // Handle what was received from rank `from`: a packet from its address, or a notice or record
  // over the reliable transport.
  void on_packet(int from, const std::byte* packet, size_t bytes, Time now);
  void on_notice(int from, const Notice& notice, Time now);
  void on_record(int from, const std::vector<std::byte>& record, Time now);
  // Does the work that is due. Returns the latest time at which it must be called again.
  Time step(Time now);

  bool is_done() const { return state_ == State::kDone; }
  // Returns whether there is data to send, now or when the rate allows it.
  bool sending() const { return transfer_.next_send_time(Time(0)) != Time::max(); }
  // Valid once an operation is done, until the next one starts.
  const Outcome& outcome() const { return outcome_; }
  std::byte* result() { return transfer_.result(); }
  const BucketLayout& layout() const { return transfer_.layout(); }
  // Cancels the session permanently: it does not answer peers any more.
  void cancel() { state_ = State::kCancelled; }

  uint64_t operation() const { return operation_; }
  size_t record_bytes() const {
    return sizeof(RecordHeader) + ceil_div<size_t>(layout().pieces(), 8);
  }
  // Returns whether this rank waits for another rank to be ready, or for its record.
  bool awaits(int rank) const;
  // Returns the first rank for which this rank waits, or -1.
  int awaited_rank() const;
  bool is_agreeing() const { return state_ == State::kAgreeing; }
  // Returns a rank that has called another operation, or -1. If there is one, the operation never
  // completes.
  int mismatched_rank() const { return mismatched_rank_; }
  // Calls send(rank, record) with this rank's last record, for all peers that are not known to have
  // it. Used by a rank that leaves.
  template <class F>
  void each_peer_without_record(F&& send) {
    if (state_ != State::kDone) return;
    each_peer([&](int r) {
      if (!peer(r).has_acknowledged_record) send(r, own_record(operation_));
    });
  }
  const DropCounters& drop_counters() const { return drop_counters_; }

 private:
  enum class State { kIdle, kReady, kTransferring, kAgreeing, kDone, kCancelled };
  // State of a peer in the current and the next operation.
  struct Peer {
    uint64_t ready_operation = 0;  // the last operation that it has begun
    uint64_t digest = 0;           // AllReduceJob::digest of that operation; 0: unknown
    // Over the reliable transport, it has requested this rank's ready notice for this operation,
    // which has yet to be sent; and this rank's record.
    uint64_t ready_notice_owed = 0;
    bool record_requested = false;
    bool has_acknowledged_record = false;  // it is known to have this rank's record
    Time last_answer{};                    // time of the last answer with this rank's record
    std::vector<std::byte> record;         // its record; `fragments` have been received
    Bitmap fragments;
    // Early data of the next operation, and the bytes of its payloads.
    std::vector<std::pair<Packet, std::vector<std::byte>>> early_packets;
    size_t early_bytes = 0;
  };
  using Bytes = std::vector<std::byte>;

  static constexpr size_t kFragmentBytes = 1024;  // of a record, per packet

  void advance_clock(Time now);
  void on_ready(int from, const Packet& p);
  void check_digest(int rank, uint64_t digest);
  void on_data(const Packet& p);
  void buffer_early(const Packet& p);
  void replay_early();
  void on_fragment(int from, const Packet& p);
  void resend_previous_record(int from, const Packet& p);
  void mark_all_ready();
  void start_transfer();
  void wait_for_ready();
  void finish_record();
  void exchange_records();
  void compute_outcome();
  void send_ready(int to);
  void send_fragments(int to, uint64_t operation, const Bytes& record);
  bool is_complete(uint64_t mask) const { return (mask | bit(rail_.rank)) == all_ranks_mask_; }
  static uint64_t bit(int rank) { return uint64_t{1} << rank; }
  // Masks of ranks, one bit each: those that are ready, and those whose whole record is here.
  uint64_t ready_mask() const;
  uint64_t complete_records_mask() const;
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  Bytes& own_record(uint64_t operation) { return records_[operation % 2]; }
  template <class F>
  void each_peer(F&& f) {
    for (int r = 0; r < rail_.ranks; ++r) {
      if (r != rail_.rank) f(r);
    }
  }

  const Rail rail_;
  const ProtocolLimits limits_;
  const uint64_t all_ranks_mask_;
  Network& network_;
  Transfer transfer_;
  State state_ = State::kIdle;
  uint64_t operation_ = 0, digest_ = 0;
  uint32_t overruns_ = 0;  // Network::overruns() at the start of this operation
  int mismatched_rank_ = -1;
  // Sum of the forward steps of the time, with which all deadlines are compared; last time passed
  // in.
  Time clock_{}, last_time_{};
  bool clock_started_ = false;
  // Start of this state; time of the next resend; time to use the reliable transport.
  Time state_start_{}, next_resend_{}, reliable_fallback_at_{};
  bool reliable_used_ = false;  // in this state
  std::vector<Peer> peers_;
  std::array<Bytes, 2> records_;  // this rank's records of the last two operations
  Outcome outcome_;
  DropCounters drop_counters_;
};

}  // namespace fsccl::datagram
