// Rate controller of the bounded all_reduce. From past operations it learns the sending rate, the
// deadline, and the length of runs of packets to one rank (run_length.h). It also decides which
// operations use the exact algorithm; all ranks must decide the same, so that decision depends only
// on data that all of them have.
//
// Rate: the first operations of a size use the exact algorithm, whose times give the capacity of
// the path. From then on the rate is slightly above the highest rate that one of the last
// operations has achieved, as in BBR (Cardwell et al., 2016): occasional competing traffic costs a
// repair, but does not slow down later operations. The rate falls only where a large part is lost,
// for a while, and slightly where a host drops packets because its processor is late.
//
// Deadline: it follows the cost of exclusions. Each operation makes it slightly shorter; an
// operation that excludes something makes it longer, by an amount that balances at half a percent
// on average. So the part that may be excluded is spent on the slowest operations, whatever slows
// them down.
//
// Backoff: after an operation that had to be repeated, the next ones use the exact algorithm at
// once: two, and twice as many each time that it happens again in a row.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "run_length.h"
#include "session.h"

namespace fsccl::datagram {

// Rate, deadline and algorithm of operations of one rank. One thread at a time calls.
class RateController {
 public:
  static constexpr size_t kExactOperations = 4;  // operations of a size class, a power of two
  // Deadline of an operation, as a multiple of its ideal transfer time (initial, minimum, maximum),
  // plus a fixed slack in seconds. The reduce phase may use this fraction of it.
  static constexpr double kInitialTimeFactor = 2, kMinTimeFactor = 1.6, kMaxTimeFactor = 9,
                          kFixedSlack = 6e-3, kReducePhaseShare = 0.6;
  // Average share of a bucket to exclude, and relative decrease of the deadline by an operation
  // that excludes nothing.
  static constexpr double kTargetExcluded = 0.005, kTimeDecrease = 0.004;
  static constexpr size_t kRateHistory = 64;  // operations
  // Rate relative to the best achieved rate, and relative to the current one when probing.
  static constexpr double kRateHeadroom = 1.05, kProbeFactor = 1.2;
  static constexpr size_t kProbeInterval = 8;  // operations
  // Factors per operation with and without overruns, and their smallest product.
  static constexpr double kOverrunDecrease = 0.95, kOverrunRecovery = 1.01, kMinOverrunFactor = 0.1;
  // Part of the time of an operation in which nothing is sent: seconds, about, and its largest
  // share, without which rates of short operations would be overestimated. Below the last value
  // (seconds), an operation is too short to measure a rate.
  static constexpr double kOverheadTime = 2e-3, kMaxOverheadShare = 0.04, kMinMeasurableTime = 3e-3;
  // Operations that use the exact algorithm after one that had to be repeated.
  static constexpr int kFirstBackoff = 2, kMaxBackoff = 1024;

  // `ranks` per rail, and number of rails, each of which has an equal part of every bucket. `rate`:
  // fixed rate of each rank in bytes per second; 0: measured.
  RateController(int ranks, int rails, double rate)
      : wire_share_(2.0 * (ranks - 1) / ranks / rails), fixed_rate_(rate), rate_(rate) {}

