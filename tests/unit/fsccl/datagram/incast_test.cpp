// Runs of many senders that meet in the queue of a receiver's port, and how their length is learned
// from what is lost. Usage, by test_fsccl_datagram.py and tools/comm/incast.py:
//   incast_test runs|queue <seed>
//   incast_test play <seed> <ranks> <Mbit/s> <KB a queue> <KiB> <operations> <halvings, or learned>
#include <array>
#include <numeric>

#include "datagram/pace.h"
#include "datagram/runs.h"
#include "network.h"

namespace {

using namespace fsccl;
using namespace fsccl::datagram;

constexpr size_t kPayload = 1456;  // of a packet of Ethernet
constexpr double kApart = 5;       // ms at most from the first rank's beginning to the last one's
constexpr int kLearned = -1;

// How often which runs are taken for so many operations, of which lost(halvings) is lost.
using Taken = std::array<int, Runs::kMost + 1>;
template <class F>
Taken take(Runs* runs, int operations, F&& lost) {
  Taken taken{};
  for (int i = 0; i < operations; ++i) {
    ++taken[static_cast<size_t>(runs->halvings())];
    runs->ended(lost(runs->halvings()));
  }
  return taken;
}

void runs(unsigned seed) {
  std::mt19937 random(seed);
  const auto by_chance = [&](double mean) {
    return std::exponential_distribution<>(1 / mean)(random);
  };
  Runs calm;
  expect(take(&calm, 1000, [](int) { return 0; })[0] == 1000, "without a loss runs are whole");
  expect(take(&calm, 1, [](int) { return 0.03; })[0] == 1 && calm.halvings() == 0, "one loss");

  // The shorter runs are, the less meets in a queue.
  const auto incast = [&](int halvings) {
    const double means[] = {0.03, 0.01, 1e-5, 1e-7};
    return by_chance(means[halvings]);
  };
  Runs many;
  take(&many, 20, incast);
  expect(many.halvings() == 2, "not found: " + std::to_string(many.halvings()));
  Taken taken = take(&many, 2000, incast);
  expect(taken[2] > 1900, "left for others: " + std::to_string(taken[2]));
  expect(taken[1] > 0, "longer ones are not tried again");
  expect(taken[0] < 5, "far longer ones are tried: " + std::to_string(taken[0]));
  take(&many, 2000, [](int) { return 0; });
  expect(many.halvings() == 0, "they stay short where nothing is lost any more");

  // Half as much lost is not worth it where that is next to nothing.
  Runs few;
  taken = take(&few, 1000, [&](int halvings) { return by_chance(4e-4 / (1 << halvings)); });
  expect(taken[0] > 900, "for next to nothing: " + std::to_string(taken[0]));

  // What others' traffic takes it takes from runs of all lengths.
  Runs beside;
  taken = take(&beside, 2000, [&](int) { return by_chance(0.04); });
  expect(taken[0] > 1500, "short where it does not help");
}

// What all ranks know of an operation of which so much was lost.
Outcome outcome(double lost, double rate) {
  Outcome out;
  out.excluded = Bits(10);
  Report report;
  report.expected = 1000;
  report.lost = static_cast<uint32_t>(1000 * lost);
  report.elapsed_us = static_cast<uint32_t>(1e6 * (1.5 * (4 << 20) / rate + 2e-3));
  out.reports.assign(4, report);
  return out;
}

// Not the operations that ask whether there is more than the rate: what they lose, they lose by it.
void asking() {
  constexpr size_t kBytes = 4 << 20;
  Pace pace(4, 1, 0);
  const auto halvings = [&] {
    Job job;
    pace.plan(kBytes, &job);
    return job.halvings;
  };
  for (size_t i = 0; i < Pace::kLearn; ++i) pace.ran_exactly(kBytes, ms(200));
  const double before = pace.rate();
  pace.ended(kBytes, outcome(0, before));
  expect(pace.rate() > 1.1 * before, "it does not ask");
  pace.ended(kBytes, outcome(0.2, before));
  expect(halvings() == 0, "the rate's loss makes runs shorter");
  pace.ended(kBytes, outcome(0.2, before));
  expect(halvings() == 1, "a loss does not make runs shorter");
  Pace given(4, 1, before);
  given.ended(kBytes, outcome(0.2, before));
  Job job;
  given.plan(kBytes, &job);
  expect(job.halvings == 1, "nor where the rate is given");
}

struct Played {
  std::vector<double> lost, excluded, took;  // of every operation: shares, ms
  std::vector<int> halvings;
};

double mean(const std::vector<double>& of) {
  return std::accumulate(of.begin(), of.end(), 0.0) / static_cast<double>(of.size());
}

// Operations of ranks behind cables of one rate, which is theirs.
Played play(unsigned seed, int ranks, double rate, double queue, size_t bytes, int operations,
            int halvings) {
  Weather weather;
  weather.delay_ms = 0.02;
  weather.rate = rate;
  weather.queue = queue;
  World world(ranks, kPayload, seed, weather);
  Pace pace(ranks, 1, rate);
  const Bytes in(bytes);
  Played out;
  for (int k = 0; k < operations; ++k) {
    Job job;
    job.in = in.data();
    job.bytes = bytes;
    job.how.dtype = DType::kF32;
    job.how.op = RedOp::kSum;
    pace.plan(bytes, &job);
    if (halvings != kLearned) job.halvings = halvings;
    std::vector<double> begins;
    for (int r = 0; r < ranks; ++r) {
      begins.push_back(kApart * static_cast<double>(world.random()() % 1000) / 1000);
    }
    std::vector<int> order(begins.size());
    std::iota(order.begin(), order.end(), 0);
    const auto at = [&](int r) { return begins[static_cast<size_t>(r)]; };
    std::sort(order.begin(), order.end(), [&](int a, int b) { return at(a) < at(b); });
    double last = at(order[0]);
    for (const int r : order) {
      world.play(ms(at(r) - last));
      last = at(r);
      world.start(r, job);
    }
    const Time all = world.now();
    expect(world.play(ms(20'000)), "does not end");
    const Outcome& outcome = world[0].outcome();
    out.lost.push_back(outcome.lost_share());
    out.excluded.push_back(outcome.excluded_share());
    out.took.push_back(1e-6 * static_cast<double>((world.now() - all).count()));
    out.halvings.push_back(job.halvings);
    pace.ended(bytes, outcome);
  }
  return out;
}

// A port's queue holds not quite two whole runs of 15 senders, or is deeper than those of three.
void queue(unsigned seed) {
  constexpr double kRate = 125e6, kShallow = 64e3, kDeep = 128e3;
  constexpr size_t kBytes = 768 << 10;
  const auto of = [&](int halvings) {
    return play(seed, 16, kRate, kShallow, kBytes, 8, halvings);
  };
  const Played whole = of(0), shortest = of(Runs::kMost), learned = of(kLearned);
  const double most = mean(whole.lost), least = mean(shortest.lost), found = mean(learned.lost);
  const std::string figures = std::to_string(most) + ", " + std::to_string(least) + ", " +
                              std::to_string(found);
  expect(most > 0.01, "whole runs do not meet: " + figures);
  expect(least < most / 10, "shortest ones meet as well: " + figures);
  expect(found < most / 2, "it is not learned: " + figures);
  const Played four = play(seed, 4, kRate, kDeep, kBytes, 8, kLearned);
  expect(mean(four.lost) == 0 && four.halvings == std::vector<int>(8, 0), "of four ranks");
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string& what = words.at(0);
  const auto seed = static_cast<unsigned>(std::stoul(words.at(1)));
  if (what == "play") {
    const int halvings = words.at(7) == "learned" ? kLearned : std::stoi(words.at(7));
    const Played played = play(seed, std::stoi(words.at(2)), 125e3 * std::stod(words.at(3)),
                               1e3 * std::stod(words.at(4)), 1024 * std::stoul(words.at(5)),
                               std::stoi(words.at(6)), halvings);
    for (size_t k = 0; k < played.lost.size(); ++k) {
      std::printf("%g %g %g %d\n", played.lost[k], played.excluded[k], played.took[k],
                  played.halvings[k]);
    }
    return 0;
  }
  if (what == "runs") runs(seed), asking();
  if (what == "queue") queue(seed);
  std::puts("ok");
  return 0;
}
