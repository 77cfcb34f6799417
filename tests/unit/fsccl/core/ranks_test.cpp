// Tests of all collectives of Group, with ranks that are threads: results are compared with a
// reference, for many sizes and numbers of ranks per node; then errors. Built with a sanitizer by
// test_fsccl_core.py. Usage:
//   ranks_test <ranks per node, such as 2,2 or 4> <seed> <rounds> [<pipeline_k> <pipeline_nelem>]
//   ranks_test <ranks per node> <seed> <rounds> <algorithm>
//   ranks_test <ranks per node> <seed> <rounds> <algorithm>@mailboxes
// pipeline_k and pipeline_nelem are the number of chunks and the elements per send of a pipelined
// schedule (settings.h). With @mailboxes the messages between nodes are delivered in memory, in
// random order (mailbox_transport.h), instead of over TCP.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <thread>

#include "counting_store.h"
#include "executor.h"
#include "mailbox_transport.h"
#include "mismatched_calls.h"
#include "reduction_checks.h"
#include "text.h"

namespace {

using namespace fsccl;

// Returns element i of rank r in a round: small integers, which are exact in every type.
int64_t value(int rank, size_t i, int round) {
  return static_cast<int64_t>(
      (i * 7 + static_cast<size_t>(rank) * 13 + static_cast<size_t>(round)) % 23);
}

[[noreturn]] void fail_test(const char* op, int rank, size_t i, double actual, double expected) {
  std::fprintf(stderr, "%s: rank %d element %zu is %g, expected %g\n", op, rank, i, actual,
               expected);
  std::_Exit(1);
}

// Runs every collective on one rank and compares the results with a reference.
class RankTest {
 public:
  RankTest(Group& group, int n) : group_(group), rank_(group.rank()), size_(n) {}

  void run_round(size_t count, int round) {
    count_ = count;
    round_ = round;
    root_ = round % size_;
    all_reduce();
    reduce();
    reduce_scatter();
    all_gather();
    broadcast();
    gather_scatter();
    all_to_all();
    exchange_with_neighbours();
    group_.barrier(deadline());
    group_.monitored_barrier(deadline());
  }

 private:
  static Deadline deadline() { return Deadline::after(Deadline::Ms(60000)); }
  Reduction int32_sum() const {
    Reduction sum;
    sum.dtype = DType::kI32;
    sum.op = RedOp::kSum;
    sum.divisor = size_;
    return sum;
  }
  std::vector<int32_t> input_of(size_t count, int rank) const {
    std::vector<int32_t> v(count);
    for (size_t i = 0; i < count; ++i) v[i] = static_cast<int32_t>(value(rank, i, round_));
    return v;
  }
  int32_t sum(size_t i) const {
    int64_t s = 0;
    for (int p = 0; p < size_; ++p) s += value(p, i, round_);
    return static_cast<int32_t>(s);
  }
  void expect(const char* op, size_t i, int32_t actual, int64_t expected) const {
    if (actual != expected) {
      fail_test(op, rank_, i, static_cast<double>(actual), static_cast<double>(expected));
    }
  }
  static BufferLists split(std::vector<int32_t>& v, const std::vector<size_t>& counts) {
    BufferLists out;
    size_t at = 0;
    for (const size_t c : counts) {
      out.emplace_back(v.data() + at, c * 4);
      at += c;
    }
    return out;
  }
  // Returns element counts that differ between ranks: `count_ + p` for rank p.
  std::vector<size_t> uneven_counts() const {
    std::vector<size_t> c;
    for (int p = 0; p < size_; ++p) c.push_back(count_ == 0 ? 0 : count_ + static_cast<size_t>(p));
    return c;
  }
  static size_t total(const std::vector<size_t>& c) {
    size_t s = 0;
    for (const size_t x : c) s += x;
    return s;
  }

