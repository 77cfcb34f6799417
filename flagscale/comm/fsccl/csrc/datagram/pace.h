// How fast to send and how long to wait, learned from what has been: and which operations go the
// exact way, which all ranks must decide alike, from what all of them know.
//
// The first operations of a size go the exact way. Their times say what the path carries; from then
// on the rate falls by what is lost, and grows slowly where nothing is and nobody was slow. A phase
// may take 0.83 of the time that both need together, and a slack beside, which grows where anything
// had to be excluded and shrinks where nothing had.
//
// An operation that had to be repeated sends the next ones the exact way at once: 8 of them, and
// twice as many each time that it happens again in a row.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "session.h"

namespace fsccl::datagram {

class Pace {
 public:
  static constexpr size_t kLearn = 4;  // operations of a size, to a power of two
  static constexpr double kLeastSlack = 3e-3, kMostSlack = 50e-3;  // seconds
  static constexpr int kFirstBan = 8, kLongestBan = 1024;

  // `ranks` a circle, and so many circles side by side, which have a part of every bucket each.
  // `rate`, bytes a second of each rank: 0 where it is to be learned.
  Pace(int ranks, int circles, double rate)
      : share_(2.0 * (ranks - 1) / ranks / circles), fixed_(rate), rate_(rate) {}

  bool exact(size_t bytes) const {
    const auto found = sizes_.find(size_of_class(bytes));
    return ban_ > 0 || found == sizes_.end() || found->second.size() < kLearn;
  }
  void ran_exactly(size_t bytes, Time took) {
    if (ban_ > 0) --ban_;
    std::vector<double>& known = sizes_[size_of_class(bytes)];
    if (known.size() >= kLearn) return;
    known.push_back(seconds(took) / static_cast<double>(bytes));
    if (known.size() < kLearn) return;
    std::sort(known.begin(), known.end());
    // Not the first one, which opens connections, nor one that met traffic.
    if (fixed_ == 0) rate_ = std::max(rate_, 0.97 * share_ / known[1]);
  }
  double rate() const { return rate_; }
  void plan(size_t bytes, Job* job) const {
    const double both = share_ * static_cast<double>(bytes) / rate_;
    job->rate = rate_;
    job->phase = time(0.83 * both + slack_);
    job->early = job->phase / 10;
  }
  void ended(size_t bytes, const Outcome& outcome) {
    const double due = share_ * static_cast<double>(bytes) / rate_;
    const bool excludes = outcome.excluded_share() > 0.002;
    slack_ = excludes ? std::min(1.5 * slack_, 2 * due + kMostSlack)
                      : std::max(0.97 * slack_, kLeastSlack);
    if (fixed_ > 0) return;
    double slowest = 0;
    for (const Report& r : outcome.reports) slowest = std::max(slowest, r.elapsed_us * 1e-6);
    const double lost = outcome.lost_share();
    if (lost > 0.02) {
      rate_ *= 0.85;
    } else if (lost > 0.005) {
      rate_ *= 0.97;
    } else if (lost < 0.001 && slowest < 1.25 * due + 1e-3) {
      rate_ *= 1.02;
    }
  }
  // What all ranks know of the last operation: whether it had to be repeated.
  void repeated(bool it_was) {
    if (!it_was) {
      next_ban_ = kFirstBan;
      return;
    }
    ban_ = next_ban_;
    next_ban_ = std::min(2 * next_ban_, kLongestBan);
  }
  int ban() const { return ban_; }

 private:
  static int size_of_class(size_t bytes) {
    int n = 0;
    for (; bytes > 0; bytes /= 2) ++n;
    return n;
  }
  static double seconds(Time t) { return 1e-9 * static_cast<double>(t.count()); }
  static Time time(double seconds) { return Time(static_cast<int64_t>(1e9 * seconds)); }

  const double share_, fixed_;
  double rate_, slack_ = 2 * kLeastSlack;  // bytes a second; seconds
  int ban_ = 0, next_ban_ = kFirstBan;
  std::map<int, std::vector<double>> sizes_;  // seconds a byte, of the first few
};

}  // namespace fsccl::datagram
