// Control block: shared memory with the state of a group's ranks on one host, of all clusters
// (engine.h). It contains each rank's current operation and the rank for which it waits, the
// group's error, and the data of small operations.
//
// A rank publishes the fingerprint of an operation when it calls it, and compares it with those
// that other ranks have published under the same sequence number. So if two ranks call different
// operations, the later one detects it, and no rank waits for the comparison.
//
// Small data ("tiny") is exchanged in steps. In step s every rank writes its own part of area s %
// 2, sets its word `posted` to s, and reads all parts once all words have reached s. Area s % 2 was
// last read in step s-2, by each rank before it set s-1, and no rank begins step s before all have
// set s-1. So no part is overwritten while it is read.
#pragma once

#include <string>
#include <vector>

#include "../core/futex.h"
#include "../core/group_error.h"
#include "../core/segment.h"
#include "../core/shm_steps.h"

namespace fsccl {

// This rank's view of the block. publish() and set_waiting_for() are called by the thread that runs
// operations; check_peers(), abort() and find_stalled_rank() by any thread.
class SharedControlBlock {
 public:
  // Values for set_waiting_for() in addition to ranks:
  static constexpr int kInNativeLibrary = -2;  // the rank is in a call of its native library
  static constexpr int kNobody = -1;

  static size_t segment_bytes(int ranks, size_t area_bytes);

  // `members`: group ranks on this host. `clusters`: group ranks of every cluster. `names`: of all
  // ranks, for error messages. `area_bytes`: size of an area for small data of all members
  // together.
  SharedControlBlock(Segment segment, int rank, std::vector<int> members,
                     std::vector<std::vector<int>> clusters, std::vector<std::string> names,
                     size_t area_bytes);

  bool has_member(int group_rank) const { return index_of(group_rank) >= 0; }
  const std::vector<int>& members() const { return members_; }
  std::byte* memory() const { return segment_.data(); }
  size_t bytes() const { return segment_.bytes(); }

  // Throws Error(kMismatch) if a rank has published another operation under the same number.
  void publish(const CollectiveFingerprint& fingerprint);
  void set_waiting_for(int peer);

  // Small data: a rank's word, and the area of a step.
  Word& posted(int group_rank) const;
  std::byte* area(uint32_t step) const;
  size_t area_bytes() const { return area_bytes_; }

  // Records the error unless another rank of this host has recorded one, and wakes ranks that sleep
  // on words. Returns the recorded error.
  Error abort(const Error& error);
  void leave();
  // Returns whether all members have mapped the block.
  bool all_joined() const;
  bool has_joined(int group_rank) const;  // whether it has mapped the block
  bool has_left(int group_rank) const;    // whether it has called leave()
  // Throws if an error is recorded, or a rank of this host has ended without leave().
  void check_peers() const;
  // Returns the rank that delays a rank that waits for `peer`: follows the chain of ranks that wait
  // for each other, as far as their states are in this block.
  int find_stalled_rank(int peer) const;

 private:
  struct RankState;
  static constexpr size_t kFingerprints =
      16;  // number of latest operations whose fingerprint is kept

  GroupError& group_error() const;
  RankState& state_of(int index) const;
  int index_of(int group_rank) const;
  int find_late_member(int group_rank) const;

  Segment segment_;
  int rank_, index_;
  std::vector<int> members_;
  std::vector<std::vector<int>> clusters_;
  std::vector<std::string> names_;
  size_t area_bytes_;
};

}  // namespace fsccl
