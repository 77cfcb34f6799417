// Tests of the run length (run_length.h), which is adapted to losses: runs of several senders may
// collide in the queue of a receiver's switch port (incast). Usage, by test_fsccl_datagram.py and
// tools/comm/incast.py:
//   incast_test runs|queue <seed>
//   incast_test play <seed> <ranks> <Mbit/s> <KB of queue> <KiB> <operations> <halvings, or
//   learned>
// "play" runs a simulation and prints "lost excluded elapsed_ms halvings" per operation.
#include <array>
#include <numeric>

#include "datagram/rate_controller.h"
#include "datagram/run_length.h"
#include "simulated_network.h"

namespace {

using namespace fsccl;
using namespace fsccl::datagram;

constexpr size_t kPayload = 1456;  // of a packet in an Ethernet frame
// Milliseconds from the start of the first rank to that of the last one, at most.
constexpr double kMaxStartSkewMs = 5;
constexpr int kAdaptiveRunLength = -1;

// Number of operations with each run length, by its halvings. lost(halvings) returns the share of
// packets that an operation with this run length loses.
using Usage = std::array<int, RunLengthController::kMaxHalvings + 1>;
template <class F>
Usage count_usage(RunLengthController* controller, int operations, F&& lost) {
  Usage usage{};
  for (int i = 0; i < operations; ++i) {
    ++usage[static_cast<size_t>(controller->halvings())];
    controller->update(lost(controller->halvings()));
  }
  return usage;
}

void test_run_length(unsigned seed) {
  std::mt19937 random(seed);
  const auto by_chance = [&](double mean) {
    return std::exponential_distribution<>(1 / mean)(random);
  };
  RunLengthController lossless;
  expect(count_usage(&lossless, 1000, [](int) { return 0; })[0] == 1000,
         "runs are not full without losses");
  expect(count_usage(&lossless, 1, [](int) { return 0.03; })[0] == 1 && lossless.halvings() == 0,
         "a single loss shortens runs");

  // Shorter runs collide less in the queue.
  const auto incast = [&](int halvings) {
    const double mean_losses[] = {0.03, 0.01, 1e-5, 1e-7};
    return by_chance(mean_losses[halvings]);
  };
  RunLengthController incast_controller;
  count_usage(&incast_controller, 20, incast);
  expect(incast_controller.halvings() == 2,
         "the best run length is not found: " + std::to_string(incast_controller.halvings()));
  Usage usage = count_usage(&incast_controller, 2000, incast);
  expect(usage[2] > 1900, "the best run length is left: " + std::to_string(usage[2]));
  expect(usage[1] > 0, "longer runs are not tried again");
  expect(usage[0] < 5, "much longer runs are tried: " + std::to_string(usage[0]));
  count_usage(&incast_controller, 2000, [](int) { return 0; });
  expect(incast_controller.halvings() == 0, "runs stay short although nothing is lost any more");

  // A halving is not worth it where the loss is negligible.
  RunLengthController low_loss;
  usage =
      count_usage(&low_loss, 1000, [&](int halvings) { return by_chance(4e-4 / (1 << halvings)); });
  expect(usage[0] > 900,
         "shorter runs although losses are negligible: " + std::to_string(usage[0]));

  // Losses caused by other traffic are the same for all run lengths.
  RunLengthController background_loss;
  usage = count_usage(&background_loss, 2000, [&](int) { return by_chance(0.04); });
  expect(usage[0] > 1500, "runs are short although that does not help");
}

// Returns the outcome of an operation on 4 MiB that loses this share of its packets at this rate,
// in bytes per second.
Outcome make_outcome(double lost, double rate) {
  Outcome outcome;
  outcome.excluded = Bitmap(10);
  RankReport report;
  report.expected = 1000;
  report.lost = static_cast<uint32_t>(1000 * lost);
  report.elapsed_us = static_cast<uint32_t>(1e6 * (1.5 * (4 << 20) / rate + 2e-3));
  outcome.reports.assign(4, report);
  return outcome;
}

// Operations that probe a higher rate do not shorten runs, because the rate causes their losses.
void test_probing_does_not_shorten_runs() {
  constexpr size_t kBytes = 4 << 20;
  RateController controller(4, 1, 0);
  const auto halvings = [&] {
    AllReduceJob job;
    controller.plan_job(kBytes, &job);
    return job.run_halvings;
  };
  for (size_t i = 0; i < RateController::kExactOperations; ++i)
    controller.record_exact(kBytes, ms(200));
  const double initial_rate = controller.rate();
  controller.record_outcome(kBytes, make_outcome(0, initial_rate));
  expect(controller.rate() > 1.1 * initial_rate, "the rate is not probed");
  controller.record_outcome(kBytes, make_outcome(0.2, initial_rate));
  expect(halvings() == 0, "losses caused by the rate shorten runs");
  controller.record_outcome(kBytes, make_outcome(0.2, initial_rate));
  expect(halvings() == 1, "a loss does not make runs shorter");
  RateController fixed_rate(4, 1, initial_rate);
  fixed_rate.record_outcome(kBytes, make_outcome(0.2, initial_rate));
  AllReduceJob job;
  fixed_rate.plan_job(kBytes, &job);
  expect(job.run_halvings == 1, "no shorter runs with a fixed rate");
}

// Measurements of a simulation.
struct SimulationResult {
  std::vector<double> lost, excluded, elapsed_ms;  // of every operation: shares, ms
  std::vector<int> halvings;
};

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Simulates operations of ranks whose links have `rate` bytes per second, which is also their
// sending rate, and ports with `queue` bytes of queue. `halvings`: a fixed run length, or
// kAdaptiveRunLength.
SimulationResult simulate(unsigned seed, int ranks, double rate, double queue_bytes, size_t bytes,
                          int operations, int halvings) {
  NetworkConditions conditions;
  conditions.delay_ms = 0.02;
  conditions.rate = rate;
  conditions.queue_bytes = queue_bytes;
  SimulatedNetwork network(ranks, kPayload, seed, conditions);
  RateController controller(ranks, 1, rate);
  const Bytes in(bytes);
  SimulationResult result;
  for (int k = 0; k < operations; ++k) {
    AllReduceJob job;
    job.in = in.data();
    job.bytes = bytes;
    job.reduction.dtype = DType::kF32;
    job.reduction.op = RedOp::kSum;
    controller.plan_job(bytes, &job);
    if (halvings != kAdaptiveRunLength) job.run_halvings = halvings;
    std::vector<double> start_times;
    for (int r = 0; r < ranks; ++r) {
      start_times.push_back(kMaxStartSkewMs * static_cast<double>(network.random()() % 1000) /
                            1000);
    }
    std::vector<int> order(start_times.size());
    std::iota(order.begin(), order.end(), 0);
    const auto at = [&](int r) { return start_times[static_cast<size_t>(r)]; };
    std::sort(order.begin(), order.end(), [&](int a, int b) { return at(a) < at(b); });
    double last = at(order[0]);
    for (const int r : order) {
      network.run_until_done(ms(at(r) - last));
      last = at(r);
      network.start(r, job);
    }
    const Time all_started = network.now();
    expect(network.run_until_done(ms(20'000)), "does not complete");
    const Outcome& outcome = network[0].outcome();
    result.lost.push_back(outcome.lost_share());
    result.excluded.push_back(outcome.excluded_share());
    result.elapsed_ms.push_back(1e-6 * static_cast<double>((network.now() - all_started).count()));
    result.halvings.push_back(job.run_halvings);
    controller.record_outcome(bytes, outcome);
  }
  return result;
}

// 16 ranks, and a queue that holds slightly less than two full runs of all 15 senders: full runs
// collide, shorter ones hardly. Four ranks, and a queue that holds more than the full runs of all
// three senders: nothing is lost.
void test_shallow_queue(unsigned seed) {
  constexpr double kRate = 125e6, kShallow = 64e3, kDeep = 128e3;
  constexpr size_t kBytes = 768 << 10;
  const auto simulate_with = [&](int halvings) {
    return simulate(seed, 16, kRate, kShallow, kBytes, 8, halvings);
  };
  const SimulationResult full_runs = simulate_with(0),
                         shortest_runs = simulate_with(RunLengthController::kMaxHalvings),
                         adaptive_runs = simulate_with(kAdaptiveRunLength);
  const double full_loss = mean(full_runs.lost), shortest_loss = mean(shortest_runs.lost),
               adaptive_loss = mean(adaptive_runs.lost);
  const std::string loss_shares = std::to_string(full_loss) + ", " + std::to_string(shortest_loss) +
                                  ", " + std::to_string(adaptive_loss);
  expect(full_loss > 0.01, "full runs do not collide: " + loss_shares);
  expect(shortest_loss < full_loss / 10, "shortest runs collide as well: " + loss_shares);
  expect(adaptive_loss < full_loss / 2, "the run length is not learned: " + loss_shares);
  const SimulationResult four_ranks =
      simulate(seed, 4, kRate, kDeep, kBytes, 8, kAdaptiveRunLength);
  expect(mean(four_ranks.lost) == 0 && four_ranks.halvings == std::vector<int>(8, 0),
         "losses with four ranks");
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string& mode = arguments.at(0);
  const auto seed = static_cast<unsigned>(std::stoul(arguments.at(1)));
  if (mode == "play") {
    const int halvings =
        arguments.at(7) == "learned" ? kAdaptiveRunLength : std::stoi(arguments.at(7));
    const SimulationResult result =
        simulate(seed, std::stoi(arguments.at(2)), 125e3 * std::stod(arguments.at(3)),
                 1e3 * std::stod(arguments.at(4)), 1024 * std::stoul(arguments.at(5)),
                 std::stoi(arguments.at(6)), halvings);
    for (size_t k = 0; k < result.lost.size(); ++k) {
      std::printf("%g %g %g %d\n", result.lost[k], result.excluded[k], result.elapsed_ms[k],
                  result.halvings[k]);
    }
    return 0;
  }
  if (mode == "runs") test_run_length(seed), test_probing_does_not_shorten_runs();
  if (mode == "queue") test_shallow_queue(seed);
  std::puts("ok");
  return 0;
}
