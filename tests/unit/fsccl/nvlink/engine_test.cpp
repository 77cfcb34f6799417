// Tests of the NVLink engine on a CPU in place of GPUs: ranks are threads of one process, each with
// its own engine. The algorithms (kFlagged, kLines, ...), and the columns of a tuning table, are
// described in kernel_plan.h; channels, slots and cells in kernel_args.h and cells.h.
#include "host_device.h"

using namespace fsccl;
using namespace fsccl::nvlink;

namespace {

void table_selects_algorithms_by_size() {
  constexpr int kRanks = 3;
  TextExchange peers(kRanks);
  std::vector<DeviceLog> logs(kRanks);
  run_ranks(kRanks, [&](int rank) {
    Engine::Options options = small_slot_options();
    options.tables[kRanks] =
        TuningTable::parse(rank > 0 ? "all_reduce ordinary 1 other 0 0\n"
                                    : "all_reduce ordinary 4096 flagged 0 0\n"
                                      "all_reduce ordinary 65536 two_shot 0 0\n"
                                      "all_reduce ordinary 200000 staged 2 64\n"
                                      "all_reduce ordinary 200001 other 0 0\n");
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), options);
    const auto c = connect_communicator(engine, peers, rank, kRanks);
    std::vector<float> memory(1 << 16);
    EXPECT(all_reduce(*c, rank, kRanks, memory, 3));
    EXPECT(all_reduce(*c, rank, kRanks, memory, 16000));
    EXPECT(all_reduce(*c, rank, kRanks, memory, 50000));
    EXPECT(all_reduce(*c, rank, kRanks, memory, 1));
    Call large;
    large.in = large.out = memory.data();
    large.bytes = 200004;
    EXPECT(!c->run(large));
    large.reduction = {DType::kF32, RedOp::kBand, 1, 1};
    large.bytes = 8;
    EXPECT(!c->run(large));
    const KernelShape wide{Algorithm::kStaged, 0, 0};
    large.reduction.op = RedOp::kMax;
    large.bytes = 200004;
    EXPECT(c->run(large, &wide));
    peers.exchange(rank, "");
  });
  const std::vector<std::string> expected = {"reduce_flagged_f32_4", "all_reduce_lines_f32_4",
                                             "all_reduce_staged_f32_4", "reduce_flagged_f32_4",
                                             "all_reduce_staged_f32_4"};
  for (const DeviceLog& log : logs) EXPECT(log.kernels == expected);
}

void many_groups_share_the_heap() {
  constexpr int kRanks = 2, kGroups = 17;
  TextExchange peers(kRanks);
  std::vector<DeviceLog> logs(kRanks);
  run_ranks(kRanks, [&](int rank) {
    Engine::Options options = small_slot_options();
    options.tables[kRanks] = TuningTable::parse(
        "all_reduce ordinary 4096 flagged 0 0\n"
        "all_reduce ordinary 4097 staged 0 0\n");
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), options);
    std::vector<std::unique_ptr<Communicator>> groups;
    std::vector<float> memory(20000);
    for (int g = 0; g < kGroups; ++g) {
      groups.push_back(connect_communicator(engine, peers, rank, kRanks));
      EXPECT(all_reduce(*groups.back(), rank, kRanks, memory, 1 + g));
    }
    EXPECT(logs[rank].allocations == 1 + 3);  // eight arenas, then four at a time
    // Interleaved, small and staged.
    for (int turn = 0; turn < 40; ++turn) {
      const int g = turn * 7 % kGroups;
      EXPECT(all_reduce(*groups[g], rank, kRanks, memory, turn % 3 == 0 ? 20000 : 100));
    }
    // Data left in an arena does not disturb its next group.
    groups.clear();
    EXPECT(logs[rank].clears == 0);
    for (int g = 0; g < kGroups; ++g) {
      groups.push_back(connect_communicator(engine, peers, rank, kRanks));
      EXPECT(all_reduce(*groups.back(), rank, kRanks, memory, g % 2 == 0 ? 20000 : 9));
    }
    EXPECT(logs[rank].allocations == 1 + 3);
    EXPECT(logs[rank].clears > 0);
    peers.exchange(rank, "");
  });
}

