// Tests of memory registration: ranks match regions by their layout, and a failure on one rank
// fails on all.
#include "torch/registration.h"

#include "host_device.h"

using namespace fsccl;
using namespace fsccl::nvlink;

namespace {

constexpr int kRanks = 3;
constexpr size_t kBytes = 4096;

struct Rank {
  Rank(int number, TextExchange& where, DeviceLog* log)
      : rank(number),
        peers(where),
        engine(std::make_unique<HostDevice>(log), options()),
        group(engine, number, kRanks, 0),
        memory(2 * kBytes / sizeof(Vec)) {
    group.connect(peers.exchange(rank, group.peer_info()));
  }
  static Engine::Options options() {
    Engine::Options out;
    out.slot_bytes = 4096;
    out.tables[kRanks] = TuningTable::parse(
        "all_gather ordinary 1 staged 1 32\n"
        "all_gather registered 1 direct 1 32\n");
    return out;
  }
  MemoryRegistration registration() {
    return MemoryRegistration(group,
                              [this](const std::string& own) { return peers.exchange(rank, own); });
  }
  // The lower or the upper half of this rank's memory.
  const char* memory_half(int upper) {
    return reinterpret_cast<char*>(memory.data()) + upper * kBytes;
  }

  // All-gathers the ranks' numbers into the memory at `at`, and checks them.
  bool gather_into(const char* at) {
    std::vector<u32> own(16, static_cast<u32>(rank + 1));
    Call call;
    call.collective = Collective::kAllGather;
    call.in = own.data();
    call.bytes = 64;
    call.out = const_cast<char*>(at);
    if (!group.run(call)) return false;
    for (u32 p = 0; p < kRanks; ++p) {
      u32 value = 0;
      memcpy(&value, at + p * 64, sizeof value);
      if (value != p + 1) return false;
    }
    return true;
  }

  int rank;
  TextExchange& peers;
  Engine engine;
  Communicator group;
  std::vector<Vec> memory;
};

void run_on_all(std::vector<DeviceLog>* logs, const std::function<void(Rank&)>& body) {
  TextExchange peers(kRanks);
  logs->assign(kRanks, DeviceLog());
  run_ranks(kRanks, [&](int number) {
    Rank rank(number, peers, &(*logs)[number]);
    body(rank);
    peers.exchange(number, "");
  });
}

// Both halves as regions; rank 1 has them in the other order.
Regions both_halves(Rank& rank) {
  const int first = rank.rank == 1 ? 1 : 0;
  return {{"1024+3072", rank.memory_half(first), kBytes},
          {"4096", rank.memory_half(1 - first), kBytes}};
}

void regions_are_matched_by_layout() {
  std::vector<DeviceLog> logs;
  run_on_all(&logs, [](Rank& rank) {
    Regions regions = both_halves(rank);
    if (rank.rank == 2) std::swap(regions[0], regions[1]);
    rank.registration().add(regions);
    EXPECT(rank.gather_into(rank.memory_half(rank.rank == 1 ? 1 : 0)));
    EXPECT(rank.gather_into(rank.memory_half(rank.rank == 1 ? 0 : 1)));
    rank.registration().remove(regions);
    EXPECT(rank.gather_into(rank.memory_half(0)));
  });
  for (const DeviceLog& log : logs) {
    EXPECT((log.kernels == std::vector<std::string>{"copy_direct", "copy_direct", "copy_staged"}));
    EXPECT(log.releases == 2 * (kRanks - 1));
  }
}

void failure_on_one_rank_fails_on_all() {
  struct Case {
    const char* error;
    std::function<void(Rank&, Regions&)> corrupt;
  };
  const std::vector<Case> cases = {
      {"cannot match them", [](Rank&, Regions& all) { all[1].layout = all[0].layout; }},
      {"another layout", [](Rank&, Regions& all) { all[1].layout = "2048+2048"; }},
      {"another layout", [](Rank&, Regions& all) { all.pop_back(); }},
      {"multiple of 16",
       [](Rank& rank, Regions& all) { all[0].address = rank.memory_half(0) + 8; }},
      {"too many", [](Rank&, Regions& all) { all[1].layout.assign(40000, '9'); }},
      {"registers 2048 bytes", [](Rank&, Regions& all) { all[0].bytes = kBytes / 2; }},
  };
  for (const Case& test_case : cases) {
    std::vector<DeviceLog> logs;
    run_on_all(&logs, [&](Rank& rank) {
      Regions regions = both_halves(rank);
      if (rank.rank == 2) test_case.corrupt(rank, regions);
      const std::string error = error_of([&] { rank.registration().add(regions); });
      EXPECT(error.find(test_case.error) != std::string::npos);
      if (error.find(test_case.error) == std::string::npos) {
        fprintf(stderr, "  error: %s\n", error.c_str());
      }
      EXPECT(rank.gather_into(rank.memory_half(0)));  // the group goes on, without the memory
    });
    for (const DeviceLog& log : logs)
      EXPECT((log.kernels == std::vector<std::string>{"copy_staged"}));
  }
}

}  // namespace

int main() {
  regions_are_matched_by_layout();
  failure_on_one_rank_fails_on_all();
  if (failures == 0) puts("ok");
  return failures == 0 ? 0 : 1;
}
