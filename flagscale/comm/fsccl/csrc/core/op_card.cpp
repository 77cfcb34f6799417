#include "op_card.h"

namespace fsccl {

std::string OpCard::text() const {
  std::string out = std::string(name_of(op)) + " #" + std::to_string(sequence);
  if (bytes > 0) out += " of " + std::to_string(bytes) + " bytes";
  if (dtype != DType::kOpaque) out += std::string(" of ") + name_of(dtype) + ", " + name_of(red);
  if (root >= 0) out += ", root " + std::to_string(root);
  return out;
}

Error unlike(const Caller& one, const Caller& other, int at_fault) {
  if (other.rank < one.rank) return unlike(other, one, at_fault);
  OpCard alike = one.card;
  alike.layout = other.card.layout;
  return Error(Fault::kMismatch, at_fault,
               one.name + " called " + one.card.text() + " while " + other.name + " called " +
                   other.card.text() +
                   (alike == other.card ? ": the sizes of the ranks' parts differ" : ""));
}

std::string other_size(const std::string& sender, uint64_t sent, const std::string& receiver,
                       uint64_t expected) {
  return sender + " sends " + std::to_string(sent) + " bytes where " + receiver + " expects " +
         std::to_string(expected);
}

}  // namespace fsccl
