// Measures the cost of many ranks, which are threads: store operations, sockets, threads, messages.
// Built by test_fsccl_core.py. Usage:
//
//   scale_test meet <ranks> [<a key whose first value gets lost>]
//
// runs a rendezvous and prints "sets adds gets bytes" of the store. Calls of has() are not counted,
// because their number grows with the time that ranks wait. A lost value simulates a rank that ends
// before it sets the key.
//
//   scale_test barrier <ranks> [<maximum number of descriptors of the process>]
//
// runs a barrier of ranks that share no memory and prints "sockets threads", or the error of a rank
// if there are not enough descriptors.
//
//   scale_test first <ranks>
//
// starts ranks that share no memory together, and prints "sets adds gets bytes sockets threads
// seconds" at the end of their first barrier.
//
//   scale_test traffic <all_reduce, reduce, broadcast or barrier> <ranks> <bytes> [<algorithm>]
//
// runs an operation of ranks that share no memory and prints "from to messages bytes", one line per
// pair of ranks.
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "counting_store.h"

namespace {

using namespace fsccl;

namespace fs = std::filesystem;

constexpr const char* kHostKeyPlaceholder = "roll/<host>";

Deadline test_deadline() { return Deadline::after(Deadline::Ms(60000)); }

size_t count_sockets() {
  size_t n = 0;
  for (const auto& fd : fs::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    n += fs::read_symlink(fd, error).string().rfind("socket:", 0) == 0 ? 1 : 0;
  }
  return n;
}

size_t count_threads() {
  const fs::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(fs::begin(tasks), fs::end(tasks)));
}

// Runs all ranks at once. No group is destroyed before all have finished.
template <class F>
void run_on_all_ranks(StoreContents& contents, int n, const Settings& settings, F body) {
  std::atomic<int> unfinished{n};
  std::vector<std::thread> ranks;
  for (int r = 0; r < n; ++r) {
    ranks.emplace_back([&, r] {
      GroupConfig config;
      config.rank = r;
      config.size = n;
      config.settings = settings;
      Group group(std::make_unique<CountingStore>(contents), config);
      body(group, unfinished);
      --unfinished;
      while (unfinished > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  for (std::thread& t : ranks) t.join();
}

// Rank 0 first exchanges identities when all ranks have started, and the others after it, so that
// the cost does not depend on how long ranks wait.
void rendezvous_cost(StoreContents& contents, int n, const Settings& settings) {
  std::atomic<int> started{0}, rank0_done{0};
  run_on_all_ranks(contents, n, settings, [&](Group& group, auto&) {
    ++started;
    while (started < n || (group.rank() > 0 && rank0_done == 0)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto& identities = group.identities(test_deadline());
    bool is_complete = static_cast<int>(identities.size()) == n;
    for (const Identity& identity : identities)
      is_complete = is_complete && identity.pid == getpid() && !identity.address.empty();
    ++rank0_done;
    if (is_complete && group.nodes_text() == std::to_string(n) + " ranks") return;
    std::fprintf(stderr, "rank %d has unexpected identities or nodes\n", group.rank());
    std::_Exit(1);
  });
  // Polls pass single keys of at most 200 bytes; each rank checks all keys at most a few times.
  const bool is_cheap =
      contents.has_key_bytes <= contents.has_calls * 200 + static_cast<size_t>(n) * 2000;
  if (!is_cheap || !contents.lost_key.empty()) {
    std::fprintf(stderr, "has() was called %zu times, with %zu bytes of keys; lost key: '%s'\n",
                 contents.has_calls, contents.has_key_bytes, contents.lost_key.c_str());
    std::_Exit(1);
  }
  std::printf("%zu %zu %zu %zu\n", contents.sets, contents.adds, contents.gets, contents.bytes);
}

void barrier_cost(StoreContents& contents, int n, Settings settings) {
  settings.shared_memory = false;
  run_on_all_ranks(contents, n, settings, [](Group& group, std::atomic<int>& unfinished) {
    try {
      group.barrier(test_deadline());
    } catch (const Error& e) {
      static std::atomic<bool> is_printed{false};
      if (!is_printed.exchange(true)) std::puts(e.what());
      return group.shutdown();
    }
    while (group.rank() == 0 && unfinished > 1)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (group.rank() == 0) std::printf("%zu %zu\n", count_sockets(), count_threads());
  });
}

void first_barrier_cost(StoreContents& contents, int n, Settings settings) {
  using Clock = std::chrono::steady_clock;
  settings.shared_memory = false;
  std::atomic<int> started{0}, done{0};
  std::atomic<Clock::time_point> start_time{Clock::now()};
  run_on_all_ranks(contents, n, settings, [&](Group& group, std::atomic<int>& unfinished) {
    if (++started == n) start_time = Clock::now();
    while (started < n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    group.barrier(test_deadline());
    if (++done < n) return;
    const std::chrono::duration<double> elapsed = Clock::now() - start_time.load();
    while (unfinished > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::printf("%zu %zu %zu %zu %zu %zu %.3f\n", contents.sets, contents.adds, contents.gets,
                contents.bytes, count_sockets(), count_threads() - static_cast<size_t>(n),
                elapsed.count());
  });
}

void traffic_cost(StoreContents& contents, const std::string& operation, int n, size_t bytes,
                  Settings settings) {
  settings.shared_memory = false;
  std::vector<std::vector<Transport::Traffic>> sent(static_cast<size_t>(n));
  run_on_all_ranks(contents, n, settings, [&](Group& group, auto&) {
    std::vector<float> v(bytes / 4, 1);
    const Reduction sum{DType::kF32, RedOp::kSum, /*factor=*/1, /*divisor=*/n};
    if (operation == "all_reduce")
      group.all_reduce(v.data(), v.data(), v.size(), sum, test_deadline());
    if (operation == "reduce")
      group.reduce(v.data(), v.data(), v.size(), sum, n / 3, test_deadline());
    if (operation == "broadcast")
      group.broadcast(BufferList(v.data(), bytes), n / 3, test_deadline());
    if (operation == "barrier") group.barrier(test_deadline());
    sent[static_cast<size_t>(group.rank())] = group.traffic();
  });
  for (size_t from = 0; from < sent.size(); ++from) {
    for (size_t to = 0; to < sent.size(); ++to) {
      const Transport::Traffic& t = sent[from][to];
      if (t.messages > 0) std::printf("%zu %zu %zu %zu\n", from, to, t.messages, t.bytes);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string mode = argv[1], option = argc > 3 ? argv[3] : "";
  const int n = std::atoi(argv[mode == "traffic" ? 3 : 2]);
  StoreContents contents;
  Settings settings;
  settings.tcp.interface = "lo";
  if (mode == "meet") {
    contents.lost_key = option == kHostKeyPlaceholder
                            ? "roll/" + Identity::of_this_process(settings).domain
                            : option;
    rendezvous_cost(contents, n, settings);
  } else if (mode == "first") {
    first_barrier_cost(contents, n, settings);
  } else if (mode == "traffic" && argc >= 5) {
    if (argc == 6) settings.algorithm = algorithm_of(argv[5], "algorithm");
    traffic_cost(contents, argv[2], n, static_cast<size_t>(std::atol(argv[4])), settings);
  } else {
    const auto limit = static_cast<rlim_t>(std::atol(option.c_str()));
    const rlimit max_descriptors{limit, limit};
    if (!option.empty() && setrlimit(RLIMIT_NOFILE, &max_descriptors) != 0) return 2;
    barrier_cost(contents, n, settings);
  }
  return 0;
}
