// The data of one all_reduce by datagrams: every rank sends each shard of its bucket to the shard's
// owner, owners add up what came, and send the sums to all. Nothing here waits, looks at a clock or
// knows a socket: time and the network are handed in.
//
//   leading    a little is sent before all are known to be ready: it travels while they say so
//   sending    at a rate, in turns to all, a run of packets each; parts first, then those that have
//              been asked for again, then sums in the order in which they became complete, then sums
//              again. All that is sent says whether all parts, or sums, have been sent before it;
//              where there is nothing else to send, marks say so, and which demands have been
//              answered. How long runs are is for runs.h to say.
//   asking     a stream (of one rank's parts, or sums) that is said to have been sent, or whose time
//              is nearly over, is asked for what lacks; and again when that is said to have been
//              answered, or a while later, Limits::repairs times in all. Who asks says how many
//              ranks it asks, which send so many times slower, or they would drown its link
//   adding up  a piece at once when everyone's part of it is there, and when the phase's time is
//              over, or nobody has anything left to send again, from the parts that are there,
//              scaled by ranks ÷ parts
//
// 16-bit floats are added in fp32 and rounded once, in the order of ranks (core/reduce.h), by the
// owner alone: all ranks that get a piece get the same bits.
#pragma once

#include <chrono>
#include <deque>
#include <vector>

#include "../core/types.h"
#include "layout.h"
#include "packet.h"

namespace fsccl::datagram {

using Time = std::chrono::nanoseconds;

// Between two ranks, where a reliable network carries it (session.h).
struct Notice {
  enum Kind : uint32_t { kReady = 1, kAsk = 2 };
  uint32_t kind = kReady;
  uint32_t wants_answer = 0;
  uint64_t operation = 0;
};

class Network {
 public:
  virtual ~Network() = default;
  // Where the next packet is to be made, of so many bytes at most; and sends what is there. It may be
  // lost, doubled, overtaken, late.
  virtual std::byte* place(size_t most) = 0;
  virtual void send(int to, size_t bytes) = 0;
  // How often something came for which this host had no room. It only grows, modulo 2^32.
  virtual uint32_t overruns() const = 0;
  // Reliable and slow: used where datagrams do not come.
  virtual void tell(int to, const Notice& notice) = 0;
  virtual void tell_record(int to, const std::vector<std::byte>& record) = 0;
};

struct Limits {
  Time resend = std::chrono::milliseconds(4);     // of ready and records; between wants
  Time reorder = std::chrono::milliseconds(1);    // how far packets overtake each other
  Time patience = std::chrono::milliseconds(60);  // with datagrams, before the reliable way
  Time longest_step = std::chrono::milliseconds(100);  // a clock that goes on by more has jumped
  uint32_t repairs = 10;
};

struct Job {
  const std::byte* in = nullptr;
  uint64_t digest = 0;  // of what the operation is, for ranks to compare
  size_t bytes = 0;
  Reduction how;     // of all ranks' parts: SUM or AVG of floats
  Time phase{};      // until when parts are waited for
  Time end{};        // and sums
  Time early{};      // after the last repair, before what lacks is given up
  double rate = 0;   // bytes a second
  int halvings = 0;  // of a burst, for the run of packets that goes to one rank
};

// What a rank tells the others of an operation.
struct Report {
  uint32_t expected = 0;    // packets that come to it, and as many that it sends
  uint32_t lost = 0;        // that it has sent and that were asked for again
  uint32_t scaled = 0;      // pieces of its shard that lack somebody's part
  uint32_t elapsed_us = 0;  // until nothing lacked, or it was given up; what it led with as well
  uint64_t overruns = 0;    // packets, or runs of them, for which this host had no room
};

class Transfer {
 public:
  static constexpr size_t kMostLead = 1 << 20;  // bytes to all ranks

  // `payload` is the most that a packet holds beside its header.
  Transfer(const Circle& circle, size_t payload, const Limits& limits);

  // Begins to lead.
  void begin(const Job& job, uint64_t operation, Time now);
  // All are ready. Its time begins with the first that comes of others, or a while later: they may
  // not have heard yet that all are ready.
  void go(Time now) {
    if (!may_send()) sent_ = now;  // while it waited nothing was saved up
    went_ = began_ = marked_ = now;
    moving_ = true;
    heard_ = false;
  }
  bool moving() const { return moving_; }
  void end() { moving_ = false, lead_ = 0; }

