// How fast to send, how long to wait and how many packets go to one rank in a row (runs.h), learned
// from what has been: and which operations go the exact way, which all ranks must decide alike, from
// what all of them know.
//
// The first operations of a size go the exact way. Their times say what the path carries; from then
// on the rate is a little above the most that one of the last operations has brought, as BBR has it
// (Cardwell and others, 2016): what others take now and then costs a repair, and does not slow down
// what follows. Only where a large part is lost the rate falls, for a while; and a little where a
// host has no room for what comes, because its processor is behind.
//
// How long an operation may take is learned by what it costs: each makes it a little shorter, and one
// of which something is excluded longer, by so much that both are even at half a percent on average.
// So what may be excluded is spent on the slowest operations, whatever makes them slow.
//
// An operation that had to be repeated sends the next ones the exact way at once: two of them, and
// twice as many each time that it happens again in a row.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "runs.h"
#include "session.h"

namespace fsccl::datagram {

class Pace {
 public:
  static constexpr size_t kLearn = 4;  // operations of a size, to a power of two
  // Times what its bytes take: until the end, at first, at least, at most; and seconds beside. Of it
  // parts may take so much.
  static constexpr double kEnd = 2, kLeastEnd = 1.6, kMostEnd = 9, kBeside = 6e-3, kParts = 0.6;
  // On average; and by which part of itself the time changes where nothing is.
  static constexpr double kExcluded = 0.005, kShorter = 0.004;
  static constexpr size_t kMemory = 64;  // operations
  static constexpr double kAbove = 1.05, kStep = 1.2;
  static constexpr size_t kProbe = 8;  // operations
  static constexpr double kSlower = 0.95, kFaster = 1.01, kLeastRoom = 0.1;
  // Of an operation's seconds: what is no sending, about, and of which share it is that at most, or
  // rates of short ones would be told too high; and what it takes to tell a rate by it.
  static constexpr double kReach = 2e-3, kReachShare = 0.04, kShortest = 3e-3;
  static constexpr int kFirstBan = 2, kLongestBan = 1024;

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
    // What the path carries at least: they may have met traffic, or waited for what was lost.
    if (fixed_ == 0) rate_ = std::max(rate_, 0.97 * share_ / known[0]);
    if (turn_ == 0) brought_.fill(rate_ / kAbove);
  }
  double rate() const { return rate_; }
  void plan(size_t bytes, Job* job) const {
    const double end = end_ * share_ * static_cast<double>(bytes) / rate_ + kBeside;
    job->rate = rate_;
    job->end = time(end);
    job->phase = time(kParts * end);
    job->early = job->end / 20;
    job->halvings = runs_.halvings();
  }
  void ended(size_t bytes, const Outcome& outcome) {
    const double due = share_ * static_cast<double>(bytes) / rate_;
    const double longer = kShorter * (outcome.excluded_share() / kExcluded - 1);
    end_ = std::clamp(end_ * std::min(1 + longer, 1.5), kLeastEnd, kMostEnd);
    const double lost = outcome.lost_share();
    const bool overrun = outcome.overruns() > 0;
    room_ = std::clamp(room_ * (overrun ? kSlower : kFaster), kLeastRoom, 1.0);
    if (!asking_ && !overrun) runs_.ended(lost);  // or it may be the rate's
    if (fixed_ > 0 || due < kShortest) return;
    double slowest = 0;
    for (const Report& r : outcome.reports) slowest = std::max(slowest, r.elapsed_us * 1e-6);
    const double sending = slowest - std::min(kReach, kReachShare * due);
    const double brought = rate_ * due / std::max(sending, due / 2);
    brought_[turn_++ % kMemory] = brought;
    calm_ = std::clamp(calm_ * (lost > 0.25 ? 0.8 : lost < 0.1 ? 1.1 : 1), 0.25, 1.0);
    // It begins low: an operation that nothing but the rate held up says that there is more, until
    // one says that there is not. Then it is asked now and then.
    const bool held = !overrun && lost < 0.01 && brought > 0.85 * rate_;
    if (overrun || (lost < 0.01 && brought < 0.7 * rate_)) searching_ = false;
    const double most = *std::max_element(brought_.begin(), brought_.end());
    asking_ = held && (searching_ || turn_ % kProbe == 0);
    rate_ = asking_ ? kStep * rate_ : kAbove * most * calm_ * room_;
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
  double rate_, end_ = kEnd;         // bytes a second; times what bytes take
  double calm_ = 1, room_ = 1;       // shares of the rate
  std::array<double, kMemory> brought_{};  // bytes a second, of the last operations
  size_t turn_ = 0;
  bool searching_ = true, asking_ = false;  // whether more is there; with this operation
  Runs runs_;
  int ban_ = 0, next_ban_ = kFirstBan;
  std::map<int, std::vector<double>> sizes_;  // seconds a byte, of the first few
};

}  // namespace fsccl::datagram
