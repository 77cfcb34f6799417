// Regions that the ranks of a group let each other read and write directly.
//
// Ranks find each other's region by how it is divided into allocations, which is the same on all of
// them if they have allocated alike; addresses, and so their order, may differ. What fails on one
// rank fails on all: nobody may take the direct way where another does not.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../nvlink/engine.h"

namespace fsccl {

struct Region {
  std::string layout;
  const void* at;
  size_t bytes;
};
using Regions = std::vector<Region>;

class Registration {
 public:
  // Takes this rank's words, at most so many, and gives those of all ranks.
  using Exchange = std::function<std::vector<std::string>(const std::string&)>;
  static constexpr size_t kMostWords = (32 << 10) - sizeof(uint32_t);

  Registration(nvlink::Communicator& group, Exchange exchange)
      : group_(group), exchange_(std::move(exchange)) {}

  // Every rank calls it; throws on all of them if any cannot.
  void add(Regions regions) {
    std::sort(regions.begin(), regions.end(),
              [](const Region& a, const Region& b) { return a.layout < b.layout; });
    std::string cards;
    agree([&] { cards = cards_of(regions); });
    const std::vector<std::string> all = exchange_(cards);
    try {
      agree([&] { connect(regions, all); });
    } catch (const Error&) {
      for (const Region& p : regions) group_.forget_memory(p.at);
      throw;
    }
  }

  // Every rank calls it. Afterwards no rank holds on to the memory, so that it can be freed.
  void forget(const Regions& regions) {
    agree([&] {
      for (const Region& p : regions) group_.forget_memory(p.at);
    });
  }

 private:
  template <class F>
  void agree(F step) {
    std::string trouble;
    try {
      step();
    } catch (const std::exception& e) {
      trouble = e.what();
    }
    for (const std::string& other : exchange_(trouble.substr(0, kMostWords))) {
      if (!other.empty()) throw Error(Fault::kSystem, -1, other);
    }
  }

  std::string cards_of(const Regions& regions) const {
    std::string out;
    for (size_t i = 0; i < regions.size(); ++i) {
      if (i > 0 && regions[i].layout == regions[i - 1].layout) {
        fail_usage("two regions of registered memory are divided alike (" + regions[i].layout +
                   " bytes), so ranks cannot tell which is which: register them one by one, or "
                   "allocate them as one");
      }
      append(&out, regions[i].layout);
      append(&out, group_.memory_card(regions[i].at, regions[i].bytes));
    }
    if (out.size() > kMostWords) {
      fail_usage("too many regions of memory at once: " + std::to_string(regions.size()));
    }
    return out;
  }

  void connect(const Regions& regions, const std::vector<std::string>& all) {
    std::vector<size_t> read(all.size(), 0);
    for (const Region& region : regions) {
      std::vector<std::string> cards;
      for (size_t r = 0; r < all.size(); ++r) {
        if (next(all[r], &read[r]) != region.layout) differs(r);
        cards.push_back(next(all[r], &read[r]));
      }
      group_.connect_memory(region.at, region.bytes, cards);
    }
    for (size_t r = 0; r < all.size(); ++r) {
      if (read[r] != all[r].size()) differs(r);
    }
  }

  [[noreturn]] static void differs(size_t rank) {
    throw Error(Fault::kMismatch, static_cast<int>(rank),
                "rank " + std::to_string(rank) + " registers memory that is divided otherwise than "
                "this rank's: all ranks must allocate alike");
  }

  static void append(std::string* out, const std::string& part) {
    const auto size = static_cast<uint32_t>(part.size());
    out->append(reinterpret_cast<const char*>(&size), sizeof size).append(part);
  }

  static std::string next(const std::string& parts, size_t* at) {
    uint32_t size = 0;
    if (parts.size() - *at < sizeof size) return "";
    std::memcpy(&size, parts.data() + *at, sizeof size);
    const std::string part = parts.substr(*at + sizeof size, size);
    *at += sizeof size + part.size();
    return part;
  }

  nvlink::Communicator& group_;
  Exchange exchange_;
};

}  // namespace fsccl
