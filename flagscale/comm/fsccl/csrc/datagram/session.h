// A rank's end of the operations that a ring of ranks does by datagrams, one after the other. A
// state machine: what came and what time it is are handed in, what goes out goes to a Network.
//
//   ready      everyone says that it has begun, and sends no more than the first data until all have
//              (Transfer::kMostLead, which who has not begun keeps until then). So what others send
//              has its place, and nobody's time runs while others compute. Later data say that all
//              are ready as well.
//   moving     parts to owners, sums to all (transfer.h), in bounded time.
//   agreeing   everyone says which pieces of the result it has, once and for good: its record.
//              Whoever has all records is done. What any rank lacks is excluded.
//
// Why replicas cannot differ: the outcome is a function of all records, and of nothing else; a
// record never changes once it has been shown to anyone, it is signed, and it says of a piece only
// that its one sum is there. So two ranks that finish an operation have the same outcome; one that
// lacks a record has none, waits, and fails the group when its time is over.
//
// Ready and records go by datagrams again and again until the other side is seen to have them.
// Where nothing comes for Limits::patience they go over the reliable way too: where no datagram
// arrives at all, ranks still agree on that.
//
// A rank that is done answers those that are not. Since none begins the next operation before all
// are done with the last but one, two records of its own are all that it keeps.
//
// Clocks: of the time that is handed in only the steps forward count, and no more of each than
// Limits::longest_step. One that jumps back stops nothing, one that jumps forward ends nothing.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "transfer.h"

namespace fsccl::datagram {

// Before the pieces that a rank has, a bit each, in its record.
struct RecordHead {
  uint64_t operation = 0, digest = 0;
  Report report;
};

// The same on all ranks but for `lacked` and `waited`.
struct Outcome {
  Bits excluded;  // pieces, which are zero
  std::vector<Report> reports;
  size_t lacked = 0;  // pieces that this rank lacked
  Time waited{};      // for the others to be ready
  double lost_share() const;
  uint64_t overruns() const;
  double excluded_share() const {
    return static_cast<double>(excluded.count()) / static_cast<double>(excluded.size());
  }
};

class Session {
 public:
  static constexpr int kMostRanks = 64;

  Session(const Circle& circle, size_t payload, const Limits& limits, Network& net);

  // Begins the next operation. Its memory is read until it is over, or cancelled.
  void start(const Job& job, Time now);
  // From where rank `from` is.
  void on_packet(int from, const std::byte* packet, size_t bytes, Time now);
  void on_notice(int from, const Notice& notice, Time now);
  void on_record(int from, const std::vector<std::byte>& record, Time now);
  // Does what is due, and gives the time at which to call it again at the latest.
  Time step(Time now);

  bool done() const { return state_ == State::kDone; }
  // Whether it has data to send, when the rate allows.
  bool sending() const { return transfer_.next(Time(0)) != Time::max(); }
  // Of an operation that is done, until the next is started.
  const Outcome& outcome() const { return outcome_; }
  std::byte* result() { return transfer_.result(); }
  const Layout& layout() const { return transfer_.layout(); }
  // Gives up for good: nobody is answered any more.
  void cancel() { state_ = State::kCancelled; }

  uint64_t operation() const { return operation_; }
  size_t record_bytes() const { return sizeof(RecordHead) + ceil_div<size_t>(layout().pieces(), 8); }
  // Whether this rank waits for that one's notice, or record; and the first such, or -1.
  bool awaits(int rank) const;
  int awaited() const;
  bool agreeing() const { return state_ == State::kAgreeing; }
  // A rank that has called another operation; -1: none. It will never be done then.
  int unlike() const { return unlike_; }
  // What a rank that leaves must say, to whom: this rank's last record, to those not seen to have it.
  template <class F>
  void last_words(F&& say) {
    if (state_ != State::kDone) return;
    others([&](int r) {
      if (!peer(r).has_mine) say(r, own_record(operation_));
    });
  }
  const Dropped& dropped() const { return dropped_; }

 private:
  enum class State { kIdle, kReady, kMoving, kAgreeing, kDone, kCancelled };
  struct Peer {
    uint64_t ready = 0;          // the last operation that it has begun
    uint64_t digest = 0;         // and what it is; 0: not known
    uint64_t owed = 0;           // an operation of which it wants to hear over the reliable way
    bool asked = false;          // for this rank's record, over the reliable way
    bool has_mine = false;       // record
    Time answered{};             // with a record
    std::vector<std::byte> record;
    Bits fragments;
    std::vector<std::pair<Packet, std::vector<std::byte>>> early;  // data of the next operation
    size_t early_bytes = 0;
  };
  using Bytes = std::vector<std::byte>;

  static constexpr size_t kFragment = 1024;

  void advance(Time now);
  void on_ready(int from, const Packet& p);
  void compare(int rank, uint64_t digest);
  void on_data(const Packet& p);
  void keep_early(const Packet& p);
  void take_early();
  void on_fragment(int from, const Packet& p);
  void answer_behind(int from, const Packet& p);
  void all_are_ready();
  void go();
  void wait_for_ready();
  void finish_record();
  void agree();
  void conclude();
  void say_ready(int to);
  void say_record(int to, uint64_t operation, const Bytes& record);
  bool all(uint64_t mask) const { return (mask | bit(circle_.rank)) == everyone_; }
  static uint64_t bit(int rank) { return uint64_t{1} << rank; }
  uint64_t ready_mask() const;
  uint64_t known_mask() const;
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  Bytes& own_record(uint64_t operation) { return records_[operation % 2]; }
  template <class F>
  void others(F&& call) {
    for (int r = 0; r < circle_.ranks; ++r) {
      if (r != circle_.rank) call(r);
    }
  }

  const Circle circle_;
  const Limits limits_;
  const uint64_t everyone_;
  Network& net_;
  Transfer transfer_;
  State state_ = State::kIdle;
  uint64_t operation_ = 0, digest_ = 0;
  uint32_t overruns_ = 0;  // until this operation
  int unlike_ = -1;
  Time clock_{}, last_{};  // steps forward so far; and the time at the last one
  bool started_ = false;
  Time began_{}, again_{}, reliable_{};  // this state; when to repeat, when to turn to the reliable
  bool turned_ = false;                  // which it has
  std::vector<Peer> peers_;
  std::array<Bytes, 2> records_;
  Outcome outcome_;
  Dropped dropped_;
};

}  // namespace fsccl::datagram
