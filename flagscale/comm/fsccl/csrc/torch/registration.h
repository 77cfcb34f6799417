// Registration of memory with the NVLink engine. The ranks of a group then read and write each
// other's registered memory directly, without staging buffers.
//
// A region is a contiguous range of memory. Ranks match their regions by layout, the sizes of the
// allocations in them, which is the same on all ranks if they have made the same allocations;
// addresses, and so the order of regions, may differ. A step that fails on one rank fails on all,
// because all ranks must choose the same algorithm for an operation.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../nvlink/engine.h"

namespace fsccl {

struct Region {
  std::string layout;  // the sizes of its allocations, in bytes: "512+1024"
  const void* address;
  size_t bytes;
};
using Regions = std::vector<Region>;

class MemoryRegistration {
 public:
  // All-gather of one string per rank, each of at most kMaxExchangeBytes.
  using Exchange = std::function<std::vector<std::string>(const std::string&)>;
  static constexpr size_t kMaxExchangeBytes = (32 << 10) - sizeof(uint32_t);

  MemoryRegistration(nvlink::Communicator& group, Exchange exchange)
      : group_(group), exchange_(std::move(exchange)) {}

  // Registers regions. All ranks call it; it throws on all ranks if it fails on any.
  void add(Regions regions) {
    std::sort(regions.begin(), regions.end(),
              [](const Region& a, const Region& b) { return a.layout < b.layout; });
    std::string handles;
    run_on_all_ranks([&] { handles = serialize_handles(regions); });
    const std::vector<std::string> all_handles = exchange_(handles);
    try {
      run_on_all_ranks([&] { connect(regions, all_handles); });
    } catch (const Error&) {
      for (const Region& r : regions) group_.disconnect_memory(r.address);
      throw;
    }
  }

  // Deregisters regions. All ranks call it. Afterwards no rank has the memory mapped, so it can be
  // freed.
  void remove(const Regions& regions) {
    run_on_all_ranks([&] {
      for (const Region& r : regions) group_.disconnect_memory(r.address);
    });
  }

 private:
  // Runs a step on this rank. If it throws on any rank, throws the error of the first such rank on
  // all ranks.
  template <class F>
  void run_on_all_ranks(F step) {
    std::string own_error;
    try {
      step();
    } catch (const std::exception& e) {
      own_error = e.what();
    }
    for (const std::string& error : exchange_(own_error.substr(0, kMaxExchangeBytes))) {
      if (!error.empty()) throw Error(Fault::kSystem, -1, error);
    }
  }

  // Serializes the layout and the memory handle of each region, each after its size.
  std::string serialize_handles(const Regions& regions) const {
    std::string out;
    for (size_t i = 0; i < regions.size(); ++i) {
      if (i > 0 && regions[i].layout == regions[i - 1].layout) {
        fail_usage("two regions of registered memory have the same layout (" + regions[i].layout +
                   " bytes), so ranks cannot match them: register them one by one, or allocate "
                   "them as one");
      }
      append_entry(&out, regions[i].layout);
      append_entry(&out, group_.memory_handle(regions[i].address, regions[i].bytes));
    }
    if (out.size() > kMaxExchangeBytes) {
      fail_usage("too many regions of memory at once: " + std::to_string(regions.size()));
    }
    return out;
  }

  void connect(const Regions& regions, const std::vector<std::string>& all_handles) {
    std::vector<size_t> offsets(all_handles.size(), 0);
    for (const Region& region : regions) {
      std::vector<std::string> handles;
      for (size_t r = 0; r < all_handles.size(); ++r) {
        if (read_entry(all_handles[r], &offsets[r]) != region.layout) throw_layout_mismatch(r);
        handles.push_back(read_entry(all_handles[r], &offsets[r]));
      }
      group_.connect_memory(region.address, region.bytes, handles);
    }
    for (size_t r = 0; r < all_handles.size(); ++r) {
      if (offsets[r] != all_handles[r].size()) throw_layout_mismatch(r);
    }
  }

  [[noreturn]] static void throw_layout_mismatch(size_t rank) {
    throw Error(Fault::kMismatch, static_cast<int>(rank),
                "rank " + std::to_string(rank) +
                    " registers memory of another layout than this rank: all ranks must make the "
                    "same allocations");
  }

  static void append_entry(std::string* out, const std::string& entry) {
    const auto size = static_cast<uint32_t>(entry.size());
    out->append(reinterpret_cast<const char*>(&size), sizeof size).append(entry);
  }

  // Returns the entry at `offset` and advances `offset`; empty at the end.
  static std::string read_entry(const std::string& entries, size_t* offset) {
    uint32_t size = 0;
    if (entries.size() - *offset < sizeof size) return "";
    std::memcpy(&size, entries.data() + *offset, sizeof size);
    const std::string entry = entries.substr(*offset + sizeof size, size);
    *offset += sizeof size + entry.size();
    return entry;
  }

  nvlink::Communicator& group_;
  Exchange exchange_;
};

}  // namespace fsccl
