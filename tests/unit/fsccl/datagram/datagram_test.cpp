// Tests of the bounded all_reduce over a simulated network. Usage, by test_fsccl_datagram.py:
//   datagram_test storm <seed> <ranks> <bytes> <dtype> <op> <lost> <duplicated> <delay ms> <burst>
//   datagram_test random-storms <seed> <number>
//   datagram_test forged-packets|clock-jumps|no-datagrams|one-way-loss|dead-rank|late-rank <seed>
//   datagram_test unbiased-scaling|error-feedback <seed>
#include <cmath>

#include "reduction_case.h"
#include "datagram/error_feedback.h"
#include "datagram/run_length.h"

namespace {

using namespace fsccl;
using namespace fsccl::datagram;

void run_storm(SimulatedNetwork& network, size_t bytes, DType dtype, RedOp op) {
  for (int k = 0; k < 3; ++k) {
    const ReductionCase b = make_case(network, bytes, dtype, op);
    const Time start_time = network.now();
    start_on_all_ranks(network, b);
    expect(network.run_until_done(ms(5000)), "does not complete");
    expect(network.now() - start_time <= time_bound(b), "exceeds its time bound");
    check_identical_results(network, b);
    check_values(network, b);
    const NetworkConditions& conditions = network.conditions();
    if (conditions.lost == 0) {
      expect(std::memcmp(network[0].result(), b.exact.data(), bytes) == 0,
             "inexact although nothing was lost");
      expect(network[0].outcome().lost_share() == 0 || conditions.delay_ms > 1,
             "losses reported although nothing is lost");
    }
    if (conditions.lost <= 0.02)
      expect(network[0].outcome().excluded_share() <= 0.02, "excludes too much");
  }
}

// An attacker sends two forged packets per real packet. All are dropped and counted.
void run_with_forged_packets(unsigned seed) {
  NetworkConditions conditions;
  conditions.forged = 2;
  SimulatedNetwork network(4, kPayload, seed, conditions);
  for (int k = 0; k < 6; ++k) {
    const ReductionCase b = make_case(network, 40000, DType::kF32, RedOp::kSum);
    start_on_all_ranks(network, b);
    expect(network.run_until_done(ms(5000)), "forged packets block the operation");
    check_identical_results(network, b);
    expect(std::memcmp(network[0].result(), b.exact.data(), b.job.bytes) == 0,
           "forged data is accepted");
  }
  const DropCounters& counters = network[1].drop_counters();
  expect(counters.forged > 100 && counters.foreign > 100 && counters.late > 10 &&
             counters.repeated > 10,
         "dropped packets are not counted");
  expect(counters.malformed == 0, "a forged packet passed verification");
}

// Clocks of ranks jump forward and backward by up to an hour.
void run_with_clock_jumps(unsigned seed) {
  NetworkConditions conditions;
  conditions.clock_jumps = 0.02;
  conditions.lost = 0.01;
  SimulatedNetwork network(3, kPayload, seed, conditions);
  for (int k = 0; k < 6; ++k) {
    const ReductionCase b = make_case(network, 30000, DType::kF32, RedOp::kSum);
    const Time start_time = network.now();
    start_on_all_ranks(network, b);
    expect(network.run_until_done(ms(20000)), "a clock jump stops the operation");
    expect(network.now() - start_time <= 2 * time_bound(b), "a clock jump delays the operation");
    check_identical_results(network, b);
    check_values(network, b);
  }
}

// No datagram arrives; or, with `one_way`, none from rank 2. The ranks agree on the outcome over
// the reliable transport.
void run_without_datagrams(unsigned seed, bool one_way) {
  SimulatedNetwork network(4, kPayload, seed, {});
  network.conditions().cut = [=](int from, int) { return !one_way || from == 2; };
  for (int k = 0; k < 3; ++k) {
    const ReductionCase b = make_case(network, 40000, DType::kBF16, RedOp::kAvg);
    const Time start_time = network.now();
    start_on_all_ranks(network, b);
    expect(network.run_until_done(ms(5000)), "does not complete");
    expect(network.now() - start_time <= time_bound(b), "exceeds its time bound");
    check_identical_results(network, b);
    const double share = network[0].outcome().excluded_share();
    // The other ranks lack the sums of rank 2: a quarter of the pieces.
    expect(one_way ? share > 0.2 && share < 0.3 : share == 1,
           "excludes other pieces than the lost ones");
  }
  network.conditions().cut = [](int, int) { return false; };
  const ReductionCase b = make_case(network, 40000, DType::kF32, RedOp::kSum);
  start_on_all_ranks(network, b);
  expect(network.run_until_done(ms(5000)), "does not continue");
  check_identical_results(network, b);
  expect(std::memcmp(network[0].result(), b.exact.data(), b.job.bytes) == 0, "inexact afterwards");
}

// A rank that starts late buffers the early data of the others. If packets are only delayed,
// nothing is lost.
void run_with_late_rank(unsigned seed) {
  SimulatedNetwork network(4, kPayload, seed, {});
  for (int k = 0; k < 3; ++k) {
    const ReductionCase b = make_case(network, 40000, DType::kF32, RedOp::kSum);
    const int last_rank = static_cast<int>(network.random()() % 4);
    const auto start_rank = [&](int r) {
      AllReduceJob job = b.job;
      job.in = b.in[static_cast<size_t>(r)].data();
      network.start(r, job);
    };
    for (int r = 0; r < 4; ++r) {
      if (r != last_rank) start_rank(r);
    }
    expect(!network.run_until_done(ms(200)), "completes without a rank");
    const Time start_time = network.now();
    start_rank(last_rank);
    expect(network.run_until_done(ms(5000)), "does not complete");
    // Sending all parts and all sums takes half of reduce_time each. Two of three parts have been
    // sent early.
    expect(network.now() - start_time < b.job.reduce_time * 9 / 10, "data is sent again");
    check_identical_results(network, b);
    expect(std::memcmp(network[0].result(), b.exact.data(), b.job.bytes) == 0, "inexact result");
    for (const RankReport& r : network[0].outcome().reports)
      expect(r.lost == 0, "early data is not buffered");
  }
  NetworkConditions slow_conditions;
  slow_conditions.delay_ms = 20;
  SimulatedNetwork slow_network(2, kPayload, seed, slow_conditions);
  const ReductionCase b = make_case(slow_network, 40000, DType::kF32, RedOp::kSum);
  start_on_all_ranks(slow_network, b);
  expect(slow_network.run_until_done(ms(5000)), "does not complete");
  expect(std::memcmp(slow_network[0].result(), b.exact.data(), b.job.bytes) == 0, "inexact result");
}

// A rank dies at a random moment. All ranks that finish have the same outcome; the others wait for
// the dead rank.
void run_with_dead_rank(unsigned seed) {
  NetworkConditions conditions;
  conditions.lost = 0.05;
  SimulatedNetwork network(4, kPayload, seed, conditions);
  const ReductionCase b = make_case(network, 60000, DType::kF32, RedOp::kSum);
  const Time death_time = ms(static_cast<double>(network.random()() % 600) / 10);
  network.conditions().dead = [&network, death_time](int r) {
    return r == 3 && network.now() >= death_time;
  };
  start_on_all_ranks(network, b);
  const bool all_done = network.run_until_done(ms(3000));
  int first = -1;
  for (int r = 0; r < 3; ++r) {
    if (!network[r].is_done()) {
      expect(network[r].awaited_rank() == 3, "waits for a rank other than the dead one");
      expect(!all_done, "not completed");
      continue;
    }
    if (first < 0) first = r;
    expect(std::memcmp(network[r].result(), network[first].result(), b.job.bytes) == 0,
           "results differ");
  }
  // The next operation cannot start.
  for (int r = 0; r < 3; ++r) {
    if (!network[r].is_done()) return;
  }
  start_on_all_ranks(network, b);
  expect(!network.run_until_done(ms(1000)), "continues without a rank");
  for (int r = 0; r < 3; ++r)
    expect(network[r].awaited_rank() == 3, "waits for a rank other than the dead one");
}

// Parts are lost and not sent again, so that pieces are scaled: the mean over many operations is
// the exact sum.
void check_scaling_is_unbiased(unsigned seed) {
  NetworkConditions conditions;
  conditions.lost = 0.2;
  conditions.parts_only = true;
  ProtocolLimits limits;
  limits.max_requests = 0;
  double total = 0, squares = 0, count = 0;
  for (unsigned k = 0; k < 16; ++k) {
    SimulatedNetwork network(4, kPayload, seed * 1000 + k, conditions, limits);
    ReductionCase b = make_case(network, 40000, DType::kF32, RedOp::kSum, 10);
    for (int r = 0; r < 4; ++r) {
      for (size_t i = 0; i < b.job.bytes / 4; ++i) {
        store_element(DType::kF32, b.in[static_cast<size_t>(r)].data(), i, r);  // 0 + 1 + 2 + 3
      }
    }
    start_on_all_ranks(network, b);
    expect(network.run_until_done(ms(5000)), "does not complete");
    const BucketLayout& layout = network[0].layout();
    expect(network[0].outcome().excluded.count() == 0, "sums are lost as well");
    for (size_t p = 0; p < layout.pieces(); ++p) {
      const double x =
          load_element(DType::kF32, network[0].result() + layout.piece_interval(p).lo, 0);
      total += x, squares += x * x, ++count;
    }
  }
  // The own parts of owners are never lost. Over all shards that evens out, because each rank owns
  // equally much.
  const double mean = total / count, deviation = std::sqrt(squares / count - mean * mean);
  expect(deviation > 0.5, "nothing was scaled");
  expect(std::abs(mean - 6) < 4 * deviation / std::sqrt(count), "biased: " + std::to_string(mean));
}

// Sums are lost and not sent again, so that pieces are excluded. With error feedback, the results
// of all operations and the last residual add up to the exact sum; without it, they lack the
// excluded pieces. The means are over several simulations, because the excluded pieces are random.
void check_error_feedback(unsigned seed) {
  constexpr int kRanks = 4, kOperations = 12, kSimulations = 3;
  constexpr double kLost = 0.1, kSum = 10;  // of 1 + 2 + 3 + 4
  ProtocolLimits limits;
  limits.max_requests = 0;
  double mean_with = 0, mean_without = 0, pieces = 0;
  for (unsigned k = 0; k < kSimulations; ++k) {
    NetworkConditions conditions;
    conditions.lost = kLost;
    SimulatedNetwork network(kRanks, kPayload, seed * 1000 + k, conditions, limits);
    ReductionCase b = make_case(network, 20'000, DType::kF32, RedOp::kSum, 10);
    for (int r = 0; r < kRanks; ++r) {
      for (size_t i = 0; i < b.job.bytes / 4; ++i) {
        store_element(DType::kF32, b.in[static_cast<size_t>(r)].data(), i, r + 1);
      }
    }
    std::vector<ErrorFeedback> residuals(kRanks);
    const ErrorFeedback::BucketKey bucket_key{b.in[0].data(), b.job.bytes, DType::kF32};
    std::vector<double> with_feedback, without_feedback;
    const std::vector<Bytes> gradients = b.in;
    for (int n = 0; n < kOperations; ++n) {
      b.in = gradients;
      for (size_t r = 0; r < kRanks; ++r) residuals[r].add(bucket_key, b.in[r].data());
      start_on_all_ranks(network, b);
      expect(network.run_until_done(ms(5000)), "does not complete");
      const BucketLayout& layout = network[0].layout();
      const Bitmap& excluded = network[0].outcome().excluded;
      with_feedback.resize(layout.pieces()), without_feedback.resize(layout.pieces());
      for (size_t p = 0; p < layout.pieces(); ++p) {
        with_feedback[p] +=
            load_element(DType::kF32, network[0].result() + layout.piece_interval(p).lo, 0) /
            kOperations;
        without_feedback[p] += excluded.test(p) ? 0 : kSum / kOperations;
      }
      for (size_t r = 0; r < kRanks; ++r)
        residuals[r].store(bucket_key, b.in[r].data(), layout, excluded);
    }
    for (size_t p = 0; p < with_feedback.size(); ++p) {
      // The last residual has not been added to any result yet.
      double residual = 0;
      for (size_t r = 0; r < kRanks; ++r) {
        Bytes zeros(b.job.bytes);
        residuals[r].add(bucket_key, zeros.data());
        residual +=
            load_element(DType::kF32, zeros.data() + network[0].layout().piece_interval(p).lo, 0);
      }
      mean_with += with_feedback[p] + residual / kOperations, mean_without += without_feedback[p],
          ++pieces;
    }
  }
  mean_with /= pieces, mean_without /= pieces;
  expect(mean_without < 0.8 * kSum,
         "hardly anything was excluded: " + std::to_string(mean_without));
  expect(std::abs(mean_with / kSum - 1) < 0.02, "biased: " + std::to_string(mean_with));
}

// A storm with random conditions.
void run_random_storm(std::mt19937& random) {
  const auto draw = [&](double max) { return std::uniform_real_distribution<>(0, max)(random); };
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  NetworkConditions conditions;
  conditions.lost = one_in(4) ? draw(1) : one_in(3) ? 0 : draw(0.2);
  conditions.duplicated = one_in(2) ? 0 : draw(0.6);
  conditions.delay_ms = one_in(2) ? draw(1) : draw(30);
  conditions.burst = one_in(2) ? 1 : 1 + draw(40);
  conditions.forged = one_in(4) ? draw(1) : 0;
  conditions.clock_jumps = one_in(8) ? draw(0.02) : 0;
  const int ranks = 2 + static_cast<int>(random() % (one_in(6) ? 16 : 6));
  const DType dtypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
  const DType dtype = dtypes[random() % 4];
  const size_t bytes = (1 + random() % (one_in(3) ? 60 : 6000)) * size_of(dtype);
  const RedOp op = one_in(2) ? RedOp::kSum : RedOp::kAvg;
  const unsigned seed = static_cast<unsigned>(random() % 100'000);
  const int run_halvings = static_cast<int>(random() % (RunLengthController::kMaxHalvings + 1));
  SimulatedNetwork network(ranks, kPayload, seed, conditions);
  for (int k = 0; k < 2; ++k) {
    ReductionCase b = make_case(network, bytes, dtype, op);
    b.job.run_halvings = run_halvings;
    const Time start_time = network.now();
    start_on_all_ranks(network, b);
    const std::string description = "a storm over " + std::to_string(ranks) + " ranks, seed " +
                                    std::to_string(seed) + ", lost " +
                                    std::to_string(conditions.lost);
    expect(network.run_until_done(ms(20000)), description + " does not end");
    const Time max_delay = ms(4 * conditions.delay_ms);
    expect(network.now() - start_time <=
               (conditions.clock_jumps > 0 ? 2 : 1) * time_bound(b) + max_delay,
           description + " exceeds its time bound");
    check_identical_results(network, b);
    check_values(network, b);
  }
}

DType parse_dtype(const std::string& name) {
  for (const DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    if (name == name_of(t)) return t;
  }
  expect(false, "unknown type " + name);
  return DType::kF32;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string& test = arguments.at(0);
  const auto seed = static_cast<unsigned>(std::stoul(arguments.at(1)));
  if (test == "storm") {
    NetworkConditions conditions;
    conditions.lost = std::stod(arguments.at(6));
    conditions.duplicated = std::stod(arguments.at(7));
    conditions.delay_ms = std::stod(arguments.at(8));
    conditions.burst = std::stod(arguments.at(9));
    SimulatedNetwork network(std::stoi(arguments.at(2)), kPayload, seed, conditions);
    run_storm(network, std::stoul(arguments.at(3)), parse_dtype(arguments.at(4)),
              arguments.at(5) == "avg" ? RedOp::kAvg : RedOp::kSum);
  }
  if (test == "random-storms") {
    std::mt19937 random(seed);
    for (unsigned long n = std::stoul(arguments.at(2)); n > 0; --n) run_random_storm(random);
  }
  if (test == "error-feedback") check_error_feedback(seed);
  if (test == "forged-packets") run_with_forged_packets(seed);
  if (test == "clock-jumps") run_with_clock_jumps(seed);
  if (test == "no-datagrams") run_without_datagrams(seed, false);
  if (test == "one-way-loss") run_without_datagrams(seed, true);
  if (test == "dead-rank") run_with_dead_rank(seed);
  if (test == "late-rank") run_with_late_rank(seed);
  if (test == "unbiased-scaling") check_scaling_is_unbiased(seed);
  std::puts("ok");
  return 0;
}
