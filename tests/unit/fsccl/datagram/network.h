// Ranks that reduce over a network that is played: it loses, doubles, delays and forges as it is
// told, by a seed, in a time of its own.
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

inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

inline Time ms(double n) { return Time(static_cast<int64_t>(n * 1e6)); }

struct Weather {
  double lost = 0;            // of packets
  double doubled = 0;
  double delay_ms = 0.2;      // at least a tenth of it, at random
  double burst = 1;           // packets that are lost together, on average
  double forged = 0;          // packets of a stranger's for each that is sent
  double jumps = 0;           // of a rank's clock, for each packet that it gets
  bool parts_only = false;    // lost are parts alone
  double rate = 0;            // bytes a second of a rank's cable, each way; 0: any
  double queue = 128e3;       // bytes that wait before a receiver's cable; what comes then is lost
  std::function<bool(int from, int to)> cut = [](int, int) { return false; };  // of datagrams
  std::function<bool(int rank)> dead = [](int) { return false; };
};

class World {
 public:
  World(int ranks, size_t payload, unsigned seed, Weather weather, Limits limits = {})
      : weather_(std::move(weather)), random_(seed), payload_(payload) {
    const Key key{seed * 77 + 1, 99};
    for (int r = 0; r < ranks; ++r) {
      ends_.push_back(std::make_unique<End>(*this, r));
      sessions_.push_back(std::make_unique<Session>(Circle::of(key, 3, r, ranks), payload, limits,
                                                    *ends_.back()));
      offset_.push_back(ms(static_cast<double>(random_() % 100000)));
      wake_.push_back(Time(0));
    }
    out_free_ = in_free_ = wake_;
    overruns.resize(static_cast<size_t>(ranks));
  }

  std::vector<uint32_t> overruns;  // as each rank's host tells
  int ranks() const { return static_cast<int>(sessions_.size()); }
  Session& operator[](int rank) { return *sessions_[static_cast<size_t>(rank)]; }
  Time now() const { return now_; }
  Weather& weather() { return weather_; }
  std::mt19937& random() { return random_; }

  void start(int rank, const Job& job) {
    (*this)[rank].start(job, local(rank));
    wake_[static_cast<size_t>(rank)] = now_;
  }
  // Whether all living ranks are done; nothing goes on longer than `limit`.
  bool play(Time limit, const std::function<void()>& each = [] {}) {
    const Time end = now_ + limit;
    while (now_ < end) {
      bool done = true;
      for (int r = 0; r < ranks(); ++r) done = done && (weather_.dead(r) || (*this)[r].done());
      if (done) return true;
      once(end);
      each();
    }
    return false;
  }

 private:
  struct End final : Network {
    End(World& w, int r) : world(w), rank(r) {}
    std::byte* place(size_t most) override {
      made.resize(std::max(made.size(), most));
      return made.data();
    }
    void send(int to, size_t bytes) override {
      world.sent(rank, to, Bytes(made.data(), made.data() + bytes));
    }
    uint32_t overruns() const override { return world.overruns[static_cast<size_t>(rank)]; }
    void tell(int to, const Notice& notice) override {
      if (world.weather_.dead(rank)) return;
      world.at(ms(2), [this, to, notice] {
        if (!world.weather_.dead(to)) world[to].on_notice(rank, notice, world.local(to));
        world.wake_[static_cast<size_t>(to)] = world.now_;
      });
    }
    void tell_record(int to, const Bytes& record) override {
      if (world.weather_.dead(rank)) return;
      world.at(ms(2), [this, to, record] {
        if (!world.weather_.dead(to)) world[to].on_record(rank, record, world.local(to));
        world.wake_[static_cast<size_t>(to)] = world.now_;
      });
    }
    World& world;
    int rank;
    Bytes made;
  };
  struct Event {
    Time time;
    uint64_t order;
    std::function<void()> call;
    bool operator<(const Event& o) const {
      return time != o.time ? time > o.time : order > o.order;
    }
  };

  bool by_chance(double share) { return std::uniform_real_distribution<>(0, 1)(random_) < share; }
  Time local(int rank) const { return now_ + offset_[static_cast<size_t>(rank)]; }
  void at(Time in, std::function<void()> call) {
    events_.push({now_ + in, ++order_, std::move(call)});
  }

