// What the ranks of one host, whatever their clusters, tell each other through shared memory:
// which operation they are in, whom they wait for, what failed; and the data of tiny operations.
//
// A rank writes a card when it calls an operation and compares it with those that the others have
// written for theirs of the same number: whoever comes later notices that they differ, and nobody
// waits for that.
//
// Tiny data: in step s every rank writes its own part of area s % 2, sets its word `posted` to s,
// and reads all parts once all words have reached s. Area s % 2 was last read in step s-2, by a
// rank before it set s-1, and nobody begins step s before all have set s-1: no part is overwritten
// while it is read.
#pragma once

#include <string>
#include <vector>

#include "../core/futex.h"
#include "../core/shm_steps.h"
#include "../core/segment.h"
#include "../core/verdict.h"

namespace fsccl {

class Board {
 public:
  static constexpr int kInNative = -2;  // a rank waits inside the native library
  static constexpr int kNobody = -1;

  static size_t segment_bytes(int ranks, size_t area_bytes);

  // `members`: group ranks on this host; `clusters`: all native clusters; `names` of all ranks.
  Board(Segment segment, int rank, std::vector<int> members, std::vector<std::vector<int>> clusters,
        std::vector<std::string> names, size_t area_bytes);

  bool has(int group_rank) const { return index_of(group_rank) >= 0; }
  const std::vector<int>& members() const { return members_; }
  std::byte* memory() const { return segment_.data(); }
  size_t bytes() const { return segment_.bytes(); }

  // Throws Error(kMismatch) when a rank's operation of the same number is another.
  void begin(const OpCard& card);
  // Whom this rank's thread waits for, or kInNative, or kNobody.
  void note(int waits_for);

  Word& posted(int group_rank) const;
  std::byte* area(uint32_t step) const;
  size_t area_bytes() const { return area_bytes_; }  // of all parts together

  Error abort(const Error& why);  // as ShmSteps::abort()
  void leave();
  bool complete() const;  // whether all members have mapped it
  // Throws when somebody aborted, or when a rank on this host has ended.
  void look() const;
  // Who holds up a rank that waits for `peer`.
  int culprit(int peer) const;

 private:
  struct Line;
  static constexpr size_t kCards = 16;

  Verdict& verdict() const;
  Line& line(int index) const;
  int index_of(int group_rank) const;
  int behind(int group_rank) const;

  Segment segment_;
  int rank_, index_;
  std::vector<int> members_;
  std::vector<std::vector<int>> clusters_;
  std::vector<std::string> names_;
  size_t area_bytes_;
};

}  // namespace fsccl
