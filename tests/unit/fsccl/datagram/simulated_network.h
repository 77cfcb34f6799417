// Simulated network for tests of the bounded all_reduce. It connects the sessions of all ranks, and
// loses, duplicates, delays and forges packets according to its conditions and a seed, in simulated
// time.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "datagram/session.h"

namespace fsccl::datagram {

using Bytes = std::vector<std::byte>;

inline void expect(bool condition, const std::string& message) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", message.c_str());
  std::exit(1);
}

inline Time ms(double n) { return Time(static_cast<int64_t>(n * 1e6)); }

// Conditions of a simulated network. `lost` and `duplicated` are probabilities per packet.
struct NetworkConditions {
  double lost = 0;
  double duplicated = 0;
  double delay_ms = 0.2;    // maximum, uniformly distributed from a tenth of it
  double burst = 1;         // packets lost together, on average
  double forged = 0;        // forged packets per packet sent
  double clock_jumps = 0;   // jumps of the receiver's clock, per packet received
  bool parts_only = false;  // lose packets of kind kPart only
  double rate = 0;          // bytes per second of a rank's link, in each direction; 0: unlimited
  double queue_bytes =
      128e3;  // bytes queued before the receiver's link; packets beyond are dropped
  // Returns whether all datagrams between two ranks are lost, or a rank is dead.
  std::function<bool(int from, int to)> cut = [](int, int) { return false; };
  std::function<bool(int rank)> dead = [](int) { return false; };
};

// The ranks of a rail, connected by a simulated network, in simulated time.
class SimulatedNetwork {
 public:
  SimulatedNetwork(int ranks, size_t payload, unsigned seed, NetworkConditions conditions,
                   ProtocolLimits limits = {})
      : conditions_(std::move(conditions)), random_(seed), payload_(payload) {
    const Key key{seed * 77 + 1, 99};
    for (int r = 0; r < ranks; ++r) {
      endpoints_.push_back(std::make_unique<SimulatedEndpoint>(*this, r));
      sessions_.push_back(std::make_unique<Session>(Rail::derive(key, 3, r, ranks), payload, limits,
                                                    *endpoints_.back()));
      clock_offsets_.push_back(ms(static_cast<double>(random_() % 100000)));
      next_step_.push_back(Time(0));
    }
    out_free_ = in_free_ = next_step_;
    overruns.resize(static_cast<size_t>(ranks));
  }

  std::vector<uint32_t> overruns;  // as the host of each rank reports them
  int ranks() const { return static_cast<int>(sessions_.size()); }
  Session& operator[](int rank) { return *sessions_[static_cast<size_t>(rank)]; }
  Time now() const { return now_; }
  NetworkConditions& conditions() { return conditions_; }
  std::mt19937& random() { return random_; }

  void start(int rank, const AllReduceJob& job) {
    (*this)[rank].start(job, local(rank));
    next_step_[static_cast<size_t>(rank)] = now_;
  }
  // Runs until all live ranks are done, at most `limit` of simulated time. Returns whether they
  // are.
  bool run_until_done(Time limit, const std::function<void()>& after_event = [] {}) {
    const Time end = now_ + limit;
    while (now_ < end) {
      bool all_done = true;
      for (int r = 0; r < ranks(); ++r)
        all_done = all_done && (conditions_.dead(r) || (*this)[r].is_done());
      if (all_done) return true;
      run_next_event(end);
      after_event();
    }
    return false;
  }

 private:
  // Network of one rank.
  struct SimulatedEndpoint final : Network {
    SimulatedEndpoint(SimulatedNetwork& n, int r) : network(n), rank(r) {}
    std::byte* reserve(size_t max_bytes) override {
      packet_buffer.resize(std::max(packet_buffer.size(), max_bytes));
      return packet_buffer.data();
    }
    void send(int to, size_t bytes) override {
      network.on_sent(rank, to, Bytes(packet_buffer.data(), packet_buffer.data() + bytes));
    }
    uint32_t overruns() const override { return network.overruns[static_cast<size_t>(rank)]; }
    void send_notice(int to, const Notice& notice) override {
      if (network.conditions_.dead(rank)) return;
      network.schedule(ms(2), [this, to, notice] {
        if (!network.conditions_.dead(to)) network[to].on_notice(rank, notice, network.local(to));
        network.next_step_[static_cast<size_t>(to)] = network.now_;
      });
    }
    void send_record(int to, const Bytes& record) override {
      if (network.conditions_.dead(rank)) return;
      network.schedule(ms(2), [this, to, record] {
        if (!network.conditions_.dead(to)) network[to].on_record(rank, record, network.local(to));
        network.next_step_[static_cast<size_t>(to)] = network.now_;
      });
    }
    SimulatedNetwork& network;
    int rank;
    Bytes packet_buffer;
  };
  // A scheduled function.
  struct Event {
    Time time;
    uint64_t order;
    std::function<void()> call;
    bool operator<(const Event& o) const {
      return time != o.time ? time > o.time : order > o.order;
    }
  };

