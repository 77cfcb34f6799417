// The step protocol, by which the ranks of one node exchange data through a shared segment.
//
// Every collective is a sequence of steps, and all ranks of the node take the same steps. A slot is
// a buffer of ShmConfig::slot_bytes. Rank r has two slots, used in turn, and a counter `posted`. In
// step s, rank r
//
//   1. acquire_slot():    waits until every posted >= s-1, then writes slot s%2;
//   2. post():            stores s in its posted (release);
//   3. wait_for_peer(p):  waits until posted of p >= s (acquire), then reads slot s%2 of p.
//
// No slot is overwritten while a peer reads it: a rank posts s-1 only after it has read all data
// that it needs from step s-2, and acquire_slot() of step s waits until all ranks have posted s-1.
// The data of step s-1 is in the other slot. Counters only grow and are never reset, so that
// nothing must be cleaned up between operations or after an error. They are compared by signed
// difference, so that they may wrap around at 2^32.
//
// A slot starts with the fingerprint of the operation (collective_fingerprint.h), which a reader
// compares with its own. A step need not read the slots of all ranks: acquire_slot() of step s
// checks those fingerprints of step s-1 that have not been checked yet; they stay in place until
// this rank posts s.
//
// Waiting: a rank spins, then yields, then sleeps on the futex of the awaited counter. `sleepers`
// counts the ranks that sleep on a counter, so that post() needs no system call if there are none.
// Both sides use sequentially consistent operations: either the posting rank observes the sleeper,
// or the sleeper observes the post. A sleeping rank wakes up ten times a second to check the error
// of the group, whether all processes of the node are alive (not only the awaited one), and its
// deadline. A rank that has ended is no failure if it has finished the operation, or has posted the
// awaited step.
//
// `awaited_rank` of a rank is the rank that it waits for. A rank that times out follows it from
// rank to rank until it finds one that waits for no other: the straggler, which the error names.
//
// Unless noted otherwise, one thread at a time calls.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "futex.h"
#include "collective_fingerprint.h"
#include "segment.h"
#include "types.h"
#include "group_error.h"

namespace fsccl {

// Parameters of ShmSteps, equal on all ranks of the node.
struct ShmConfig {
  std::vector<int> members;        // group rank of every local rank
  std::vector<std::string> names;  // of every rank of the group, for messages
  size_t slot_bytes = 0;           // size of a slot, without the fingerprint
  uint64_t process_id = 0;         // the same for ranks that are threads of one process
  SpinPolicy spin;
  uint32_t first_step = 0;  // the same on all ranks; tests set it near 2^32
  // Returns whether the process of a group rank is running. Used for ranks that have not mapped the
  // segment yet.
  std::function<bool(int)> is_running = [](int) { return true; };
};

// One rank's end of the step protocol.
class ShmSteps {
 public:
  static size_t segment_bytes(int ranks, size_t slot_bytes);
  // Bytes that the creator, local rank 0, reserves: the shared header and its own slots.
  static size_t creator_reserved_bytes(int ranks, size_t slot_bytes);
  // Returns a slot size that keeps small groups fast and the segment of a large node at a few tens
  // of MiB.
  static size_t default_slot_bytes(int ranks);

  ShmSteps(Segment segment, int rank, ShmConfig config);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(config_.members.size()); }
  int group_rank_of(int local_rank) const {
    return config_.members[static_cast<size_t>(local_rank)];
  }
  const std::string& name_of(int local_rank) const { return name(group_rank_of(local_rank)); }
  size_t capacity() const { return config_.slot_bytes; }  // bytes of data per slot

  // Begins an operation, whose steps compare this fingerprint and end at this deadline.
  void begin(const CollectiveFingerprint& fingerprint, const Deadline& deadline);
  void end();  // ends the operation: from now on this rank may leave without failing it
  const CollectiveFingerprint& fingerprint() const { return fingerprint_; }
  const Deadline& deadline() const { return deadline_; }
  // The functions of a step, see above.
  std::byte* acquire_slot();
  void post();
  const std::byte* wait_for_peer(int peer);
  void wait_for_all_peers();
  uint32_t posted() const;  // steps so far; any thread may call

  // For waits outside steps (channels.h). check_peers() throws if the group has failed, if local
  // rank `awaited_peer` (-1: none) has ended before has_arrived() is true, or if another rank has
  // ended before it finished this operation. throw_if_timed_out() throws after the deadline.
  void check_peers(int awaited_peer, const std::function<bool()>& has_arrived) const;
  void throw_if_timed_out(int group_rank_at_fault) const;
  std::chrono::milliseconds sleep_interval() const;
  const SpinPolicy& spin() const { return config_.spin; }
  int local_rank_of(int group_rank) const;  // -1 if it is not on this node

  // Sets a function that a sleeping rank calls ten times a second. It may throw to end the wait.
  void set_wait_callback(std::function<void()> callback) { wait_callback_ = std::move(callback); }

  // Records the first error, and returns it. All ranks that wait, now or later, throw it. Any
  // thread may call.
  Error abort(const Error& error);
  void throw_if_aborted() const;
  bool has_joined(int local_rank) const;  // whether a rank has mapped the segment
  bool all_joined() const;
  // Marks this rank as having left the group. Does not wait. With `retain_segment`, ranks that have
  // yet to map the segment can do so as long as this process runs.
  void leave(bool retain_segment);
  // Returns the straggler: the rank that this rank waits for, or the one that its node peer waits
  // for, and so on; -1 if this rank does not wait. Any thread may call.
  int awaited_rank() const;
  // Sets a function that continues the search for the straggler on other nodes. It receives the
  // first rank of another node in the chain of awaited ranks and returns the straggler.
  void set_straggler_query(std::function<int(int)> query) { straggler_query_ = std::move(query); }
  // Records the rank outside this node that the thread of this rank waits for, or -1.
  void set_awaited_rank(int group_rank);

 private:
  struct RankState;

  static size_t head_bytes(int ranks);
  static size_t slots_bytes(size_t slot_bytes);  // both slots of a rank
  void reserve_slots();
  void check_fingerprint(int peer, const CollectiveFingerprint& expected);

  GroupError& group_error() const;
  RankState& rank_state(int local_rank) const;
  std::byte* slot(int local_rank, uint32_t step) const;
  void wait_posted(int peer, uint32_t step);
  void sleep_until(int peer, uint32_t step);
  void check_peers_and_deadline(int peer, uint32_t step);
  const char* exit_reason(int peer) const;  // a suffix for messages, null if the rank is alive
  int find_straggler(int peer) const;
  const std::string& name(int group_rank) const {
    return config_.names[static_cast<size_t>(group_rank)];
  }

  Segment segment_;
  int rank_;
  ShmConfig config_;
  std::byte* slots_ = nullptr;  // of local rank 0
  size_t rank_stride_ = 0;      // bytes of both slots of a rank
  uint32_t step_ = 0;           // last step that this rank has posted
  // Of this operation, and of the last posted step.
  CollectiveFingerprint fingerprint_, posted_fingerprint_;
  // By local rank: the last step whose fingerprint was checked.
  std::vector<uint32_t> checked_step_;
  Deadline deadline_ = Deadline::after(Deadline::Ms(0));
  std::function<void()> wait_callback_;
  std::function<int(int)> straggler_query_;
};

}  // namespace fsccl
