// Rate controller of the bounded all_reduce. From the outcomes of past operations it determines the
// sending rate, the deadline, and the length of runs of packets to one rank (run_length.h). It also
// decides which operations use the exact algorithm. All ranks must decide the same, so that
// decision depends only on data that all of them have.
//
// Rate: the first operations of a size use the exact algorithm, whose times give the capacity of
// the path. From then on the rate is slightly above the highest rate that one of the last
// operations has achieved, as in BBR (Cardwell et al., 2016). So occasional competing traffic
// causes retransmissions, but does not slow down later operations. The rate decreases only after a
// large loss, for a while, and slightly if a host drops packets because its processor is
// overloaded.
//
// Deadline: each operation makes the deadline slightly shorter; an operation that excludes
// something makes it longer. The amounts are such that half a percent is excluded on average. So
// the share that may be excluded is spent on the slowest operations, whatever the reason for their
// slowness.
//
// Backoff: after an operation that had to be repeated, the next two use the exact algorithm. Each
// time that it happens again in a row, this number doubles.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "run_length.h"
#include "session.h"

namespace fsccl::datagram {

// Chooses rate, deadline and algorithm of the operations of one rank. One thread at a time calls.
class RateController {
 public:
  // Number of operations per size class that use the exact algorithm first. A size class is a range
  // of sizes from one power of two to the next.
  static constexpr size_t kExactOperations = 4;
  // Deadline of an operation, as a multiple of its ideal transfer time (initial, minimum, maximum),
  // plus a fixed slack in seconds. The reduce phase may use this fraction of it.
  static constexpr double kInitialDeadlineFactor = 2, kMinDeadlineFactor = 1.6,
                          kMaxDeadlineFactor = 9, kFixedSlackSeconds = 6e-3,
                          kReducePhaseShare = 0.6;
  // Share of a bucket that is to be excluded on average, and relative decrease of the deadline
  // after an operation that excludes nothing.
  static constexpr double kTargetExcluded = 0.005, kDeadlineDecrease = 0.004;
  static constexpr size_t kRateHistory = 64;  // operations
  // Factor of the rate relative to the highest achieved rate, and relative to the current rate when
  // probing.
  static constexpr double kRateHeadroom = 1.05, kProbeFactor = 1.2;
  static constexpr size_t kProbeInterval = 8;  // operations
  // Factors of the rate after an operation with overruns (packets that a host drops because its
  // processor is overloaded), and after one without; smallest product of these factors.
  static constexpr double kOverrunDecrease = 0.95, kOverrunRecovery = 1.01, kMinOverrunFactor = 0.1;
  // Approximate time of an operation in which nothing is sent, in seconds, and its maximum share of
  // the ideal transfer time, without which rates of short operations would be overestimated.
  // Operations with an ideal transfer time below kMinMeasurableSeconds are too short to measure a
  // rate.
  static constexpr double kOverheadSeconds = 2e-3, kMaxOverheadShare = 0.04,
                          kMinMeasurableSeconds = 3e-3;
  // First and largest number of operations that use the exact algorithm after one that had to be
  // repeated.
  static constexpr int kFirstBackoff = 2, kMaxBackoff = 1024;

  // `ranks`: number of ranks per rail. `rails`: number of rails, each of which reduces an equal
  // part of every bucket. `rate`: fixed sending rate of each rank in bytes per second; 0: measured.
  RateController(int ranks, int rails, double rate)
      : wire_share_(2.0 * (ranks - 1) / ranks / rails), fixed_rate_(rate), rate_(rate) {}