  bool by_chance(double share) { return std::uniform_real_distribution<>(0, 1)(random_) < share; }
  Time local(int rank) const { return now_ + clock_offsets_[static_cast<size_t>(rank)]; }
  void schedule(Time delay, std::function<void()> event) {
    events_.push({now_ + delay, ++order_, std::move(event)});
  }

  void on_sent(int from, int to, Bytes packet) {
    if (conditions_.dead(from) || conditions_.cut(from, to)) return;
    if (by_chance(conditions_.forged)) send_forged(to);
    const bool is_recorded =
        conditions_.forged > 0 && (recorded_packets_.size() < 4000 || by_chance(0.05));
    if (is_recorded) recorded_packets_.push_back({from, packet});
    WireHeader h;
    std::memcpy(&h, packet.data(), sizeof h);
    const bool may_be_lost = !conditions_.parts_only || h.kind == PacketKind::kPart;
    int& burst_packets_left = loss_bursts_[{from, to}];
    if (burst_packets_left == 0 && by_chance(conditions_.lost / conditions_.burst)) {
      burst_packets_left = 1 + static_cast<int>(std::exponential_distribution<>(1)(random_) *
                                                (conditions_.burst - 1));
    }
    if (burst_packets_left > 0 && may_be_lost) return static_cast<void>(--burst_packets_left);
    const int copies = by_chance(conditions_.duplicated) ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      if (conditions_.rate > 0) {
        transmit(from, to, packet);
      } else {
        deliver(from, to, packet);
      }
    }
  }
  Time transmission_time(double bytes) const {
    return Time(static_cast<int64_t>(1e9 * bytes / conditions_.rate));
  }
  // Sends a packet through the link of the sender, then through that of the receiver, which other
  // senders share.
  void transmit(int from, int to, const Bytes& packet) {
    const Time transmission_duration = transmission_time(static_cast<double>(packet.size()));
    Time& out = out_free_[static_cast<size_t>(from)];
    out = std::max(out, now_) + transmission_duration;
    schedule(out - now_, [this, from, to, transmission_duration, packet] {
      Time& in = in_free_[static_cast<size_t>(to)];
      if (in + transmission_duration - now_ > transmission_time(conditions_.queue_bytes)) return;
      in = std::max(in, now_) + transmission_duration;
      schedule(in - now_, [this, from, to, packet] { deliver(from, to, packet); });
    });
  }
  void deliver(int from, int to, const Bytes& packet) {
    const double delay =
        conditions_.delay_ms * (0.1 + std::uniform_real_distribution<>(0, 1)(random_));
    schedule(ms(delay), [this, from, to, packet] {
      const auto t = static_cast<size_t>(to);
      if (conditions_.dead(to)) return;
      if (by_chance(conditions_.clock_jumps)) {
        clock_offsets_[t] += ms((static_cast<double>(random_() % 2000) - 1000) * 3600);
      }
      (*this)[to].on_packet(from, packet.data(), packet.size(), local(to));
      if (next_step_[t] > now_ + ms(0.05)) next_step_[t] = now_ + ms(0.05);
    });
  }
  // Sends a packet of an attacker who has recorded earlier packets and can use any sender address:
  // a recorded packet, unchanged or modified, or random bytes.
  void send_forged(int to) {
    Bytes packet(random_() % (payload_ + 100));
    int from = static_cast<int>(random_() % static_cast<unsigned>(ranks()));
    if (!recorded_packets_.empty() && random_() % 8 != 0) {
      const auto& recorded = recorded_packets_[random_() % recorded_packets_.size()];
      packet = recorded.second;
      if (random_() % 2 == 0) from = recorded.first;
      if (random_() % 2 == 0) packet[random_() % packet.size()] ^= std::byte{4};
    }
    deliver(from, to, packet);
  }

  void run_next_event(Time end) {
    Time next = events_.empty() ? end : events_.top().time;
    for (int r = 0; r < ranks(); ++r) {
      if (!conditions_.dead(r)) next = std::min(next, next_step_[static_cast<size_t>(r)]);
    }
    now_ = std::max(now_, next);
    while (!events_.empty() && events_.top().time <= now_) {
      const auto event = events_.top().call;
      events_.pop();
      event();
    }
    for (int r = 0; r < ranks(); ++r) {
      const auto i = static_cast<size_t>(r);
      if (conditions_.dead(r) || next_step_[i] > now_) continue;
      const Time wait = (*this)[r].step(local(r)) - local(r);
      next_step_[i] = now_ + std::max(wait, Time(10000));
    }
  }

  NetworkConditions conditions_;
  std::mt19937 random_;
  size_t payload_;
  Time now_{};
  uint64_t order_ = 0;
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<SimulatedEndpoint>> endpoints_;
  std::vector<std::unique_ptr<Session>> sessions_;
  // By rank: offset of its clock, time of its next step, and times at which its link is free.
  std::vector<Time> clock_offsets_, next_step_, out_free_, in_free_;
  std::map<std::pair<int, int>, int> loss_bursts_;
  std::vector<std::pair<int, Bytes>> recorded_packets_;
};

}  // namespace fsccl::datagram
