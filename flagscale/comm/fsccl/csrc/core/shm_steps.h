// The step protocol by which the ranks of one host exchange data through a shared segment.
//
// Every collective is a sequence of steps, and all ranks of the host take the same steps. Rank r
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
// A slot starts with the operation's card (op_card.h), which a reader compares with its own. A step
// need not read everyone's slot: fill() of step s looks at the cards of step s-1 that nobody has
// looked at, which stay until this rank posts s.
//
// Waiting: a few looks, then a futex on the awaited counter. `sleepers` lets the common case, in
// which nobody sleeps, post without a system call; both sides use sequentially consistent
// operations, so that either the poster sees the sleeper or the sleeper sees the post. A sleeper
// wakes ten times a second to look at the abort word, at whether all processes still live, not the
// awaited one alone, and at its deadline. One that has gone is no failure yet if it has `finished`
// the operation, or posted what is awaited of it. `waits_for` says whom a rank waits for: whoever
// times out follows it to the rank that waits for nobody, and names that one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "futex.h"
#include "op_card.h"
#include "segment.h"
#include "types.h"
#include "verdict.h"

namespace fsccl {

struct ShmConfig {
  std::vector<int> members;        // group rank of every local rank
  std::vector<std::string> names;  // of every rank of the group, for messages
  size_t slot_bytes = 0;           // payload of a slot
  uint64_t process = 0;            // the same in all ranks that are threads of one process
  SpinPolicy spin;
  uint32_t first_step = 0;  // the same on all ranks, to see counters begin again
  // Whether a group rank's process runs, of one that has not mapped the segment yet.
  std::function<bool(int)> runs = [](int) { return true; };
};

class ShmSteps {
 public:
  static size_t segment_bytes(int ranks, size_t slot_bytes);
  // Of these what the maker reserves, who is the first rank: what all write to, and its own slots.
  static size_t first_bytes(int ranks, size_t slot_bytes);
  // A slot size that keeps small groups fast and large hosts within a few tens of MiB.
  static size_t default_slot_bytes(int ranks);

  ShmSteps(Segment segment, int rank, ShmConfig config);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(config_.members.size()); }
  int member(int local_rank) const { return config_.members[static_cast<size_t>(local_rank)]; }
  const std::string& name_of(int local_rank) const { return name(member(local_rank)); }
  size_t capacity() const { return config_.slot_bytes; }

  void begin(const OpCard& card, const Deadline& deadline);
  void end();  // of the operation: what others do now they do without this rank
  const OpCard& card() const { return card_; }
  const Deadline& deadline() const { return deadline_; }
  std::byte* fill();
  void post();
  const std::byte* await(int peer);
  void await_all();
  uint32_t posted() const;  // steps so far; any thread may call

  // For waits beside the steps (channels.h). look_at() throws when the group has failed, when the
  // local rank `peer` (-1: nobody's) has gone and what it was to do has not `come`, or another has
  // in the middle of this operation or before it; give_up() when the time is over.
  void look_at(int peer, const std::function<bool()>& come) const;
  void give_up(int group_rank_at_fault) const;
  std::chrono::milliseconds nap() const;
  const SpinPolicy& spin() const { return config_.spin; }
  int local_rank_of(int group_rank) const;  // -1 when it is not on this host

  // Called by a sleeper now and then; throws to end the wait.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }

  // The first failure wins, and is returned; everybody who waits, now or later, throws it. Any
  // thread may call.
  Error abort(const Error& why);
  void throw_if_aborted() const;
  bool complete() const;  // whether all members have mapped it
  // Tells the others that this rank goes in good order. Waits for nobody: where it is `kept`, those
  // that have yet to map the segment can, for as long as this process lives.
  void leave(bool kept);
  // Whom this rank waits for, or whom its mate does that it waits for, and so on; -1 when it does
  // not wait. Any thread may call.
  int awaited() const;
  // How to ask ranks the same, where there are others than on this host: `trace` gets the first of
  // them, and gives the one that waits for nobody.
  void set_trace(std::function<int(int)> trace) { trace_ = std::move(trace); }
  // What this rank's thread waits for outside this host: a group rank, or -1. For waits_for chains.
  void note_wait(int group_rank);

 private:
  struct Line;

  static size_t head_bytes(int ranks);
  static size_t slots_bytes(size_t slot_bytes);  // both slots of a rank
  void reserve_slots();
  void compare_card(int peer, const OpCard& mine);

  Verdict& verdict() const;
  Line& line(int local_rank) const;
  std::byte* slot(int local_rank, uint32_t step) const;
  void wait_posted(int peer, uint32_t step);
  void sleep_until(int peer, uint32_t step);
  void look_around(int peer, uint32_t step);
  const char* gone(int peer) const;  // how, null when it is not
  int culprit(int peer) const;
  const std::string& name(int group_rank) const {
    return config_.names[static_cast<size_t>(group_rank)];
  }

  Segment segment_;
  int rank_;
  ShmConfig config_;
  std::byte* slots_ = nullptr;  // of the first rank
  size_t each_ = 0;             // bytes of a rank's slots
  uint32_t step_ = 0;
  OpCard card_, posted_card_;       // of this operation; of the last step
  std::vector<uint32_t> compared_;  // the last step whose card was, of every rank
  Deadline deadline_ = Deadline::after(Deadline::Ms(0));
  std::function<void()> watch_;
  std::function<int(int)> trace_;
};

}  // namespace fsccl
