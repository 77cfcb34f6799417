// What an operation is, as ranks show it to each other: so that those that call different ones get
// an error that names both, and not garbage.
#pragma once

#include <string>

#include "types.h"

namespace fsccl {

// As it lies in shared memory and on the wire.
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
  bool operator!=(const OpCard& o) const { return !(*this == o); }
  std::string text() const;
};
static_assert(sizeof(OpCard) == 32, "the layout on the wire");

// A rank's card and its name.
struct Caller {
  int rank;
  const std::string& name;
  const OpCard& card;
};

// That two ranks' cards differ, in the same words whoever finds it.
Error unlike(const Caller& one, const Caller& other, int at_fault);
// That one rank sends other than another expects of it.
std::string other_size(const std::string& sender, uint64_t sent, const std::string& receiver,
                       uint64_t expected);

}  // namespace fsccl