  // Returns whether the next operation on a bucket of `bytes` bytes uses the exact algorithm. The
  // result is the same on all ranks.
  bool should_use_exact(size_t bytes) const {
    const auto entry = exact_times_.find(size_class(bytes));
    return backoff_ > 0 || entry == exact_times_.end() || entry->second.size() < kExactOperations;
  }
  // Records the time of an operation that used the exact algorithm.
  void record_exact(size_t bytes, Time elapsed) {
    if (backoff_ > 0) --backoff_;
    std::vector<double>& times = exact_times_[size_class(bytes)];
    if (times.size() >= kExactOperations) return;
    times.push_back(seconds(elapsed) / static_cast<double>(bytes));
    if (times.size() < kExactOperations) return;
    std::sort(times.begin(), times.end());
    // A lower bound of the capacity, because these operations may have been slowed down by
    // competing traffic or retransmissions.
    if (fixed_rate_ == 0) rate_ = std::max(rate_, 0.97 * wire_share_ / times[0]);
    if (operation_count_ == 0) achieved_rates_.fill(rate_ / kRateHeadroom);
  }
  double rate() const { return rate_; }  // bytes per second
  // Sets the rate, deadlines and run length of an operation on a bucket of `bytes` bytes.
  void plan_job(size_t bytes, AllReduceJob* job) const {
    const double seconds =
        deadline_factor_ * wire_share_ * static_cast<double>(bytes) / rate_ + kFixedSlackSeconds;
    job->rate = rate_;
    job->total_time = time(seconds);
    job->reduce_time = time(kReducePhaseShare * seconds);
    job->repair_grace = job->total_time / 20;
    job->run_halvings = run_length_.halvings();
  }
  // Adapts to the outcome of an operation on `bytes` bytes that plan_job() has planned.
  void record_outcome(size_t bytes, const Outcome& outcome) {
    const double ideal_time = wire_share_ * static_cast<double>(bytes) / rate_;
    const double deadline_change =
        kDeadlineDecrease * (outcome.excluded_share() / kTargetExcluded - 1);
    deadline_factor_ = std::clamp(deadline_factor_ * std::min(1 + deadline_change, 1.5),
                                  kMinDeadlineFactor, kMaxDeadlineFactor);
    const double lost_share = outcome.lost_share();
    const bool overrun = outcome.overruns() > 0;
    overrun_factor_ = std::clamp(overrun_factor_ * (overrun ? kOverrunDecrease : kOverrunRecovery),
                                 kMinOverrunFactor, 1.0);
    // While probing, or with overruns, the rate may have caused the loss, and not the run length.
    if (!probing_ && !overrun) run_length_.update(lost_share);
    if (fixed_rate_ > 0 || ideal_time < kMinMeasurableSeconds) return;
    double slowest = 0;
    for (const RankReport& r : outcome.reports) slowest = std::max(slowest, r.elapsed_us * 1e-6);
    const double sending_time =
        slowest - std::min(kOverheadSeconds, kMaxOverheadShare * ideal_time);
    const double achieved_rate = rate_ * ideal_time / std::max(sending_time, ideal_time / 2);
    achieved_rates_[operation_count_++ % kRateHistory] = achieved_rate;
    loss_factor_ = std::clamp(loss_factor_ * (lost_share > 0.25  ? 0.8
                                              : lost_share < 0.1 ? 1.1
                                                                 : 1),
                              0.25, 1.0);
    // The rate starts low. As long as only the rate limits operations, each next operation probes a
    // higher rate. From then on, a higher rate is probed every kProbeInterval operations.
    const bool rate_limited = !overrun && lost_share < 0.01 && achieved_rate > 0.85 * rate_;
    if (overrun || (lost_share < 0.01 && achieved_rate < 0.7 * rate_)) searching_ = false;
    const double best_rate = *std::max_element(achieved_rates_.begin(), achieved_rates_.end());
    probing_ = rate_limited && (searching_ || operation_count_ % kProbeInterval == 0);
    rate_ = probing_ ? kProbeFactor * rate_
                     : kRateHeadroom * best_rate * loss_factor_ * overrun_factor_;
  }
  // Records whether the last operation had to be repeated. All ranks pass the same.
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
  static int size_class(size_t bytes) {
    int n = 0;
    for (; bytes > 0; bytes /= 2) ++n;
    return n;
  }
  static double seconds(Time t) { return 1e-9 * static_cast<double>(t.count()); }
  static Time time(double seconds) { return Time(static_cast<int64_t>(1e9 * seconds)); }

  // Bytes that a rank sends in an operation, as a multiple of the bytes of the bucket.
  const double wire_share_;
  const double fixed_rate_;                            // bytes per second; 0: none
  double rate_;                                        // bytes per second
  double deadline_factor_ = kInitialDeadlineFactor;    // multiple of the ideal transfer time
  double loss_factor_ = 1, overrun_factor_ = 1;        // factors of the rate
  std::array<double, kRateHistory> achieved_rates_{};  // bytes per second, of the last operations
  size_t operation_count_ = 0;
  bool searching_ = true;  // only the rate has limited operations so far
  bool probing_ = false;   // the next operation probes a higher rate
  RunLengthController run_length_;
  int backoff_ = 0, next_backoff_ = kFirstBackoff;
  // Seconds per byte of the first few operations, by size class.
  std::map<int, std::vector<double>> exact_times_;
};

}  // namespace fsccl::datagram