// The group is the first one on one rank, with large slots, and one of many on the other.
void ranks_agree_on_the_smallest_slots() {
  constexpr int kRanks = 2;
  TextExchange peers(kRanks);
  std::vector<DeviceLog> logs(kRanks);
  run_ranks(kRanks, [&](int rank) {
    Engine::Options options = small_slot_options();
    options.tables[kRanks] = TuningTable::parse("all_reduce ordinary 1 staged 0 0\n");
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), options);
    std::vector<std::unique_ptr<Communicator>> others;
    for (int g = 0; rank == 1 && g < 9; ++g) {
      others.push_back(std::make_unique<Communicator>(engine, rank, kRanks, 0));
    }
    const auto c = connect_communicator(engine, peers, rank, kRanks);
    std::vector<float> memory(30000);
    EXPECT(all_reduce(*c, rank, kRanks, memory, 30000));
    EXPECT(logs[rank].kernels.back() == "all_reduce_staged_f32_2");
    peers.exchange(rank, "");
  });
}

void grids_respect_the_limit_of_every_rank() {
  constexpr int kRanks = 3;
  TextExchange peers(kRanks);
  std::vector<DeviceLog> logs(kRanks);
  run_ranks(kRanks, [&](int rank) {
    Engine::Options options = small_slot_options();
    options.tables[kRanks] = TuningTable::parse(
        "all_reduce ordinary 4096 flagged 0 64\n"
        "all_reduce ordinary 30000 lines 0 64\n"
        "all_reduce ordinary 60000 staged 16 64\n"
        "all_reduce ordinary 60001 staged 0 64\n");
    if (rank == 1) options.max_blocks = 5;
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), options);
    const auto c = connect_communicator(engine, peers, rank, kRanks);
    std::vector<float> memory(1 << 16);
    for (const size_t count : {1000, 7000, 14000, 60000}) {
      EXPECT(all_reduce(*c, rank, kRanks, memory, count));
    }
    peers.exchange(rank, "");
  });
  for (const DeviceLog& log : logs) EXPECT((log.blocks == std::vector<u32>{5, 5, 5, 5}));
}

void registered_memory_is_used_directly() {
  constexpr int kRanks = 4;
  TextExchange peers(kRanks);
  std::vector<DeviceLog> logs(kRanks);
  std::vector<std::vector<Vec>> memory(kRanks, std::vector<Vec>(4096));
  run_ranks(kRanks, [&](int rank) {
    Engine::Options options = small_slot_options();
    options.tables[kRanks] = TuningTable::parse(
        "all_gather ordinary 1 staged 1 32\n"
        "all_gather registered 1 direct 2 32\n");
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), options);
    const auto c = connect_communicator(engine, peers, rank, kRanks);
    auto* const at = reinterpret_cast<char*>(memory[rank].data());
    c->connect_memory(at, 65536, peers.exchange(rank, c->memory_handle(at, 65536)));
    std::vector<u32> own_values(1000, static_cast<u32>(rank + 1));
    Call call;
    call.collective = Collective::kAllGather;
    call.in = own_values.data();
    call.bytes = 4000;
    call.out = at + 160;
    EXPECT(c->run(call));
    for (u32 i = 0; i < 4000; ++i) {
      u32 value = 0;
      memcpy(&value, at + 160 + i * 4, 4);
      EXPECT(value == i / 1000 + 1);
    }
    call.bytes = 3996;  // parts would begin at odd places
    EXPECT(c->run(call));
    call.bytes = 4000;
    call.out = at + 65536 - 8000;  // goes beyond
    std::vector<char> elsewhere(16000);
    call.out = elsewhere.data();
    EXPECT(c->run(call));
    call.out = at + 160;
    c->disconnect_memory(at + 16);
    EXPECT(logs[rank].releases == 0);
    c->disconnect_memory(at);
    EXPECT(logs[rank].releases == kRanks - 1);
    EXPECT(c->run(call));
    EXPECT(c->memory_handle(at, 16) != "");
    EXPECT(error_of([&] { c->memory_handle(at + 8, 16); }).find("multiple of 16") !=
           std::string::npos);
    peers.exchange(rank, "");
  });
  for (const DeviceLog& log : logs) {
    EXPECT((log.kernels ==
            std::vector<std::string>{"copy_direct", "copy_staged", "copy_staged", "copy_staged"}));
  }
}