  // kPart, kSum and the wants of this operation.
  void take(const Packet& p, Time now, Dropped* dropped);
  void look(Time now, Network& net);
  // Sends what the rate allows.
  void pump(Time now, Network& net);
  // When to call pump() again, for there is something to send; never: Time::max().
  Time next(Time now) const;
  // Whether nothing more will come.
  bool over(Time now) const;

  const Layout& layout() const { return layout_; }
  const Bits& have() const { return have_; }  // of the sums of all shards
  Report report(Time now) const;
  std::byte* result() { return result_.data(); }

 private:
  struct Stream {
    size_t lacks = 0;
    bool sent = false;  // as its sender says
    uint32_t wants = 0, answered = 0;  // how often it was asked for; and the last that was answered
    Time said{}, wanted{};             // when its sender said the last of both
  };
  struct Asked {  // of this rank, by another: how often
    uint32_t parts = 0, sums = 0;
  };
  struct Out {
    int to;
    Kind kind;
    size_t piece;
    int beside = 1;  // ranks that send to this one now as well: they share its link
  };

  void take_part(const Packet& p, Dropped* dropped);
  void take_sum(const Packet& p, Dropped* dropped);
  void take_wants(const Packet& p, Dropped* dropped);
  void note(Stream* stream, bool sent, uint32_t answered, Time now);
  void want(std::vector<Stream>* streams, int from, Kind kind, Time until, Time now, Network& net);
  bool given_up(const std::vector<Stream>& streams, int rank, Time now) const;
  Time pause(const std::vector<Stream>& streams) const;
  void add_up(size_t piece);
  uint8_t flags() const;
  void say_marks(Time now, Network& net);
  bool may_send() const { return moving_ || led_ < lead_; }
  bool next(Out* out);
  bool next_again(std::deque<Out>* from, Out* out);
  bool next_part(Out* out);
  bool next_sum(Out* out);
  bool part_sent(int to, size_t index) const;
  bool sum_sent(int to, size_t index) const;
  int turn_of(int rank) const { return (rank - circle_.rank + circle_.ranks) % circle_.ranks; }
  size_t packet() const { return sizeof(Wire) + payload_; }
  double burst() const { return static_cast<double>(burst_ * packet()); }
  bool parts_out() const { return at_ >= layout_.shard(0).size(); }  // no shard is longer
  void send(const Out& out, Network& net);
  Stream& parts_of(int rank) { return parts_[static_cast<size_t>(rank)]; }
  Stream& sums_of(int rank) { return sums_[static_cast<size_t>(rank)]; }

  const Circle circle_;
  const size_t payload_;
  const Limits limits_;
  Job job_;
  uint64_t operation_ = 0;
  Layout layout_;
  bool moving_ = false, heard_ = false;
  Time went_{}, began_{}, sent_{}, marked_{};
  Interval mine_;  // this rank's shard, of pieces

  std::vector<std::byte> parts_in_;  // of my shard: every rank's, one after the other
  std::vector<std::byte> result_;
  std::vector<Bits> got_;  // of my shard, by rank
  std::vector<int> came_;  // parts of a piece of my shard, my own included
  Bits summed_, have_;
  std::vector<Stream> parts_, sums_;
  size_t lost_ = 0, scaled_ = 0, expected_ = 0;

  // What has been sent: parts to all ranks in turns, sums in the order they were made. A turn is a
  // run of pieces to one rank; a burst, of one run or more, is what goes at once.
  size_t burst_ = 1, run_ = 1;
  int turn_ = 1;
  size_t at_ = 0, in_run_ = 0;  // of the shards: where all turns of this run begin; how far this is
  std::vector<size_t> order_, where_;  // sums, and of each piece of my shard its place among them
  size_t sum_at_ = 0, sum_run_ = 0, sum_in_run_ = 0;
  int sum_turn_ = 1;
  std::deque<Out> parts_again_, sums_again_;
  std::vector<Asked> asked_;
  double credit_ = 0, lead_ = 0, led_ = 0;  // bytes: to lead with, at most; and so far
};

}  // namespace fsccl::datagram