  void sent(int from, int to, Bytes packet) {
    if (weather_.dead(from) || weather_.cut(from, to)) return;
    if (by_chance(weather_.forged)) forge(to);
    const bool heard = weather_.forged > 0 && (kept_.size() < 4000 || by_chance(0.05));
    if (heard) kept_.push_back({from, packet});
    Wire h;
    std::memcpy(&h, packet.data(), sizeof h);
    const bool may = !weather_.parts_only || h.kind == Kind::kPart;
    int& left = losing_[{from, to}];
    if (left == 0 && by_chance(weather_.lost / weather_.burst)) {
      left = 1 + static_cast<int>(std::exponential_distribution<>(1)(random_) * (weather_.burst - 1));
    }
    if (left > 0 && may) return static_cast<void>(--left);
    const int copies = by_chance(weather_.doubled) ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      if (weather_.rate > 0) {
        queue(from, to, packet);
      } else {
        deliver(from, to, packet);
      }
    }
  }
  Time takes(double bytes) const { return Time(static_cast<int64_t>(1e9 * bytes / weather_.rate)); }
  // One after the other through the sender's cable, then through the receiver's, which others share.
  void queue(int from, int to, const Bytes& packet) {
    const Time each = takes(static_cast<double>(packet.size()));
    Time& out = out_free_[static_cast<size_t>(from)];
    out = std::max(out, now_) + each;
    at(out - now_, [this, from, to, each, packet] {
      Time& in = in_free_[static_cast<size_t>(to)];
      if (in + each - now_ > takes(weather_.queue)) return;
      in = std::max(in, now_) + each;
      at(in - now_, [this, from, to, packet] { deliver(from, to, packet); });
    });
  }
  void deliver(int from, int to, const Bytes& packet) {
    const double delay = weather_.delay_ms * (0.1 + std::uniform_real_distribution<>(0, 1)(random_));
    at(ms(delay), [this, from, to, packet] {
      const auto t = static_cast<size_t>(to);
      if (weather_.dead(to)) return;
      if (by_chance(weather_.jumps)) {
        offset_[t] += ms((static_cast<double>(random_() % 2000) - 1000) * 3600);
      }
      (*this)[to].on_packet(from, packet.data(), packet.size(), local(to));
      if (wake_[t] > now_ + ms(0.05)) wake_[t] = now_ + ms(0.05);
    });
  }
  // A stranger's who has heard everything so far and sends from any address: it all again, to
  // anyone, as it was or changed, or noise.
  void forge(int to) {
    Bytes packet(random_() % (payload_ + 100));
    int from = static_cast<int>(random_() % static_cast<unsigned>(ranks()));
    if (!kept_.empty() && random_() % 8 != 0) {
      const auto& old = kept_[random_() % kept_.size()];
      packet = old.second;
      if (random_() % 2 == 0) from = old.first;
      if (random_() % 2 == 0) packet[random_() % packet.size()] ^= std::byte{4};
    }
    deliver(from, to, packet);
  }

  void once(Time end) {
    Time next = events_.empty() ? end : events_.top().time;
    for (int r = 0; r < ranks(); ++r) {
      if (!weather_.dead(r)) next = std::min(next, wake_[static_cast<size_t>(r)]);
    }
    now_ = std::max(now_, next);
    while (!events_.empty() && events_.top().time <= now_) {
      const auto call = events_.top().call;
      events_.pop();
      call();
    }
    for (int r = 0; r < ranks(); ++r) {
      const auto i = static_cast<size_t>(r);
      if (weather_.dead(r) || wake_[i] > now_) continue;
      const Time wait = (*this)[r].step(local(r)) - local(r);
      wake_[i] = now_ + std::max(wait, Time(10000));
    }
  }

  Weather weather_;
  std::mt19937 random_;
  size_t payload_;
  Time now_{};
  uint64_t order_ = 0;
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<End>> ends_;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<Time> offset_, wake_, out_free_, in_free_;  // when a rank's cable is free
  std::map<std::pair<int, int>, int> losing_;
  std::vector<std::pair<int, Bytes>> kept_;
};

}  // namespace fsccl::datagram