void another_stream_is_ordered_after_the_last() {
  TextExchange peers(2);
  std::vector<DeviceLog> logs(2);
  run_ranks(2, [&](int rank) {
    Engine engine(std::make_unique<HostDevice>(&logs[rank]), small_slot_options());
    const auto c = connect_communicator(engine, peers, rank, 2);
    std::vector<float> memory(8);
    int first = 0, second = 0;
    for (int* stream : {&first, &first, &second, &second, &first}) {
      EXPECT(all_reduce(*c, rank, 2, memory, 8, stream));
    }
    EXPECT(logs[rank].stream_orderings == 2);
    peers.exchange(rank, "");
  });
}

// Arenas in memory that all ranks reach, although their GPUs do not reach each other.
struct BorrowedArenas : Communicator::BorrowedArenas {
  explicit BorrowedArenas(int ranks) : Communicator::BorrowedArenas{{}, 32, 4096} {
    const u64 arena_size = arena_bytes(channels, slot_bytes);
    memory.resize(arena_size * ranks / sizeof(Packet));
    char* const first = reinterpret_cast<char*>(memory.data());
    for (int r = 0; r < ranks; ++r) arenas.push_back(first + arena_size * r);
  }
  std::vector<Packet> memory;
};

void borrowed_arenas_carry_messages() {
  for (const int ranks : {2, 5, 8}) {
    TextExchange peers(ranks);
    BorrowedArenas borrowed(ranks);
    std::vector<DeviceLog> logs(ranks);
    run_ranks(ranks, [&](int rank) {
      Engine engine(std::make_unique<HostDevice>(&logs[rank]), small_slot_options());
      {
        Communicator c(engine, rank, 0, borrowed);
        std::vector<float> memory(1 << 16);
        for (const size_t count : {1, 7, 256, 40000, 4096, 3}) {
          EXPECT(all_reduce(c, rank, ranks, memory, count));
        }
        std::vector<float> parts(3 * ranks), own_values(3, static_cast<float>(rank));
        Call call;
        call.collective = Collective::kAllGather;
        call.in = own_values.data();
        call.out = parts.data();
        call.bytes = 12;
        EXPECT(c.run(call));
        for (int p = 0; p < ranks; ++p) EXPECT(parts[3 * p] == static_cast<float>(p));
        call.collective = Collective::kReduceScatter;
        call.in = parts.data();
        call.out = own_values.data();
        EXPECT(c.run(call));
        EXPECT(own_values[2] == static_cast<float>(rank * ranks));
        EXPECT(c.supports(call));
        call.collective = Collective::kBroadcast;
        call.root = ranks - 1;
        call.in = call.out = parts.data();
        parts[0] = static_cast<float>(rank);
        EXPECT(c.run(call));
        EXPECT(parts[0] == static_cast<float>(ranks - 1));
        peers.exchange(rank, "");
      }
      EXPECT(logs[rank].allocations == 0);
    });
    const std::string capacity = ranks == 2 ? "_2" : "_8";
    const std::string sum = "all_reduce_staged_f32" + capacity, copy = "copy_staged";
    const std::string part = "reduce_scatter_staged_f32" + capacity;
    const std::vector<std::string> expected = {sum, sum, sum, sum, sum, sum, copy, part, copy};
    for (const DeviceLog& log : logs) EXPECT(log.kernels == expected);
  }
}

void kernels_are_found_in_their_units() {
  const auto unit = [](Collective c, Algorithm a, DType t, int ranks) {
    return unit_of(plan_kernel(c, {a, 0, 0}, t, 1 << 14, ranks).kernel);
  };
  for (const int ranks : {2, 3, 8}) {
    for (const Algorithm a :
         {Algorithm::kFlagged, Algorithm::kLines, Algorithm::kStaged, Algorithm::kDirect}) {
      EXPECT(unit(Collective::kAllReduce, a, DType::kBF16, ranks) == "bf16");
      EXPECT(unit(Collective::kReduceScatter, a, DType::kU8, ranks) == "u8");
      EXPECT(unit(Collective::kAllGather, a, DType::kF64, ranks) == "copy");
    }
    EXPECT(unit(Collective::kAllReduce, Algorithm::kTwoShot, DType::kI16, ranks) == "i16");
  }
}

}  // namespace

int main() {
  table_selects_algorithms_by_size();
  many_groups_share_the_heap();
  ranks_agree_on_the_smallest_slots();
  grids_respect_the_limit_of_every_rank();
  registered_memory_is_used_directly();
  another_stream_is_ordered_after_the_last();
  borrowed_arenas_carry_messages();
  kernels_are_found_in_their_units();
  if (failures == 0) puts("ok");
  return failures == 0 ? 0 : 1;
}
