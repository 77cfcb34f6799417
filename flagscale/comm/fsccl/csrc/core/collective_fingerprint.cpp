#include "collective_fingerprint.h"

namespace fsccl {

std::string CollectiveFingerprint::text() const {
  std::string out = std::string(name_of(op)) + " #" + std::to_string(sequence);
  if (bytes > 0) out += " of " + std::to_string(bytes) + " bytes";
  const bool reduces =
      op == OpCode::kAllReduce || op == OpCode::kReduce || op == OpCode::kReduceScatter;
  if (dtype != DType::kOpaque) {
    out += std::string(" of ") + name_of(dtype) + (reduces ? std::string(", ") + name_of(red_op) : "");
  }
  if (root >= 0) out += ", root " + std::to_string(root);
  return out;
}

Error mismatch_error(const RankFingerprint& a, const RankFingerprint& b, int at_fault) {
  if (b.rank < a.rank) return mismatch_error(b, a, at_fault);
  CollectiveFingerprint with_equal_sizes = a.fingerprint;
  with_equal_sizes.sizes_hash = b.fingerprint.sizes_hash;
  return Error(
      Fault::kMismatch, at_fault,
      a.name + " called " + a.fingerprint.text() + " while " + b.name + " called " +
          b.fingerprint.text() +
          (with_equal_sizes == b.fingerprint ? ": the sizes of the ranks' parts differ" : ""));
}

std::string type_mismatch_text(const std::string& sender, DType sent, const std::string& receiver,
                               DType expected) {
  return sender + " sends " + name_of(sent) + " where " + receiver + " expects " +
         name_of(expected);
}

std::string size_mismatch_text(const std::string& sender, uint64_t sent,
                               const std::string& receiver, uint64_t expected) {
  return sender + " sends " + std::to_string(sent) + " bytes where " + receiver + " expects " +
         std::to_string(expected);
}

}  // namespace fsccl
