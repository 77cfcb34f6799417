// Calls of ranks that do not fit together: all are told, in words that say what is amiss.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "board.h"

namespace fsccl {

// What every rank is told of its call.
struct Misfit {
  std::vector<const char*> words;  // one of them
  std::function<void(Group&, const Deadline&)> call;
};

// Rank 0 sends itself other than it expects of itself.
inline void unequal_self(Group& group, size_t sent, size_t expected, OpCode op, const Deadline& d) {
  const auto n = static_cast<size_t>(group.size());
  const bool odd = group.rank() == 0;
  std::vector<std::vector<std::byte>> from(n, std::vector<std::byte>(3)), to = from;
  if (odd) from[0].resize(sent);
  if (odd) to[0].resize(expected);
  BufferLists send, recv;
  for (const auto& v : from) send.emplace_back(v.data(), v.size());
  for (const auto& v : to) recv.emplace_back(v.data(), v.size());
  if (op == OpCode::kAllToAll) group.all_to_all(send, recv, d);
  if (op == OpCode::kGather) group.gather(send[0], odd ? recv : BufferLists(), 0, d);
  if (op == OpCode::kScatter) group.scatter(odd ? send : BufferLists(), recv[0], 0, d);
}

// Every rank thinks that some have a larger part than others think; all sums are the same.
inline void unequal_lists(Group& group, bool all_to_one, bool reduces, const Deadline& d) {
  const auto n = static_cast<size_t>(group.size()), me = static_cast<size_t>(group.rank());
  std::vector<size_t> sizes(n, all_to_one ? 0 : 8);
  sizes[me] += all_to_one ? 8 : 4;
  std::vector<std::byte> parts(64 * n), own(64);
  BufferLists list;
  for (size_t p = 0; p < n; ++p) list.emplace_back(parts.data() + 64 * p, sizes[p]);
  const BufferList mine(own.data(), sizes[me]);
  if (reduces) group.reduce_scatter(list, mine, {DType::kI32, RedOp::kSum, 1, group.size()}, d);
  if (!reduces) group.all_gather(mine, list, d, 4);
}

inline std::vector<Misfit> misfits(int n) {
  std::vector<Misfit> out;
  for (const bool all_to_one : {false, true}) {
    for (const bool reduces : {false, true}) {
      if (n == 1) continue;
      out.push_back(
          {{"the sizes of the ranks' parts differ"},
           [=](Group& g, const Deadline& d) { unequal_lists(g, all_to_one, reduces, d); }});
    }
  }
  for (const OpCode op : {OpCode::kAllToAll, OpCode::kGather, OpCode::kScatter}) {
    out.push_back({{"sends itself 90000 bytes and expects 1"},
                   [op](Group& g, const Deadline& d) { unequal_self(g, 90000, 1, op, d); }});
    out.push_back({{"sends itself 8 bytes and expects 0"},
                   [op](Group& g, const Deadline& d) { unequal_self(g, 8, 0, op, d); }});
    out.push_back({{"sends itself 1 bytes and expects 9"},
                   [op](Group& g, const Deadline& d) { unequal_self(g, 1, 9, op, d); }});
  }
  return out;
}

inline void meet_misfit(Group& group, const Misfit& misfit) {
  std::string said = "no error";
  try {
    misfit.call(group, Deadline::after(Deadline::Ms(60000)));
  } catch (const Error& e) {
    said = e.what();
  }
  for (const char* words : misfit.words) {
    if (said.find(words) != std::string::npos) return;
  }
  std::fprintf(stderr, "rank %d, not '%s': %s\n", group.rank(), misfit.words[0], said.c_str());
  std::_Exit(1);
}

// Cannot tell of a segment.
class FullStore : public BoardStore {
 public:
  using BoardStore::BoardStore;
  void set(const std::string& key, const std::string& value) override {
    if (key.rfind("segment", 0) == 0) throw std::bad_alloc();
    BoardStore::set(key, value);
  }
};

// Nobody leaves before all have been told.
template <class Meeting = BoardStore>
void on_all(const Settings& settings, int n, const std::function<void(Group&)>& call) {
  Board board;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::thread> ranks;
  for (int r = 0; r < n; ++r) {
    GroupConfig config;
    config.rank = r;
    config.size = n;
    config.settings = settings;
    groups.push_back(std::make_unique<Group>(std::make_unique<Meeting>(board), config));
  }
  for (auto& g : groups) ranks.emplace_back([&] { call(*g); });
  for (auto& t : ranks) t.join();
}

// Who is done with his call, as nothing of it is amiss for him, learns it by the next.
inline void meet_misfits(const Settings& settings, int n) {
  for (const Misfit& misfit : misfits(n)) {
    const auto between_barriers = [&misfit](Group& group, const Deadline& d) {
      group.barrier(d);
      misfit.call(group, d);
      group.barrier(d);
    };
    on_all(settings, n, [&](Group& g) { meet_misfit(g, {misfit.words, between_barriers}); });
  }
}

// A rank knows the others and fails before its first collective here, as an engine beside the core
// may, when the others are in theirs or come to it.
inline void fail_early(const Settings& settings, int n) {
  const auto call = [n](Group& group, const Deadline& d) {
    group.everyone(d);
    if (group.rank() + 1 < n) return group.barrier(d);
    group.fail("early", 1, Error(Fault::kSystem, group.rank(), "the last rank has failed"));
  };
  on_all(settings, n, [&](Group& g) { meet_misfit(g, {{"the last rank has failed"}, call}); });
}

// Whatever is thrown between meeting and the first step, by whoever makes the segment.
inline void run_out_of_memory(const Settings& settings, int n) {
  if (settings.clusters[0] < 2) return;  // its one rank tells nobody of the segment
  const auto call = [](Group& group, const Deadline& d) { group.barrier(d); };
  on_all<FullStore>(settings, n,
                         [&](Group& g) { meet_misfit(g, {{"]: std::bad_alloc"}, call}); });
}

}  // namespace fsccl
