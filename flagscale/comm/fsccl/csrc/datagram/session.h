// Session: the operations that the ranks of a rail execute by datagrams, one after the other, as
// seen by one rank. It is a state machine: received packets and the time are passed in, packets go
// out through a Network.
//
//   ready      Every rank announces that it has begun, and sends no more than the first data until
//              all have (Transfer::kMaxLeadBytes, which a rank that has not begun buffers). So
//              there is room for the data of others, and no rank's time runs while others compute.
//              Later data announces that all are ready, too.
//   moving     Parts go to owners, sums to all ranks (transfer.h), in bounded time.
//   agreeing   Every rank announces, once and for good, which pieces of the result it has: its
//              record. A rank that has all records is done. Pieces that any rank lacks are
//              excluded.
//
// Why replicas cannot differ: the outcome is a function of all records and of nothing else. A
// record never changes once it has been shown to another rank, it is signed, and it says of a piece
// only that its single sum is there. So two ranks that finish an operation have the same outcome. A
// rank that lacks a record has none; it waits, and fails the group at its deadline.
//
// Ready announcements and records are sent by datagrams, repeatedly, until the other side is known
// to have them. If nothing arrives for ProtocolLimits::patience, they go over the reliable
// transport as well, so that ranks agree even where no datagram arrives at all.
//
// A rank that is done answers those that are not. No rank begins the next operation before all are
// done with the last but one, so that a rank keeps only two of its own records.
//
// Clocks: of the time that is passed in, only steps forward count, and of each at most
// ProtocolLimits::longest_step. A clock that jumps back stops nothing, and one that jumps forward
// ends nothing.
//
// The owner calls from one thread at a time.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "transfer.h"

namespace fsccl::datagram {

// Header of a record. Behind it is a bitmap of the pieces that the rank has.
struct RecordHeader {
  uint64_t operation = 0, digest = 0;
  RankReport report;
};

// Result of an operation. It is the same on all ranks, except for `missing_pieces` and
// `ready_wait`.
struct Outcome {
  Bitmap excluded;  // pieces, which are zero
  std::vector<RankReport> reports;
  size_t missing_pieces = 0;  // pieces that this rank did not have
  Time ready_wait{};          // time until all ranks were ready
  double lost_share() const;
  uint64_t overruns() const;
  double excluded_share() const {
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
  // A packet that was received from the address of rank `from`.
  void on_packet(int from, const std::byte* packet, size_t bytes, Time now);
  void on_notice(int from, const Notice& notice, Time now);
  void on_record(int from, const std::vector<std::byte>& record, Time now);
  // Does the work that is due, and returns the time at which to call it again at the latest.
  Time step(Time now);

  bool is_done() const { return state_ == State::kDone; }
  // Whether there is data to send, once the rate allows.
  bool sending() const { return transfer_.next_send_time(Time(0)) != Time::max(); }
  // Valid once an operation is done, until the next one starts.
  const Outcome& outcome() const { return outcome_; }
  std::byte* result() { return transfer_.result(); }
  const BucketLayout& layout() const { return transfer_.layout(); }
  // Cancels the session for good: peers get no answers any more.
  void cancel() { state_ = State::kCancelled; }

  uint64_t operation() const { return operation_; }
  size_t record_bytes() const {
    return sizeof(RecordHeader) + ceil_div<size_t>(layout().pieces(), 8);
  }
  // Returns whether this rank waits for the ready notice, or the record, of a rank; and the first
  // such rank, or -1.
  bool awaits(int rank) const;
  int awaited_rank() const;
  bool is_agreeing() const { return state_ == State::kAgreeing; }
  // A rank that has called another operation, or -1. The operation never completes then.
  int mismatched_rank() const { return mismatched_rank_; }
  // Calls send(rank, record) with this rank's last record, for all peers that are not known to have
  // it. For a rank that leaves.
  template <class F>
  void each_peer_without_record(F&& send) {
    if (state_ != State::kDone) return;
    each_peer([&](int r) {
      if (!peer(r).has_own_record) send(r, own_record(operation_));
    });
  }
  const DropCounters& drop_counters() const { return drop_counters_; }

 private:
  enum class State { kIdle, kReady, kMoving, kAgreeing, kDone, kCancelled };
  // State of a peer in the current and the next operation.
  struct Peer {
    uint64_t ready_operation = 0;  // the last operation that it has begun
    uint64_t digest = 0;           // its fingerprint; 0: unknown
    // Operation whose ready notice it has requested over the reliable transport.
    uint64_t ready_notice_owed = 0;
    bool record_requested =
        false;                    // it has requested this rank's record over the reliable transport
    bool has_own_record = false;  // it has this rank's record
    Time last_answer{};           // time of the last answer with a record
    std::vector<std::byte> record;
    Bitmap fragments;
    std::vector<std::pair<Packet, std::vector<std::byte>>> early;  // data of the next operation
    size_t early_bytes = 0;
  };
  using Bytes = std::vector<std::byte>;

  static constexpr size_t kFragmentBytes = 1024;

  void advance_clock(Time now);
  void on_ready(int from, const Packet& p);
  void check_digest(int rank, uint64_t digest);
  void on_data(const Packet& p);
  void buffer_early(const Packet& p);
  void replay_early();
  void on_fragment(int from, const Packet& p);
  void answer_previous(int from, const Packet& p);
  void mark_all_ready();
  void start_moving();
  void wait_for_ready();
  void finish_record();
  void exchange_records();
  void compute_outcome();
  void send_ready(int to);
  void send_fragments(int to, uint64_t operation, const Bytes& record);
  bool is_complete(uint64_t mask) const { return (mask | bit(rail_.rank)) == all_ranks_mask_; }
  static uint64_t bit(int rank) { return uint64_t{1} << rank; }
  uint64_t ready_mask() const;
  uint64_t known_mask() const;
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
  uint32_t overruns_ = 0;  // count at the start of this operation
  int mismatched_rank_ = -1;
  Time clock_{}, last_time_{};  // sum of forward steps; time of the last step
  bool clock_started_ = false;
  // Start of this state; time of the next resend; time to use the reliable transport.
  Time state_start_{}, next_resend_{}, reliable_fallback_at_{};
  bool reliable_used_ = false;  // in this state
  std::vector<Peer> peers_;
  std::array<Bytes, 2> records_;
  Outcome outcome_;
  DropCounters drop_counters_;
};

}  // namespace fsccl::datagram
