// Controller of the number of packets that are sent to one rank in a row (a run). It adapts the run
// length to losses.
//
// A rank receives from all others together at the rate of one sender, however many they are. But
// runs of several senders collide in the queue of the receiver's switch port (incast), and the
// switch drops packets that do not fit. Runs half as long need half of the queue. Sending to fewer
// receivers at a time does not help: ranks that do not run in lockstep then send whole shards to
// one receiver at the same time.
//
// Long runs need less processor time, because the kernel handles a run as one packet. So a run is
// as long as a burst (the packets that are sent at once, transfer.h) until packets are lost. Then
// shorter runs are tried, which count as lossless until they have lost packets, and the run length
// with the lowest cost is used. Losses decay over time, so that longer runs are tried again, one
// halving at a time, because each doubling may lose ten times as much. If all lengths lose equally,
// because of competing traffic or too high a rate, the longest run costs least.
//
// Ranks need not choose the same run length, because it matters to the sender only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace fsccl::datagram {

// Chooses the run length, as the number of times that a burst is halved. One thread at a time
// calls.
class RunLengthController {
 public:
  static constexpr int kMaxHalvings = 3;  // shorter runs cost more processor time than they save
  // Cost of a halving, in units of the lost share of packets, and relative increase of the cost of
  // losses.
  static constexpr double kCostPerHalving = 0.0005, kLossPenaltyPerHalving = 0.5;
  static constexpr double kDecay = 0.99;  // of losses, per operation

  int halvings() const { return halvings_; }
  // Records the lost share of an operation.
  void update(double lost_share) {
    for (LossHistory& entry : history_) entry.loss *= kDecay, entry.operations *= kDecay;
    LossHistory& current = history_[static_cast<size_t>(halvings_)];
    current.loss += lost_share, current.operations += 1;
    int cheapest = halvings_;
    for (int h = std::max(0, halvings_ - 1); h <= kMaxHalvings; ++h) {
      if (cost(h) < cost(cheapest)) cheapest = h;
    }
    halvings_ = cheapest;
  }

 private:
  // Losses of the operations with one run length.
  struct LossHistory {
    double loss = 0, operations = 0;  // sum of lost shares, and number of operations, both decayed
  };

  // Expected cost, as if there had been one more operation without loss. Longer runs lose at least
  // as much as shorter ones.
  double cost(int halvings) const {
    double loss = 0;
    for (size_t h = static_cast<size_t>(halvings); h < history_.size(); ++h) {
      loss = std::max(loss, history_[h].loss / (history_[h].operations + 1));
    }
    return loss * (1 + kLossPenaltyPerHalving * halvings) + kCostPerHalving * halvings;
  }

  int halvings_ = 0;
  std::array<LossHistory, kMaxHalvings + 1> history_{};
};

}  // namespace fsccl::datagram
