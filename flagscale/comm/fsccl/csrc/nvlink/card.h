// What ranks tell each other when a group comes together, as text that the caller carries.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "../core/text.h"
#include "../core/types.h"
#include "args.h"

namespace fsccl {
namespace nvlink {

[[noreturn]] inline void fail(Fault fault, int rank, const std::string& what) {
  throw Error(fault, rank, "NVLink engine: " + what);
}

// Of what a rank sent and this version does not read.
[[noreturn]] inline void fail_unlike(int rank) {
  fail(Fault::kMismatch, rank, "rank " + std::to_string(rank) + " runs another version");
}

// Strings one after the other, each behind its length.
inline std::string pack(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) {
    const auto size = static_cast<u32>(part.size());
    out.append(reinterpret_cast<const char*>(&size), sizeof size).append(part);
  }
  return out;
}

inline std::vector<std::string> unpack(const std::string& text, size_t count, int rank) {
  std::vector<std::string> out;
  size_t at = 0;
  while (at + sizeof(u32) <= text.size()) {
    u32 size = 0;
    memcpy(&size, text.data() + at, sizeof size);
    at += sizeof size;
    if (size > text.size() - at) break;
    out.push_back(text.substr(at, size));
    at += size;
  }
  if (at != text.size() || out.size() != count) fail_unlike(rank);
  return out;
}

inline u64 number(const std::string& text, int rank) {
  u64 value = 0;
  if (!read_number(text, &value)) fail_unlike(rank);
  return value;
}

struct Card {
  std::string version, host, device, table, shared;
  u64 slot_bytes = 0, offset = 0, most_blocks = 0;

  std::string text() const {
    return pack({version, host, device, table, shared, std::to_string(slot_bytes),
                 std::to_string(offset), std::to_string(most_blocks)});
  }
  static Card parse(const std::string& text, int rank) {
    const auto p = unpack(text, 8, rank);
    return {p[0],
            p[1],
            p[2],
            p[3],
            p[4],
            number(p[5], rank),
            number(p[6], rank),
            number(p[7], rank)};
  }
};

}  // namespace nvlink
}  // namespace fsccl
