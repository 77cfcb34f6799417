// Information that the ranks of a group exchange when they connect (engine.h), and its binary
// encoding. The caller of the engine transports it.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "../core/text.h"
#include "../core/types.h"
#include "kernel_args.h"

namespace fsccl {
namespace nvlink {

[[noreturn]] inline void fail(Fault fault, int rank, const std::string& message) {
  throw Error(fault, rank, "NVLink engine: " + message);
}

// Throws the error for data of `rank` that this version cannot parse.
[[noreturn]] inline void fail_version_mismatch(int rank) {
  fail(Fault::kMismatch, rank, "rank " + std::to_string(rank) + " runs another version");
}

// Concatenates strings, each after its length.
inline std::string pack(const std::vector<std::string>& values) {
  std::string out;
  for (const std::string& value : values) {
    const auto size = static_cast<u32>(value.size());
    out.append(reinterpret_cast<const char*>(&size), sizeof size).append(value);
  }
  return out;
}

// The reverse of pack(). Throws if the text, from `rank`, does not contain `count` strings.
inline std::vector<std::string> unpack(const std::string& text, size_t count, int rank) {
  std::vector<std::string> out;
  size_t offset = 0;
  while (offset + sizeof(u32) <= text.size()) {
    u32 size = 0;
    memcpy(&size, text.data() + offset, sizeof size);
    offset += sizeof size;
    if (size > text.size() - offset) break;
    out.push_back(text.substr(offset, size));
    offset += size;
  }
  if (offset != text.size() || out.size() != count) fail_version_mismatch(rank);
  return out;
}

inline u64 parse_number(const std::string& text, int rank) {
  u64 value = 0;
  if (!parse_decimal(text, &value)) fail_version_mismatch(rank);
  return value;
}

// Description of a rank: its host, its GPU, and the handle by which peers map its arena.
struct PeerInfo {
  std::string version;
  std::string host;         // boot ID
  std::string device;       // identity of the GPU
  std::string table;        // the rank's tuning table; empty: none
  std::string heap_handle;  // of the memory in which the arena is at `offset`
  u64 slot_bytes = 0, offset = 0, max_blocks = 0;

  std::string text() const {
    return pack({version, host, device, table, heap_handle, std::to_string(slot_bytes),
                 std::to_string(offset), std::to_string(max_blocks)});
  }
  static PeerInfo parse(const std::string& text, int rank) {
    const auto fields = unpack(text, 8, rank);
    return {fields[0],
            fields[1],
            fields[2],
            fields[3],
            fields[4],
            parse_number(fields[5], rank),
            parse_number(fields[6], rank),
            parse_number(fields[7], rank)};
  }
};

}  // namespace nvlink
}  // namespace fsccl
