// Fingerprint of a collective operation. Ranks compare fingerprints, so that ranks that call
// different operations get an error that names both operations, and not garbage.
#pragma once

#include <string>

#include "types.h"

namespace fsccl {

// Layout in shared memory and on the wire.
struct CollectiveFingerprint {
  OpCode op = OpCode::kNone;
  DType dtype = DType::kOpaque;
  RedOp red = RedOp::kSum;
  int32_t root = -1;   // group rank
  uint64_t bytes = 0;  // size of the operation; 0 where it may differ between ranks (all_to_all)
  uint64_t sequence = 0;
  uint64_t layout = 0;  // layout_of() the parts of all ranks, where an operation takes a list
  bool operator==(const CollectiveFingerprint& other) const {
    return op == other.op && dtype == other.dtype && red == other.red && root == other.root &&
           bytes == other.bytes && sequence == other.sequence && layout == other.layout;
  }
  bool operator!=(const CollectiveFingerprint& other) const { return !(*this == other); }
  std::string text() const;
};
static_assert(sizeof(CollectiveFingerprint) == 32, "the layout on the wire");

// A rank with its name and its fingerprint.
struct RankFingerprint {
  int rank;
  const std::string& name;
  const CollectiveFingerprint& card;
};

// Returns the error that two ranks called different operations. The words do not depend on which
// rank detects it.
Error mismatch_error(const RankFingerprint& a, const RankFingerprint& b, int at_fault);
// Returns the message that a rank sends another size than its receiver expects.
std::string size_mismatch_text(const std::string& sender, uint64_t sent,
                               const std::string& receiver, uint64_t expected);

}  // namespace fsccl
