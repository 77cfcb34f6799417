// Tests of the NVLink engine with ranks that differ or do not come, on a CPU in place of GPUs:
// ranks are threads of one process, each with its own engine. small_slot_options() gives staging
// buffers (slots) of a few kilobytes, so that messages take many steps. A line of a tuning table
// begins with collective, memory (`ordinary` or `registered`) and largest size (kernel_plan.h).
#include "host_device.h"

using namespace fsccl;
using namespace fsccl::nvlink;

namespace {

void different_versions_are_rejected() {
  TextExchange peers(2);
  std::vector<DeviceLog> logs(2);
  run_ranks(2, [&](int rank) {
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), small_slot_options());
    Communicator c(engine, rank, 2, 0);
    const auto infos = peers.exchange(rank, c.peer_info());
    EXPECT(error_of([&] { c.connect({infos[0], "x"}); }).find("rank 1 runs another version") !=
           std::string::npos);
    EXPECT(error_of([&] { c.run({}); }).find("before connect") != std::string::npos);
    peers.exchange(rank, "");
  });
  EXPECT(error_of([] {
           TuningTable::parse("all_reduce ordinary 1 direct 0 0\n");
         }).find("found 'all_reduce ordinary 1 direct 0 0'") != std::string::npos);
  EXPECT(error_of([] {
           TuningTable::parse(
               "all_reduce ordinary 9 staged 0 0\nall_reduce ordinary 9 "
               "staged 0 0\n");
         }).find("ascend") != std::string::npos);
  const std::string defaults = TuningTable::default_table(8).text();
  EXPECT(TuningTable::parse(defaults).text() == defaults);
}

void processes_on_one_gpu_are_rejected() {
  TextExchange peers(2);
  std::vector<DeviceLog> logs(2);
  run_ranks(2, [&](int rank) {
    auto device = std::make_unique<HostDevice>(&logs[rank]);
    device->memory_is_foreign = true;
    Engine engine(std::move(device), small_slot_options());
    Communicator c(engine, rank, 2, 0);
    const auto infos = peers.exchange(rank, c.peer_info());
    EXPECT(error_of([&] { c.connect(infos); }).find("on the same GPU") != std::string::npos);
    peers.exchange(rank, "");
  });
}

void gpus_without_nvlink_are_rejected() {
  TextExchange peers(2);
  std::vector<DeviceLog> logs(2);
  run_ranks(2, [&](int rank) {
    auto device = std::make_unique<HostDevice>(&logs[rank]);
    device->has_no_links = rank == 0;
    Engine engine(std::move(device), small_slot_options());
    Communicator c(engine, rank, 2, 0);
    const auto infos = peers.exchange(rank, c.peer_info());
    const std::string error = error_of([&] { c.connect(infos); });
    EXPECT((error.find("rank 1's GPU and this rank's have no NVLink") != std::string::npos) ==
           (rank == 0));
    peers.exchange(rank, "");
  });
}

void absent_rank_is_named() {
  TextExchange peers(3);
  std::vector<DeviceLog> logs(3);
  run_ranks(3, [&](int rank) {
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), small_slot_options());
    const auto c = connect_communicator(engine, peers, rank, 3, 50'000'000);
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
    peers.exchange(rank, "");
  });
}

// Rank 0 calls first and times out, so it lacks data of its peers. With an algorithm of several
// steps it would have to forward results that contain this data, so the peers that call later must
// fail, too. With an algorithm of one step they may succeed: they need only rank 0's own data,
// which was sent before the timeout. The same must hold when a graph replays rank 0's kernels.
void late_rank_gets_no_wrong_data() {
  struct Variant {
    Algorithm algorithm;
    size_t count;
  };
  for (const Variant variant :
       {Variant{Algorithm::kFlagged, 300}, Variant{Algorithm::kLines, 3000},
        Variant{Algorithm::kTwoShot, 300}, Variant{Algorithm::kStaged, 3000},
        Variant{Algorithm::kStaged, 40000}, Variant{Algorithm::kDirect, 4096}}) {
    constexpr int kRanks = 3;
    TextExchange peers(kRanks);
    std::vector<DeviceLog> logs(kRanks);
    std::vector<std::vector<Vec>> pools(kRanks, std::vector<Vec>(1 << 14));
    run_ranks(kRanks, [&](int rank) {
      Engine engine(std::make_unique<HostDevice>(&logs[rank]), small_slot_options());
      const auto c = connect_communicator(engine, peers, rank, kRanks);
      auto* const at = reinterpret_cast<char*>(pools[rank].data());
      const u64 bytes = pools[rank].size() * sizeof(Vec);
      c->connect_memory(at, bytes, peers.exchange(rank, c->memory_handle(at, bytes)));
      auto* const values = reinterpret_cast<float*>(at);
      for (size_t i = 0; i < variant.count; ++i) values[i] = static_cast<float>(rank + i % 5 + 1);
      const KernelShape shape{variant.algorithm, 2, 32};
      Call call;
      call.in = call.out = values;
      call.bytes = variant.count * sizeof(float);
      call.timeout_ns = rank == 0 ? 20'000'000 : 60'000'000;
      if (rank == 0) {
        EXPECT(c->run(call, &shape));
        EXPECT(c->failure() && c->failure()->fault == Fault::kTimeout);
        logs[0].replay();
      }
      peers.exchange(rank, "");
      if (rank == 0) {
        for (int i = 0; i < 3; ++i) logs[0].replay();
      } else {
        EXPECT(c->run(call, &shape));
        for (size_t i = 0; i < variant.count && !c->failure(); ++i) {
          EXPECT(values[i] == static_cast<float>(6 + 3 * (i % 5)));
        }
        // kFlagged and kLines send all data to all peers in one step.
        const bool is_one_step =
            variant.algorithm == Algorithm::kFlagged || variant.algorithm == Algorithm::kLines;
        EXPECT(c->failure() || is_one_step);
      }
      peers.exchange(rank, "");
    });
  }
}

void long_wait_is_reported() {
  TextExchange peers(2);
  std::vector<DeviceLog> logs(2);
  run_ranks(2, [&](int rank) {
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), small_slot_options());
    const auto c = connect_communicator(engine, peers, rank, 2);
    c->set_rank_names({"Ann", "Ben"});
    std::vector<float> memory(8);
    EXPECT(all_reduce(*c, rank, 2, memory, 8));
    EXPECT(c->idle());
    if (rank == 0) {
      Call call;
      call.in = call.out = memory.data();
      call.bytes = 32;
      call.timeout_ns = 30'000'000;
      EXPECT(c->run(call));
      EXPECT(c->has_waited_long());
      EXPECT(!c->has_waited_long());
      EXPECT(std::string(c->failure()->what()) == "NVLink engine: Ben did not come within 30 ms");
    }
    peers.exchange(rank, "");
  });
}

}  // namespace

int main() {
  different_versions_are_rejected();
  processes_on_one_gpu_are_rejected();
  gpus_without_nvlink_are_rejected();
  absent_rank_is_named();
  late_rank_gets_no_wrong_data();
  long_wait_is_reported();
  if (failures == 0) puts("ok");
  return failures == 0 ? 0 : 1;
}