  void all_reduce() {
    auto v = input_of(count_, rank_);
    group_.all_reduce(v.data(), v.data(), count_, int32_sum(), deadline());
    for (size_t i = 0; i < count_; ++i) expect("all_reduce", i, v[i], sum(i));
  }
  void reduce() {
    auto v = input_of(count_, rank_);
    std::vector<int32_t> out(count_, -1);
    group_.reduce(v.data(), out.data(), count_, int32_sum(), root_, deadline());
    for (size_t i = 0; i < count_; ++i) expect("reduce", i, out[i], rank_ == root_ ? sum(i) : -1);
  }
  void reduce_scatter() {
    const auto counts = uneven_counts();
    auto v = input_of(total(counts), rank_);
    const auto me = static_cast<size_t>(rank_);
    std::vector<int32_t> out(counts[me], -1);
    group_.reduce_scatter(split(v, counts), BufferList(out.data(), out.size() * 4), int32_sum(),
                          deadline());
    size_t base = 0;
    for (size_t p = 0; p < me; ++p) base += counts[p];
    for (size_t i = 0; i < out.size(); ++i) expect("reduce_scatter", i, out[i], sum(base + i));
  }
  void all_gather() {
    const auto counts = uneven_counts();
    auto v = input_of(counts[static_cast<size_t>(rank_)], rank_);
    std::vector<int32_t> out(total(counts), -1);
    group_.all_gather(BufferList(v.data(), v.size() * 4), split(out, counts), deadline());
    size_t at = 0;
    for (int p = 0; p < size_; ++p) {
      for (size_t i = 0; i < counts[static_cast<size_t>(p)]; ++i, ++at) {
        expect("all_gather", at, out[at], value(p, i, round_));
      }
    }
  }
  void broadcast() {
    auto v = input_of(count_, rank_);
    group_.broadcast(BufferList(v.data(), count_ * 4), root_, deadline());
    for (size_t i = 0; i < count_; ++i) expect("broadcast", i, v[i], value(root_, i, round_));
  }
  void gather_scatter() {
    const auto counts = uneven_counts();
    auto v = input_of(counts[static_cast<size_t>(rank_)], rank_);
    std::vector<int32_t> gathered(rank_ == root_ ? total(counts) : 0, -1);
    const auto parts = rank_ == root_ ? split(gathered, counts) : BufferLists();
    group_.gather(BufferList(v.data(), v.size() * 4), parts, root_, deadline());
    std::vector<int32_t> back(v.size(), -1);
    group_.scatter(parts, BufferList(back.data(), back.size() * 4), root_, deadline());
    for (size_t i = 0; i < v.size(); ++i) expect("gather+scatter", i, back[i], v[i]);
  }
  void all_to_all() {  // rank r sends count + r * p elements to rank p
    std::vector<size_t> out_counts, in_counts;
    for (int p = 0; p < size_; ++p) {
      const size_t skew = static_cast<size_t>(rank_) * static_cast<size_t>(p);
      out_counts.push_back(count_ == 0 && p == root_ ? 0 : count_ + skew);
      in_counts.push_back(count_ == 0 && rank_ == root_ ? 0 : count_ + skew);
    }
    auto v = input_of(total(out_counts), rank_);
    std::vector<int32_t> out(total(in_counts), -1);
    group_.all_to_all(split(v, out_counts), split(out, in_counts), deadline());
    size_t at = 0;
    for (int p = 0; p < size_; ++p) {
      size_t base = 0;
      for (int q = 0; q < rank_; ++q) {
        base += count_ == 0 && q == root_ ? 0 : count_ + static_cast<size_t>(p * q);
      }
      for (size_t i = 0; i < in_counts[static_cast<size_t>(p)]; ++i, ++at) {
        expect("all_to_all", at, out[at], value(p, base + i, round_));
      }
    }
  }
  // Receives messages with two tags in the opposite order of sending, and one message from any
  // source.
  void exchange_with_neighbours() {
    if (size_ == 1) return;
    const int to = (rank_ + 1) % size_, from = (rank_ + size_ - 1) % size_;
    auto v = input_of(count_, rank_);
    std::vector<int32_t> a(count_, -1), b(count_, -1), c(1, -1);
    auto own_rank = std::vector<int32_t>{rank_};
    std::vector<RequestPtr> requests;
    const auto bytes = count_ * 4;
    requests.push_back(group_.send(to, 1, BufferList(v.data(), bytes), deadline()));
    requests.push_back(group_.send(to, 2, BufferList(v.data(), bytes), deadline()));
    requests.push_back(group_.send(to, 3, BufferList(own_rank.data(), 4), deadline()));
    requests.push_back(group_.recv(from, 2, BufferList(b.data(), bytes), deadline()));
    requests.push_back(group_.recv(from, 1, BufferList(a.data(), bytes), deadline()));
    requests.push_back(group_.recv(Group::kAnySource, 3, BufferList(c.data(), 4), deadline()));
    for (const auto& r : requests) group_.wait(OpCode::kRecv, r, deadline());
    expect("recv from anyone", 0, c[0], from);
    expect("source", 0, requests.back()->peer, from);
    for (size_t i = 0; i < count_; ++i) {
      expect("recv tag 1", i, a[i], value(from, i, round_));
      expect("recv tag 2", i, b[i], value(from, i, round_));
    }
  }

