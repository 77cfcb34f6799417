// Ranks that agree on a generation over a store with entries of earlier ranks. Usage:
//
//   generation_test <number of random histories>
#include "generation.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "counting_store.h"

namespace {

using namespace fsccl;

constexpr int kRanks = 4;
constexpr int kNeverEnds = 1 << 30;

// Store of a rank whose process ends after a number of operations.
class EndingStore : public CountingStore {
 public:
  EndingStore(StoreContents& contents, int operations)
      : CountingStore(contents), remaining_(operations) {}
  void set(const std::string& key, const std::string& value) override {
    count();
    CountingStore::set(key, value);
  }
  int64_t add(const std::string& key, int64_t n) override {
    count();
    return CountingStore::add(key, n);
  }
  bool has(const std::vector<std::string>& keys) override {
    count();
    return CountingStore::has(keys);
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    count();
    return CountingStore::get(keys);
  }

 private:
  void count() {
    if (--remaining_ < 0) throw std::runtime_error("the process has ended");
  }
  int remaining_;
};

std::vector<std::string> rank_names() {
  std::vector<std::string> names;
  for (int r = 0; r < kRanks; ++r) names.push_back("rank " + std::to_string(r));
  return names;
}

// Runs all ranks at once, `times` times each without waiting for each other in between. Returns the
// generations of each rank; fewer if it has ended or timed out.
std::vector<std::vector<std::string>> run_ranks(StoreContents& contents,
                                                const std::vector<int>& operations, int times,
                                                Deadline::Ms timeout) {
  std::vector<std::vector<std::string>> out(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      EndingStore store(contents, operations[static_cast<size_t>(r)]);
      try {
        for (int i = 0; i < times; ++i) {
          out[static_cast<size_t>(r)].push_back(
              agree_on_generation(store, r, rank_names(), Deadline::after(timeout)));
        }
      } catch (const std::exception&) {
        // It has ended, or another rank has.
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return out;
}

[[noreturn]] void fail(int seed, const char* what) {
  std::fprintf(stderr, "history %d: %s\n", seed, what);
  std::exit(1);
}

// Some attempts in which ranks end at random moments, then one in which all ranks agree several
// times.
void run_history(int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  StoreContents contents;
  std::set<std::string> earlier;
  const int attempts = static_cast<int>(random() % 4);
  for (int a = 0; a < attempts; ++a) {
    std::vector<int> operations(kRanks, kNeverEnds);
    for (int& n : operations) n = random() % 2 == 0 ? static_cast<int>(random() % 25) : kNeverEnds;
    for (const auto& of_rank : run_ranks(contents, operations, 1, Deadline::Ms(30)))
      earlier.insert(of_rank.begin(), of_rank.end());
  }
  constexpr int kTimes = 3;
  const auto generations =
      run_ranks(contents, std::vector<int>(kRanks, kNeverEnds), kTimes, Deadline::Ms(20000));
  std::set<std::string> distinct;
  for (const auto& of_rank : generations) {
    if (of_rank.size() != kTimes) fail(seed, "a rank did not find the others");
    if (of_rank != generations[0]) fail(seed, "ranks are in different generations");
    distinct.insert(of_rank.begin(), of_rank.end());
  }
  if (distinct.size() != kTimes) fail(seed, "a generation came twice");
  for (const std::string& generation : distinct) {
    if (earlier.count(generation) > 0) fail(seed, "an earlier generation came again");
  }
}

// The ranks that did not come are named.
void absent_ranks_are_named() {
  StoreContents contents;
  try {
    CountingStore store(contents);
    agree_on_generation(store, 1, rank_names(), Deadline::after(Deadline::Ms(50)));
  } catch (const Error& e) {
    const std::string text = e.what();
    if (e.fault == Fault::kTimeout && e.rank == 0 &&
        text.rfind("rank 0, rank 2, rank 3 did not come to connect", 0) == 0) {
      return;
    }
  }
  fail(-1, "absent ranks are not named");
}

}  // namespace

int main(int, char** argv) {
  absent_ranks_are_named();
  for (int seed = 0; seed < std::atoi(argv[1]); ++seed) run_history(seed);
  std::puts("ok");
  return 0;
}
