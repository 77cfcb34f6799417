// Collectives that the ranks call with arguments that do not match, or in which a rank fails early:
// every rank must get an error that explains the reason.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "counting_store.h"

namespace fsccl {

// A mismatched call, and the error messages of which every rank must get one.
struct MismatchedCall {
  std::vector<const char*> messages;
  std::function<void(Group&, const Deadline&)> call;  // run on each rank
};

// Calls an operation in which rank 0 sends `sent` bytes to itself but expects `expected` bytes from
// itself.
inline void exchange_mismatched_with_self(Group& group, size_t sent, size_t expected, OpCode op,
                                          const Deadline& d) {
  const auto n = static_cast<size_t>(group.size());
  const bool is_rank0 = group.rank() == 0;
  std::vector<std::vector<std::byte>> from(n, std::vector<std::byte>(3)), to = from;
  if (is_rank0) from[0].resize(sent);
  if (is_rank0) to[0].resize(expected);
  BufferLists send, recv;
  for (const auto& v : from) send.emplace_back(v.data(), v.size());
  for (const auto& v : to) recv.emplace_back(v.data(), v.size());
  if (op == OpCode::kAllToAll) group.all_to_all(send, recv, d);
  if (op == OpCode::kGather) group.gather(send[0], is_rank0 ? recv : BufferLists(), 0, d);
  if (op == OpCode::kScatter) group.scatter(is_rank0 ? send : BufferLists(), recv[0], 0, d);
}

// Calls reduce_scatter or all_gather with sizes of the parts that differ between ranks; their
// totals are equal. With `all_to_one`, each rank gives all bytes to its own part.
inline void pass_mismatched_lists(Group& group, bool all_to_one, bool reduces, const Deadline& d) {
  const auto n = static_cast<size_t>(group.size()), me = static_cast<size_t>(group.rank());
  std::vector<size_t> sizes(n, all_to_one ? 0 : 8);
  sizes[me] += all_to_one ? 8 : 4;
  std::vector<std::byte> parts(64 * n), input(64);
  BufferLists list;
  for (size_t p = 0; p < n; ++p) list.emplace_back(parts.data() + 64 * p, sizes[p]);
  const BufferList own_part(input.data(), sizes[me]);
  if (reduces) group.reduce_scatter(list, own_part, {DType::kI32, RedOp::kSum, 1, group.size()}, d);
  if (!reduces) group.all_gather(own_part, list, d, 4);
}

inline std::vector<MismatchedCall> mismatched_calls(int n) {
  std::vector<MismatchedCall> calls;
  for (const bool all_to_one : {false, true}) {
    for (const bool reduces : {false, true}) {
      if (n == 1) continue;
      calls.push_back({{"the sizes of the ranks' parts differ"}, [=](Group& g, const Deadline& d) {
                         pass_mismatched_lists(g, all_to_one, reduces, d);
                       }});
    }
  }
  for (const OpCode op : {OpCode::kAllToAll, OpCode::kGather, OpCode::kScatter}) {
    calls.push_back({{"sends itself 90000 bytes and expects 1"}, [op](Group& g, const Deadline& d) {
                       exchange_mismatched_with_self(g, 90000, 1, op, d);
                     }});
    calls.push_back({{"sends itself 8 bytes and expects 0"}, [op](Group& g, const Deadline& d) {
                       exchange_mismatched_with_self(g, 8, 0, op, d);
                     }});
    calls.push_back({{"sends itself 1 bytes and expects 9"}, [op](Group& g, const Deadline& d) {
                       exchange_mismatched_with_self(g, 1, 9, op, d);
                     }});
  }
  return calls;
}

inline void expect_mismatch_error(Group& group, const MismatchedCall& mismatch) {
  std::string message = "no error";
  try {
    mismatch.call(group, Deadline::after(Deadline::Ms(60000)));
  } catch (const Error& e) {
    message = e.what();
  }
  for (const char* message_part : mismatch.messages) {
    if (message.find(message_part) != std::string::npos) return;
  }
  std::fprintf(stderr, "rank %d, not '%s': %s\n", group.rank(), mismatch.messages[0],
               message.c_str());
  std::_Exit(1);
}

// A store that fails to set the key of a segment.
class FailingStore : public CountingStore {
 public:
  using CountingStore::CountingStore;
  void set(const std::string& key, const std::string& value) override {
    if (key.rfind("segment", 0) == 0) throw std::bad_alloc();
    CountingStore::set(key, value);
  }
};

// Runs `call` on all ranks, as threads. No group is destroyed before all have returned.
template <class StoreType = CountingStore>
void run_on_all_ranks(const Settings& settings, int n, const std::function<void(Group&)>& call) {
  StoreContents contents;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::thread> ranks;
  for (int r = 0; r < n; ++r) {
    GroupConfig config;
    config.rank = r;
    config.size = n;
    config.settings = settings;
    groups.push_back(std::make_unique<Group>(std::make_unique<StoreType>(contents), config));
  }
  for (auto& g : groups) ranks.emplace_back([&] { call(*g); });
  for (auto& t : ranks) t.join();
}

// Calls a barrier before and after each mismatched call: a rank whose own arguments match may
// complete the call, and gets the error from the next one.
inline void expect_mismatch_errors(const Settings& settings, int n) {
  for (const MismatchedCall& mismatch : mismatched_calls(n)) {
    const auto between_barriers = [&mismatch](Group& group, const Deadline& d) {
      group.barrier(d);
      mismatch.call(group, d);
      group.barrier(d);
    };
    run_on_all_ranks(settings, n, [&](Group& g) {
      expect_mismatch_error(g, {mismatch.messages, between_barriers});
    });
  }
}

// The last rank fails after it has exchanged identities and before its first collective, as a
// device engine may, while the other ranks are in their first collective or about to start it.
inline void fail_before_first_collective(const Settings& settings, int n) {
  const auto call = [n](Group& group, const Deadline& d) {
    group.identities(d);
    if (group.rank() + 1 < n) return group.barrier(d);
    group.fail("early", 1, Error(Fault::kSystem, group.rank(), "the last rank has failed"));
  };
  run_on_all_ranks(settings, n, [&](Group& g) {
    expect_mismatch_error(g, {{"the last rank has failed"}, call});
  });
}

// The rank that creates its node's shared-memory segment gets an exception between the exchange of
// identities and the first step.
inline void fail_to_publish_shared_memory(const Settings& settings, int n) {
  if (settings.node_sizes[0] < 2) return;  // the only rank of its node does not publish the segment
  const auto call = [](Group& group, const Deadline& d) { group.barrier(d); };
  run_on_all_ranks<FailingStore>(
      settings, n, [&](Group& g) { expect_mismatch_error(g, {{"]: std::bad_alloc"}, call}); });
}

}  // namespace fsccl