  // Returns whether the next operation on `bytes` uses the exact algorithm. The same on all ranks.
  bool use_exact(size_t bytes) const {
    const auto entry = exact_times_.find(size_of_class(bytes));
    return backoff_ > 0 || entry == exact_times_.end() || entry->second.size() < kExactOperations;
  }
  // Records the time of an operation that used the exact algorithm.
  void record_exact(size_t bytes, Time elapsed) {
    if (backoff_ > 0) --backoff_;
    std::vector<double>& times = exact_times_[size_of_class(bytes)];
    if (times.size() >= kExactOperations) return;
    times.push_back(seconds(elapsed) / static_cast<double>(bytes));
    if (times.size() < kExactOperations) return;
    std::sort(times.begin(), times.end());
    // A lower bound of the capacity, because these operations may have met other traffic, or waited
    // for retransmissions.
    if (fixed_rate_ == 0) rate_ = std::max(rate_, 0.97 * wire_share_ / times[0]);
    if (operation_count_ == 0) achieved_rates_.fill(rate_ / kRateHeadroom);
  }
  double rate() const { return rate_; }  // bytes per second
  // Sets the rate, deadlines and run length of an operation on `bytes` of all rails together.
  void plan_job(size_t bytes, AllReduceJob* job) const {
    const double seconds =
        time_factor_ * wire_share_ * static_cast<double>(bytes) / rate_ + kFixedSlack;
    job->rate = rate_;
    job->total_time = time(seconds);
    job->reduce_time = time(kReducePhaseShare * seconds);
    job->repair_grace = job->total_time / 20;
    job->run_halvings = run_length_.halvings();
  }
  // Learns from the outcome of an operation that plan_job() has planned.
  void record_outcome(size_t bytes, const Outcome& outcome) {
    const double ideal_time = wire_share_ * static_cast<double>(bytes) / rate_;
    const double time_change = kTimeDecrease * (outcome.excluded_share() / kTargetExcluded - 1);
    time_factor_ =
        std::clamp(time_factor_ * std::min(1 + time_change, 1.5), kMinTimeFactor, kMaxTimeFactor);
    const double lost_share = outcome.lost_share();
    const bool overrun = outcome.overruns() > 0;
    overrun_factor_ = std::clamp(overrun_factor_ * (overrun ? kOverrunDecrease : kOverrunRecovery),
                                 kMinOverrunFactor, 1.0);
    // Otherwise the rate may have caused the loss.
    if (!probing_ && !overrun) run_length_.update(lost_share);
    if (fixed_rate_ > 0 || ideal_time < kMinMeasurableTime) return;
    double slowest = 0;
    for (const RankReport& r : outcome.reports) slowest = std::max(slowest, r.elapsed_us * 1e-6);
    const double sending_time = slowest - std::min(kOverheadTime, kMaxOverheadShare * ideal_time);
    const double achieved_rate = rate_ * ideal_time / std::max(sending_time, ideal_time / 2);
    achieved_rates_[operation_count_++ % kRateHistory] = achieved_rate;
    loss_factor_ = std::clamp(loss_factor_ * (lost_share > 0.25  ? 0.8
                                              : lost_share < 0.1 ? 1.1
                                                                 : 1),
                              0.25, 1.0);
    // The rate starts low. While an operation is limited by nothing but the rate, the next one
    // probes a higher rate, until one is not. From then on, a higher rate is probed now and then.
    const bool rate_limited = !overrun && lost_share < 0.01 && achieved_rate > 0.85 * rate_;
    if (overrun || (lost_share < 0.01 && achieved_rate < 0.7 * rate_)) searching_ = false;
    const double best_rate = *std::max_element(achieved_rates_.begin(), achieved_rates_.end());
    probing_ = rate_limited && (searching_ || operation_count_ % kProbeInterval == 0);
    rate_ = probing_ ? kProbeFactor * rate_
                     : kRateHeadroom * best_rate * loss_factor_ * overrun_factor_;
  }
  // Records whether the last operation had to be repeated, which all ranks know.
  void record_repeat(bool was_repeated) {
    if (!was_repeated) {
      next_backoff_ = kFirstBackoff;
      return;
    }
    backoff_ = next_backoff_;
    next_backoff_ = std::min(2 * next_backoff_, kMaxBackoff);
  }
  // Number of operations that are to use the exact algorithm.
  int backoff() const { return backoff_; }

 private:
  static int size_of_class(size_t bytes) {
    int n = 0;
    for (; bytes > 0; bytes /= 2) ++n;
    return n;
  }
  static double seconds(Time t) { return 1e-9 * static_cast<double>(t.count()); }
  static Time time(double seconds) { return Time(static_cast<int64_t>(1e9 * seconds)); }

  const double wire_share_, fixed_rate_;
  // Bytes per second; multiple of the ideal transfer time.
  double rate_, time_factor_ = kInitialTimeFactor;
  double loss_factor_ = 1, overrun_factor_ = 1;        // factors of the rate
  std::array<double, kRateHistory> achieved_rates_{};  // bytes per second, of the last operations
  size_t operation_count_ = 0;
  bool searching_ = true, probing_ = false;  // probing every operation; probing with this operation
  RunLengthController run_length_;
  int backoff_ = 0, next_backoff_ = kFirstBackoff;
  // Seconds per byte of the first few operations, by size class.
  std::map<int, std::vector<double>> exact_times_;
};

}  // namespace fsccl::datagram
