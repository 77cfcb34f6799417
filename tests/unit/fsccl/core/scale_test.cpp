// What many ranks, which are threads, cost the store, and in sockets and threads. Built by
// test_fsccl_core.py. Usage:
//   scale_test meet <ranks> [<a key whose first value gets lost>]
// prints "sets adds gets bytes": all but the looks for keys, of which there are more the longer the
// ranks wait; somebody ends on the way where a value gets lost.
//   scale_test barrier <ranks> [<the most descriptors that the process may have>]
// of ranks that share no memory, prints "sockets threads", or what a rank is told that has none left.
//   scale_test first <ranks>
// of ranks that share no memory and come together, until the end of their first barrier: prints
// "sets adds gets bytes sockets threads seconds".
//   scale_test traffic <all_reduce, reduce, broadcast or barrier> <ranks> <bytes> [<algorithm>]
// of ranks that share no memory, prints "from to messages bytes", a line a pair.
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "board.h"

namespace {

using namespace fsccl;

namespace fs = std::filesystem;

constexpr const char* kHost = "roll/<host>";

Deadline patience() { return Deadline::after(Deadline::Ms(60000)); }

size_t sockets() {
  size_t n = 0;
  for (const auto& fd : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    n += fs::read_symlink(fd, gone).string().rfind("socket:", 0) == 0 ? 1 : 0;
  }
  return n;
}

size_t threads() {
  const fs::directory_iterator all("/proc/self/task");
  return static_cast<size_t>(std::distance(fs::begin(all), fs::end(all)));
}

// All ranks at once; none goes before all have come to the end.
template <class F>
void on_all(Board& board, int n, const Settings& settings, F f) {
  std::atomic<int> left{n};
  std::vector<std::thread> ranks;
  for (int r = 0; r < n; ++r) {
    ranks.emplace_back([&, r] {
      GroupConfig config;
      config.rank = r;
      config.size = n;
      config.settings = settings;
      Group group(std::make_unique<BoardStore>(board), config);
      f(group, left);
      --left;
      while (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  for (std::thread& t : ranks) t.join();
}

// Rank 0 before the others, and all after everybody has come: how long a rank waits is no matter then.
void meet(Board& board, int n, const Settings& settings) {
  std::atomic<int> come{0}, read{0};
  on_all(board, n, settings, [&](Group& group, auto&) {
    ++come;
    while (come < n || (group.rank() > 0 && read == 0)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto& who = group.everyone(patience());
    bool right = static_cast<int>(who.size()) == n;
    for (const Identity& w : who) right = right && w.pid == getpid() && !w.address.empty();
    ++read;
    if (right && group.clusters_text() == std::to_string(n) + " ranks") return;
    std::fprintf(stderr, "rank %d has met others\n", group.rank());
    std::_Exit(1);
  });
  const bool cheap = board.looked_bytes <= board.looks * 200 + static_cast<size_t>(n) * 2000;
  if (!cheap || !board.loses.empty()) {
    std::fprintf(stderr, "%zu looks for %zu bytes of keys, %s is not lost\n", board.looks,
                 board.looked_bytes, board.loses.c_str());
    std::_Exit(1);
  }
  std::printf("%zu %zu %zu %zu\n", board.sets, board.adds, board.gets, board.bytes);
}

void barrier(Board& board, int n, Settings settings) {
  settings.shared_memory = false;
  on_all(board, n, settings, [](Group& group, std::atomic<int>& left) {
    try {
      group.barrier(patience());
    } catch (const Error& e) {
      static std::atomic<bool> told{false};
      if (!told.exchange(true)) std::puts(e.what());
      return group.shutdown();
    }
    while (group.rank() == 0 && left > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (group.rank() == 0) std::printf("%zu %zu\n", sockets(), threads());
  });
}

void first(Board& board, int n, Settings settings) {
  using Clock = std::chrono::steady_clock;
  settings.shared_memory = false;
  std::atomic<int> come{0}, done{0};
  std::atomic<Clock::time_point> begun{Clock::now()};
  on_all(board, n, settings, [&](Group& group, std::atomic<int>& left) {
    if (++come == n) begun = Clock::now();
    while (come < n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    group.barrier(patience());
    if (++done < n) return;
    const std::chrono::duration<double> took = Clock::now() - begun.load();
    while (left > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::printf("%zu %zu %zu %zu %zu %zu %.3f\n", board.sets, board.adds, board.gets, board.bytes,
                sockets(), threads() - static_cast<size_t>(n), took.count());
  });
}

void traffic(Board& board, const std::string& what, int n, size_t bytes, Settings settings) {
  settings.shared_memory = false;
  std::vector<std::vector<Transport::Traffic>> sent(static_cast<size_t>(n));
  on_all(board, n, settings, [&](Group& group, auto&) {
    std::vector<float> v(bytes / 4, 1);
    const Reduction sum{DType::kF32, RedOp::kSum, 1, n};
    if (what == "all_reduce") group.all_reduce(v.data(), v.data(), v.size(), sum, patience());
    if (what == "reduce") group.reduce(v.data(), v.data(), v.size(), sum, n / 3, patience());
    if (what == "broadcast") group.broadcast(BufferList(v.data(), bytes), n / 3, patience());
    if (what == "barrier") group.barrier(patience());
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
  const std::string what = argv[1], more = argc > 3 ? argv[3] : "";
  const int n = std::atoi(argv[what == "traffic" ? 3 : 2]);
  Board board;
  Settings settings;
  settings.tcp.interface = "lo";
  if (what == "meet") {
    board.loses = more == kHost ? "roll/" + Identity::of_this_process(settings).domain : more;
    meet(board, n, settings);
  } else if (what == "first") {
    first(board, n, settings);
  } else if (what == "traffic" && argc >= 5) {
    if (argc == 6) settings.algorithm = algorithm_of(argv[5], "algorithm");
    traffic(board, argv[2], n, static_cast<size_t>(std::atol(argv[4])), settings);
  } else {
    const auto most = static_cast<rlim_t>(std::atol(more.c_str()));
    const rlimit limit{most, most};
    if (!more.empty() && setrlimit(RLIMIT_NOFILE, &limit) != 0) return 2;
    barrier(board, n, settings);
  }
  return 0;
}
