// What the engine does when ranks are unlike or do not come: ranks as threads, each with an engine
// of its own over memory that all share.
#include "host_device.h"

using namespace fsccl;
using namespace fsccl::nvlink;

namespace {

void ranks_that_differ_refuse_each_other() {
  Meeting meeting(2);
  std::vector<Log> logs(2);
  each_rank(2, [&](int rank) {
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), small());
    Communicator c(engine, rank, 2, 0);
    const auto cards = meeting.exchange(rank, c.card());
    EXPECT(error_of([&] { c.connect({cards[0], "x"}); }).find("rank 1 runs another version") !=
           std::string::npos);
    EXPECT(error_of([&] { c.run({}); }).find("before connect") != std::string::npos);
    meeting.exchange(rank, "");
  });
  EXPECT(error_of([] { Table::parse("all_reduce ordinary 1 direct 0 0\n"); })
             .find("found 'all_reduce ordinary 1 direct 0 0'") != std::string::npos);
  EXPECT(error_of([] { Table::parse("all_reduce ordinary 9 staged 0 0\nall_reduce ordinary 9 "
                                    "staged 0 0\n"); })
             .find("ascend") != std::string::npos);
  EXPECT(Table::parse(Table::guess(8).text()).text() == Table::guess(8).text());
}

void processes_do_not_share_a_gpu() {
  Meeting meeting(2);
  std::vector<Log> logs(2);
  each_rank(2, [&](int rank) {
    auto device = std::make_unique<HostDevice>(&logs[rank]);
    device->stranger = true;
    Engine engine(std::move(device), small());
    Communicator c(engine, rank, 2, 0);
    const auto cards = meeting.exchange(rank, c.card());
    EXPECT(error_of([&] { c.connect(cards); }).find("on the same GPU") != std::string::npos);
    meeting.exchange(rank, "");
  });
}

void gpus_without_nvlink_are_refused() {
  Meeting meeting(2);
  std::vector<Log> logs(2);
  each_rank(2, [&](int rank) {
    auto device = std::make_unique<HostDevice>(&logs[rank]);
    device->apart = rank == 0;
    Engine engine(std::move(device), small());
    Communicator c(engine, rank, 2, 0);
    const auto cards = meeting.exchange(rank, c.card());
    const std::string said = error_of([&] { c.connect(cards); });
    EXPECT((said.find("rank 1's GPU and this rank's have no NVLink") != std::string::npos) ==
           (rank == 0));
    meeting.exchange(rank, "");
  });
}

void who_does_not_come_is_named() {
  Meeting meeting(3);
  std::vector<Log> logs(3);
  each_rank(3, [&](int rank) {
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), small());
    const auto c = join(engine, meeting, rank, 3, 50'000'000);
    std::vector<float> memory(8);
    EXPECT(!c->failure());
    if (rank != 1) {
      all_reduce(*c, rank, 3, memory, 8);
      EXPECT(c->failure() && c->failure()->rank == 1 && c->failure()->fault == Fault::kTimeout);
      EXPECT(error_of([&] { c->run({}); }).find("rank 1 of the group did not come") !=
             std::string::npos);
    } else {
      c->abort();
      EXPECT(c->failure() && c->failure()->fault == Fault::kAborted);
    }
    meeting.exchange(rank, "");
  });
}

// A rank that has given up has not got what it would have to pass on. Whoever comes later fails
// too, or gets what is right without it, also when a graph replays the rank's kernels.
void who_comes_late_is_told_nothing_wrong() {
  struct Way {
    Algorithm algorithm;
    size_t count;
  };
  for (const Way way : {Way{Algorithm::kFlagged, 300}, Way{Algorithm::kLines, 3000},
                        Way{Algorithm::kTwoShot, 300},
                        Way{Algorithm::kStaged, 3000}, Way{Algorithm::kStaged, 40000},
                        Way{Algorithm::kDirect, 4096}}) {
    constexpr int kRanks = 3;
    Meeting meeting(kRanks);
    std::vector<Log> logs(kRanks);
    std::vector<std::vector<Vec>> pools(kRanks, std::vector<Vec>(1 << 14));
    each_rank(kRanks, [&](int rank) {
      Engine engine(std::make_unique<HostDevice>(&logs[rank]), small());
      const auto c = join(engine, meeting, rank, kRanks);
      auto* const at = reinterpret_cast<char*>(pools[rank].data());
      const u64 bytes = pools[rank].size() * sizeof(Vec);
      c->connect_memory(at, bytes, meeting.exchange(rank, c->memory_card(at, bytes)));
      auto* const values = reinterpret_cast<float*>(at);
      for (size_t i = 0; i < way.count; ++i) values[i] = static_cast<float>(rank + i % 5 + 1);
      const Shape shape{way.algorithm, 2, 32};
      Call call;
      call.in = call.out = values;
      call.bytes = way.count * sizeof(float);
      call.timeout_ns = rank == 0 ? 20'000'000 : 60'000'000;
      if (rank == 0) {
        EXPECT(c->run(call, &shape));
        EXPECT(c->failure() && c->failure()->fault == Fault::kTimeout);
        logs[0].again();
      }
      meeting.exchange(rank, "");
      if (rank == 0) {
        for (int i = 0; i < 3; ++i) logs[0].again();
      } else {
        EXPECT(c->run(call, &shape));
        for (size_t i = 0; i < way.count && !c->failure(); ++i) {
          EXPECT(values[i] == static_cast<float>(6 + 3 * (i % 5)));
        }
        const bool one_step =
            way.algorithm == Algorithm::kFlagged || way.algorithm == Algorithm::kLines;
        EXPECT(c->failure() || one_step);
      }
      meeting.exchange(rank, "");
    });
  }
}

void a_long_wait_is_seen() {
  Meeting meeting(2);
  std::vector<Log> logs(2);
  each_rank(2, [&](int rank) {
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), small());
    const auto c = join(engine, meeting, rank, 2);
    c->call_ranks({"Ann", "Ben"});
    std::vector<float> memory(8);
    EXPECT(all_reduce(*c, rank, 2, memory, 8));
    EXPECT(c->idle());
    if (rank == 0) {
      Call call;
      call.in = call.out = memory.data();
      call.bytes = 32;
      call.timeout_ns = 30'000'000;
      EXPECT(c->run(call));
      EXPECT(c->waited());
      EXPECT(!c->waited());
      EXPECT(std::string(c->failure()->what()) == "NVLink engine: Ben did not come within 30 ms");
    }
    meeting.exchange(rank, "");
  });
}

}  // namespace

int main() {
  ranks_that_differ_refuse_each_other();
  processes_do_not_share_a_gpu();
  gpus_without_nvlink_are_refused();
  who_does_not_come_is_named();
  who_comes_late_is_told_nothing_wrong();
  a_long_wait_is_seen();
  if (failures == 0) puts("ok");
  return failures == 0 ? 0 : 1;
}
