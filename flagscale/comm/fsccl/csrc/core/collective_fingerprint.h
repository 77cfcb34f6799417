// Fingerprint of a collective operation. Ranks compare fingerprints: if they call different
// operations, they get an error that names both, instead of wrong data.
#pragma once

#include <string>

#include "types.h"

namespace fsccl {

// Fingerprint of one call on one rank. The fields are laid out as in shared memory and on the wire.
struct CollectiveFingerprint {
  OpCode op = OpCode::kNone;
  DType dtype = DType::kOpaque;
  RedOp red_op = RedOp::kSum;
  int32_t root = -1;      // group rank
  uint64_t bytes = 0;     // size of the operation; 0 where it may differ between ranks (all_to_all)
  uint64_t sequence = 0;  // number of the operation in its group
  uint64_t sizes_hash = 0;  // hash_of_sizes() of the list of parts, if the operation takes a list
  bool operator==(const CollectiveFingerprint& other) const {
    return op == other.op && dtype == other.dtype && red_op == other.red_op && root == other.root &&
           bytes == other.bytes && sequence == other.sequence && sizes_hash == other.sizes_hash;
  }
  bool operator!=(const CollectiveFingerprint& other) const { return !(*this == other); }
  std::string text() const;
};
static_assert(sizeof(CollectiveFingerprint) == 32, "the layout on the wire");

// A rank with its name and its fingerprint.
struct RankFingerprint {
  int rank;
  const std::string& name;
  const CollectiveFingerprint& fingerprint;
};

// Returns the error for two ranks that called different operations. Its text is the same whichever
// rank detects it.
Error mismatch_error(const RankFingerprint& a, const RankFingerprint& b, int at_fault);
// Return the error messages for a rank that sends another element type, or another size, in bytes,
// than its receiver expects.
std::string type_mismatch_text(const std::string& sender, DType sent, const std::string& receiver,
                               DType expected);
std::string size_mismatch_text(const std::string& sender, uint64_t sent,
                               const std::string& receiver, uint64_t expected);

}  // namespace fsccl
