// The step protocol by which the ranks of one host exchange data through a shared segment.
//
// Every collective is a sequence of steps, and all ranks of the lane take the same steps. Rank r
// has two slots, used in turn, and a counter `posted`. In step s rank r
//
//   1. fill():    waits until every posted >= s-1, then writes slot s%2;
//   2. post():    stores s in its posted (release);
//   3. await(p):  waits until posted of p >= s (acquire), then reads p's slot s%2.
//
// Why no slot is overwritten while it is read: a rank posts s-1 only after it has read all it
// wanted of step s-2, and fill() of step s waits for exactly that; step s-1 lies in the other slot.
// Counters only grow (compared by signed difference, so 2^32 may wrap) and are never reset: nothing
// has to be cleaned up between operations or after an error.
//
// A slot starts with the operation's card. A reader compares it with its own, so that ranks that
// call different operations get an error that names both, and not garbage.
//
// Waiting: a few looks, then a futex on the awaited counter. `sleepers` lets the common case, in
// which nobody sleeps, post without a system call; both sides use sequentially consistent
// operations, so that either the poster sees the sleeper or the sleeper sees the post. A sleeper
// wakes ten times a second to look at the abort word, at whether the awaited process still lives,
// and at its deadline. `waits_for` says whom a rank waits for: whoever times out follows it to
// the rank that waits for nobody, and names that one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "futex.h"
#include "segment.h"
#include "types.h"

namespace fsccl {

struct OpCard {
  OpCode op = OpCode::kNone;
  DType dtype = DType::kOpaque;
  RedOp red = RedOp::kSum;
  int32_t root = -1;   // group rank
  uint64_t bytes = 0;  // 0 where ranks may differ (all_to_all)
  uint64_t sequence = 0;
  uint64_t layout = 0;  // of lists: layout_of() the ranks' parts
  bool operator==(const OpCard& o) const {
    return op == o.op && dtype == o.dtype && red == o.red && root == o.root && bytes == o.bytes &&
           sequence == o.sequence && layout == o.layout;
  }
  std::string text() const;
  // For where a card does not fit. The sequence is not in it.
  uint32_t digest() const;
};

// What is said when a rank's card is not this rank's.
std::string unlike(const std::string& them, const OpCard& theirs, const std::string& me,
                   const OpCard& mine);

struct LaneConfig {
  std::vector<int> members;        // group rank of every lane rank
  std::vector<std::string> names;  // of every rank of the group, for messages
  size_t slot_bytes = 0;           // payload of a slot
  uint64_t process = 0;            // the same in all ranks that are threads of one process
  SpinPolicy spin;
};

class Lane {
 public:
  static size_t segment_bytes(int ranks, size_t slot_bytes);
  // Of these what the maker reserves, who is the first rank: what all write to, and its own slots.
  static size_t first_bytes(int ranks, size_t slot_bytes);
  // A slot size that keeps small groups fast and large hosts within a few tens of MiB.
  static size_t default_slot_bytes(int ranks);

  Lane(Segment segment, int rank, LaneConfig config);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(config_.members.size()); }
  int member(int lane_rank) const { return config_.members[static_cast<size_t>(lane_rank)]; }
  const std::string& name_of(int lane_rank) const { return name(member(lane_rank)); }
  size_t capacity() const { return config_.slot_bytes; }

  void begin(const OpCard& card, const Deadline& deadline);
  const OpCard& card() const { return card_; }
  const Deadline& deadline() const { return deadline_; }
  std::byte* fill();
  void post();
  const std::byte* await(int peer);
  void await_all();

  // For waits beside the steps (channels.h). look_at() throws when the group has failed, or the
  // lane rank `peer` (-1: nobody's) has gone and what it was to do has not `come`; give_up() when
  // the time is over.
  void look_at(int peer, const std::function<bool()>& come) const;
  void give_up(int group_rank_at_fault) const;
  std::chrono::milliseconds nap() const;
  const SpinPolicy& spin() const { return config_.spin; }
  int lane_rank_of(int group_rank) const;  // -1 when it is not in the lane

  // Called by a sleeper now and then; throws to end the wait.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }

  // The first failure wins; everybody who waits, now or later, throws it. Any thread may call.
  void abort(int group_rank_at_fault, const std::string& why);
  void throw_if_aborted() const;
  bool complete() const;  // whether all members have mapped it
  // Tells the others that this rank goes in good order. Waits for nobody.
  void leave();
  // Whom this rank waits for, or whom its mate does that it waits for, and so on; -1 when it does
  // not wait. Any thread may call.
  int awaited() const;
  // How to ask ranks the same, where there are others than in the lane: `trace` gets the first of
  // them, and gives the one that waits for nobody.
  void set_trace(std::function<int(int)> trace) { trace_ = std::move(trace); }
  // What this rank's thread waits for outside the lane: a group rank, or -1. For waits_for chains.
  void note_wait(int group_rank);

 private:
  struct Header;
  struct Line;

  static size_t head_bytes(int ranks);
  static size_t slots_bytes(size_t slot_bytes);  // both slots of a rank
  void reserve_slots();

  Header& header() const;
  Line& line(int lane_rank) const;
  std::byte* slot(int lane_rank, uint32_t step) const;
  void wait_posted(int peer, uint32_t step);
  void sleep_until(int peer, uint32_t step);
  void look_around(int peer, uint32_t step);
  int culprit(int peer) const;
  const std::string& name(int group_rank) const {
    return config_.names[static_cast<size_t>(group_rank)];
  }

  Segment segment_;
  int rank_;
  LaneConfig config_;
  std::byte* slots_ = nullptr;  // of the first rank
  size_t each_ = 0;             // bytes of a rank's slots
  uint32_t step_ = 0;
  OpCard card_;
  Deadline deadline_ = Deadline::after(Deadline::Ms(0));
  std::function<void()> watch_;
  std::function<int(int)> trace_;
};

}  // namespace fsccl
