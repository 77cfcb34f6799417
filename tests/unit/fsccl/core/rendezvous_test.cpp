// What it costs the store that the ranks of a group find each other, and what happens where one of
// them ends on the way. Ranks are threads. Built by test_fsccl_core.py. Usage:
//   rendezvous_test <ranks> [<a key whose first value gets lost>]
// Prints "ranks sets adds gets bytes": all but the looks for keys, of which there are more the longer
// the ranks wait.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "board.h"

namespace {

using namespace fsccl;

void meet(Group& group, int ranks) {
  const auto& who = group.everyone(Deadline::after(Deadline::Ms(60000)));
  bool right = static_cast<int>(who.size()) == ranks;
  for (const Identity& w : who) right = right && w.pid == getpid() && !w.address.empty();
  if (right && group.clusters_text() == std::to_string(ranks) + " ranks") return;
  std::fprintf(stderr, "rank %d has met others\n", group.rank());
  std::_Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 2;
  Board board;
  if (argc > 2) board.loses = argv[2];
  if (board.loses == "roll/<host>") {
    board.loses = "roll/" + Identity::of_this_process(Settings()).domain;
  }
  std::vector<std::unique_ptr<Group>> groups(static_cast<size_t>(n));
  std::atomic<int> left{n};
  std::vector<std::thread> ranks;
  for (int r = 0; r < n; ++r) {
    ranks.emplace_back([&, r] {
      GroupConfig config;
      config.rank = r;
      config.size = n;
      config.settings.tcp.interface = "lo";
      Group group(std::make_unique<BoardStore>(board), config);
      meet(group, n);
      --left;
      while (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  for (std::thread& t : ranks) t.join();
  if (!board.loses.empty()) {
    std::fprintf(stderr, "nobody has set %s\n", board.loses.c_str());
    return 1;
  }
  if (board.looked_bytes > board.looks * 200 + static_cast<size_t>(n) * 2000) {
    std::fprintf(stderr, "%zu looks for %zu bytes of keys\n", board.looks, board.looked_bytes);
    return 1;
  }
  std::printf("%d %zu %zu %zu %zu\n", n, board.sets, board.adds, board.gets, board.bytes);
  return 0;
}
