// How many packets go to one rank in a row, learned from what is lost.
//
// What reaches a rank from all others is one sender's rate, however many they are; but runs of many
// senders meet in the queue of its port (incast), and a switch drops what has no place there. Runs
// half as long need half of the queue. Fewer receivers at a time do not: ranks that are not quite
// in step then send whole shards to one of them at a time, together (docs/traffic.md).
//
// Long runs are cheap: the kernel takes a run as one packet. So runs are as long as a burst until
// something is lost. Then shorter ones are tried, which count as losing nothing until they have, and
// those are taken that cost least as far as is remembered. That fades, so longer ones are tried
// again: one step at a time, for each may lose ten times as much as the one before. Where all lose
// alike, by others' traffic or because the rate is too high, the longest cost least.
//
// Ranks that know the same decide the same, but need not: the length is its sender's alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace fsccl::datagram {

class Runs {
 public:
  static constexpr int kMost = 3;  // shorter ones cost cores more than they save
  // What a halving must save: of all packets, and of what is lost.
  static constexpr double kPrice = 0.0005, kDearer = 0.5;
  static constexpr double kFades = 0.99;  // with each operation

  int halvings() const { return now_; }
  // An operation of which so much was lost.
  void ended(double lost) {
    for (Known& k : known_) k.lost *= kFades, k.times *= kFades;
    Known& its = known_[static_cast<size_t>(now_)];
    its.lost += lost, its.times += 1;
    int best = now_;
    for (int h = std::max(0, now_ - 1); h <= kMost; ++h) {
      if (cost(h) < cost(best)) best = h;
    }
    now_ = best;
  }

 private:
  struct Known {
    double lost = 0, times = 0;  // shares, added up; of so many operations
  };

  // As if there had been one more, without a loss. Longer ones lose what shorter ones do, at least.
  double cost(int halvings) const {
    double lost = 0;
    for (size_t h = static_cast<size_t>(halvings); h < known_.size(); ++h) {
      lost = std::max(lost, known_[h].lost / (known_[h].times + 1));
    }
    return lost * (1 + kDearer * halvings) + kPrice * halvings;
  }

  int now_ = 0;
  std::array<Known, kMost + 1> known_{};
};

}  // namespace fsccl::datagram
