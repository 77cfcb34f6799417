// Ranks that register memory with each other, as torch's side has them do it: who finds whose, and
// that what fails on one fails on all.
#include "torch/registration.h"

#include "host_device.h"

using namespace fsccl;
using namespace fsccl::nvlink;

namespace {

constexpr int kRanks = 3;
constexpr size_t kBytes = 4096;

struct Rank {
  Rank(int number, Meeting& where, Log* log)
      : rank(number),
        meeting(where),
        engine(std::make_unique<HostDevice>(log), options()),
        group(engine, number, kRanks, 0),
        memory(2 * kBytes / sizeof(Vec)) {
    group.connect(meeting.exchange(rank, group.card()));
  }
  static Engine::Options options() {
    Engine::Options out;
    out.slot_bytes = 4096;
    out.tables[kRanks] = Table::parse("all_gather ordinary 1 staged 1 32\n"
                                      "all_gather registered 1 direct 1 32\n");
    return out;
  }
  Registration registration() {
    return Registration(group, [this](const std::string& own) {
      return meeting.exchange(rank, own);
    });
  }
  // The lower or the upper half of this rank's memory.
  const char* half(int upper) { return reinterpret_cast<char*>(memory.data()) + upper * kBytes; }

  // Everyone's number into everyone's memory.
  bool gather_into(const char* at) {
    std::vector<u32> own(16, static_cast<u32>(rank + 1));
    Call call;
    call.collective = Collective::kAllGather;
    call.in = own.data();
    call.bytes = 64;
    call.out = const_cast<char*>(at);
    if (!group.run(call)) return false;
    for (u32 p = 0; p < kRanks; ++p) {
      u32 found = 0;
      memcpy(&found, at + p * 64, sizeof found);
      if (found != p + 1) return false;
    }
    return true;
  }

  int rank;
  Meeting& meeting;
  Engine engine;
  Communicator group;
  std::vector<Vec> memory;
};

void on_all(std::vector<Log>* logs, const std::function<void(Rank&)>& body) {
  Meeting meeting(kRanks);
  logs->assign(kRanks, Log());
  each_rank(kRanks, [&](int number) {
    Rank rank(number, meeting, &(*logs)[number]);
    body(rank);
    meeting.exchange(number, "");
  });
}

// Rank 1 has them the other way round.
Regions both(Rank& rank) {
  const int first = rank.rank == 1 ? 1 : 0;
  return {{"1024+3072", rank.half(first), kBytes}, {"4096", rank.half(1 - first), kBytes}};
}

void regions_are_found_by_how_they_are_divided() {
  std::vector<Log> logs;
  on_all(&logs, [](Rank& rank) {
    Regions regions = both(rank);
    if (rank.rank == 2) std::swap(regions[0], regions[1]);
    rank.registration().add(regions);
    EXPECT(rank.gather_into(rank.half(rank.rank == 1 ? 1 : 0)));
    EXPECT(rank.gather_into(rank.half(rank.rank == 1 ? 0 : 1)));
    rank.registration().forget(regions);
    EXPECT(rank.gather_into(rank.half(0)));
  });
  for (const Log& log : logs) {
    EXPECT((log.kernels ==
            std::vector<std::string>{"copy_direct", "copy_direct", "copy_staged"}));
    EXPECT(log.closes == 2 * (kRanks - 1));
  }
}

void what_fails_on_one_fails_on_all() {
  struct Case {
    const char* said;
    std::function<void(Rank&, Regions&)> spoil;
  };
  const std::vector<Case> cases = {
      {"cannot tell which is which", [](Rank&, Regions& all) { all[1].layout = all[0].layout; }},
      {"divided otherwise", [](Rank&, Regions& all) { all[1].layout = "2048+2048"; }},
      {"divided otherwise", [](Rank&, Regions& all) { all.pop_back(); }},
      {"multiple of 16", [](Rank& rank, Regions& all) { all[0].at = rank.half(0) + 8; }},
      {"too many", [](Rank&, Regions& all) { all[1].layout.assign(40000, '9'); }},
      {"registers 2048 bytes", [](Rank&, Regions& all) { all[0].bytes = kBytes / 2; }},
  };
  for (const Case& one : cases) {
    std::vector<Log> logs;
    on_all(&logs, [&](Rank& rank) {
      Regions regions = both(rank);
      if (rank.rank == 2) one.spoil(rank, regions);
      const std::string said = error_of([&] { rank.registration().add(regions); });
      EXPECT(said.find(one.said) != std::string::npos);
      if (said.find(one.said) == std::string::npos) fprintf(stderr, "  said: %s\n", said.c_str());
      EXPECT(rank.gather_into(rank.half(0)));  // the group goes on, without the memory
    });
    for (const Log& log : logs) EXPECT((log.kernels == std::vector<std::string>{"copy_staged"}));
  }
}

}  // namespace

int main() {
  regions_are_found_by_how_they_are_divided();
  what_fails_on_one_fails_on_all();
  if (failures == 0) puts("ok");
  return failures == 0 ? 0 : 1;
}