  Group& group_;
  int rank_, size_;
  size_t count_ = 0;
  int round_ = 0, root_ = 0;
};

// One rank aborts while all ranks call operations. The current and all later calls on all ranks get
// the error message of the abort.
void abort_during_operations(Group& group) {
  static std::atomic<int> ranks_ready{0};  // a rank may still be in the previous operation
  ++ranks_ready;
  std::thread aborting_thread;
  if (group.rank() == 0) {
    aborting_thread = std::thread([&group] {
      while (ranks_ready < group.size()) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      group.abort("rank 0 gives up");
    });
  }
  std::vector<int32_t> v(50000);
  const Reduction sum{DType::kI32, RedOp::kSum, /*factor=*/1, /*divisor=*/group.size()};
  for (int failures = 0; failures < 2;) {
    const Deadline d = Deadline::after(Deadline::Ms(30000));
    try {
      if (failures == 0) group.all_reduce(v.data(), v.data(), v.size(), sum, d);
      if (failures == 1) group.barrier(d);
    } catch (const Error& e) {
      ++failures;
      if (std::string(e.what()).find("rank 0 gives up") != std::string::npos) continue;
      std::fprintf(stderr, "rank %d: %s\n", group.rank(), e.what());
      std::_Exit(1);
    }
  }
  if (aborting_thread.joinable()) aborting_thread.join();
}

// A Device is a process's access to a network (transport.h). Null: TCP on the loopback interface.
using DevicePtr = std::shared_ptr<Device>;

void run_rank(StoreContents& contents, int rank, int n, const Settings& settings,
              const DevicePtr& network, unsigned seed, int rounds) {
  GroupConfig config;
  config.network = network;
  config.rank = rank;
  config.size = n;
  config.settings = settings;
  Group group(std::make_unique<CountingStore>(contents), config);
  RankTest test(group, n);
  std::mt19937 random(seed);  // the same on all ranks
  const std::vector<size_t> fixed = {0, 1, 7, 1025, 70001};
  {
    Executor executor;
    for (int k = 0; k < rounds; ++k) {
      const auto i = static_cast<size_t>(k);
      const size_t count = i < fixed.size() ? fixed[i] : random() % 60000;
      const auto job = [&test, rank, count, k] {
        try {
          test.run_round(count, k);
        } catch (const std::exception& e) {
          std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
          std::_Exit(1);
        }
      };
      const bool allow_inline = k % 2 == 0;  // else a thread of the executor runs the job
      executor.run({job, /*run_callbacks=*/{}}, allow_inline);
    }
    executor.drain(std::chrono::milliseconds(60000));
  }
  check_identical_results(group, 20001);
  if (settings.algorithm != Algorithm::kAuto) {
    check_all_types(group, {1, 3000, 30011});
    const std::string algorithm = name_of(settings.algorithm);
    int one_element = 1;
    const Reduction max{DType::kI32, RedOp::kMax, /*factor=*/1, /*divisor=*/n};
    group.all_reduce(&one_element, &one_element, 1, max,
                     Deadline::after(Deadline::Ms(60000)));
    if (std::string(group.last_algorithm()).rfind(algorithm, 0) != 0) {
      std::fprintf(stderr, "%s is not %s\n", group.last_algorithm(), algorithm.c_str());
      std::_Exit(1);
    }
  }
  if (n > 1) abort_during_operations(group);
  group.shutdown();
}

// All other ranks wait for the last one. awaited_rank_name() returns it, before it has joined the
// group and afterwards.
void late_rank_is_named(const Settings& settings, int n) {
  StoreContents contents;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::thread> ranks;
  const auto join = [&] {
    GroupConfig config;
    config.rank = static_cast<int>(groups.size());
    config.size = n;
    config.settings = settings;
    groups.push_back(std::make_unique<Group>(std::make_unique<CountingStore>(contents), config));
  };
  const auto call = [](Group& group) { group.barrier(Deadline::after(Deadline::Ms(60000))); };
  const auto wait_until_all_name = [&](const std::string& message) {
    for (int r = 0; r + 1 < n; ++r) {
      const auto last_named = [&] {
        return groups[static_cast<size_t>(r)]->awaited_rank_name(Deadline::after(Deadline::Ms(50)));
      };
      while (last_named().find(message) == std::string::npos) std::this_thread::yield();
    }
  };
  while (static_cast<int>(groups.size()) + 1 < n) join();
  for (const auto& g : groups) ranks.emplace_back([&call, &group = *g] { call(group); });
  const std::string last = "rank " + std::to_string(n - 1);
  wait_until_all_name(last);
  join();
  wait_until_all_name(last + " [");
  call(*groups.back());
  for (auto& t : ranks) t.join();
}

// A peer runs another protocol version; its identity may have any format after the first line.
void other_version_is_refused(const Settings& settings) {
  StoreContents contents;
  contents.values["rank/1"] = "99\nwho knows";
  contents.values["ranks"] = "1";
  GroupConfig config;
  config.size = 2;
  config.settings = settings;
  config.settings.node_sizes.clear();
  Group group(std::make_unique<CountingStore>(contents), config);
  try {
    group.barrier(Deadline::after(Deadline::Ms(30000)));
  } catch (const Error& e) {
    const std::string message = e.what();
    if (e.fault == Fault::kMismatch && e.rank == 1 &&
        message.find("rank 1 [") != std::string::npos &&
        message.find("speaks fsccl protocol 99, rank 0 [") != std::string::npos) {
      return;
    }
    std::fprintf(stderr, "with a peer of another version: %s\n", e.what());
  }
  std::_Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc > 6) return 2;
  Settings settings;
  std::stringstream sizes_text(argv[1]);
  int n = 0;
  for (std::string field; std::getline(sizes_text, field, ',');) {
    settings.node_sizes.push_back(std::atoi(field.c_str()));
    n += settings.node_sizes.back();
  }
  settings.slot_bytes = 32 << 10;  // small, so that small sizes take many steps
  settings.chunk_bytes = 48 << 10;
  settings.one_shot_bytes = 4096;
  const auto seed = static_cast<unsigned>(std::atoi(argv[2]));
  DevicePtr network;
  if (argc == 5) {
    const std::vector<std::string> algorithm_and_transport = split(argv[4], '@');
    settings.algorithm = algorithm_of(algorithm_and_transport[0], "algorithm");
    if (algorithm_and_transport.size() > 1) network = std::make_shared<MailboxNetwork>(seed);
  }
  if (argc == 6) {
    settings.pipeline_k = std::atoi(argv[4]);
    settings.pipeline_nelem = static_cast<size_t>(std::atoi(argv[5]));
    settings.one_shot_bytes = 0;  // use the pipeline for small sizes as well
  }
  settings.tcp.interface = "lo";
  settings.debug = std::getenv("VERBOSE") != nullptr;
  StoreContents contents;
  std::vector<std::thread> ranks;
  for (int r = 0; r < n; ++r) {
    ranks.emplace_back([&, r] {
      try {
        run_rank(contents, r, n, settings, network, seed, std::atoi(argv[3]));
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", r, e.what());
        std::_Exit(1);
      }
    });
  }
  for (auto& t : ranks) t.join();
  if (argc == 5) return std::puts("ok") < 0 ? 1 : 0;
  expect_mismatch_errors(settings, n);
  fail_before_first_collective(settings, n);
  fail_to_publish_shared_memory(settings, n);
  late_rank_is_named(settings, n);
  other_version_is_refused(settings);
  std::puts("ok");
  return 0;
}
