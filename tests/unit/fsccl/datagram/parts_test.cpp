// What an all_reduce by datagrams is made of, piece by piece. Usage, by test_fsccl_datagram.py:
//   parts_test packets|feedback|pace|socket <seed>
#include <limits>
#include <random>

#include "datagram/feedback.h"
#include "datagram/pace.h"
#include "datagram/socket.h"
#include "network.h"

namespace {

using namespace fsccl;
using namespace fsccl::datagram;

// Every bit of a packet matters, and so does where it comes from.
void packets(unsigned seed, size_t length) {
  const Key key{seed, 5};
  const Circle sender = Circle::of(key, 1, 2, 4), receiver = Circle::of(key, 1, 0, 4);
  Bytes packet(sizeof(Wire) + length, std::byte{7});
  Header h;
  h.kind = Kind::kPart;
  h.operation = 7;
  h.place = 8;
  h.length = static_cast<uint16_t>(length);
  seal(sender, 0, h, 0, packet.data());
  Dropped d;
  const auto read = [&](int from, size_t size) {
    return open(receiver, from, packet.data(), size, 5, &d);
  };
  expect(read(2, packet.size()).has_value() && d.all() == 0, "a good one");
  expect(!read(1, packet.size()) && d.foreign == 1, "another's address");
  for (const uint64_t now : {uint64_t{7 + 128}, uint64_t{7 + 129}, uint64_t{7 + 256}}) {
    const auto p = open(receiver, 2, packet.data(), packet.size(), now, &d);
    expect(p.has_value() == (now == 7 + 128) && (!p || p->operation == 7), "of long ago");
  }
  for (size_t size = 0; size < packet.size(); ++size) expect(!read(2, size), "cut off");
  Bytes longest = packet;
  longest.resize(65'000);
  expect(!open(receiver, 2, longest.data(), longest.size(), 5, &d), "longer than any");
  for (size_t bit = 0; bit < packet.size() * 8; ++bit) {
    packet[bit / 8] ^= std::byte{1} << (bit % 8);
    expect(!read(2, packet.size()), "bit " + std::to_string(bit) + " does not matter");
    packet[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  const Circle others[] = {Circle::of(key, 2, 0, 4), Circle::of({seed, 6}, 1, 0, 4),
                           Circle::of(key, 1, 1, 4)};
  for (const Circle& other : others) {
    expect(!open(other, 2, packet.data(), packet.size(), 5, &d), "of another circle");
  }
  const Layout layout{1000, 256, 3};
  for (const uint64_t offset : {uint64_t{0}, uint64_t{768}, uint64_t{255}, uint64_t{1024},
                                std::numeric_limits<uint64_t>::max() - 255}) {
    const size_t length = offset == 768 ? 232 : 256;
    const bool fits = offset == 0 || offset == 768;
    expect((layout.at(offset, length) < layout.pieces()) == fits, "out of bounds");
    expect(layout.at(offset, length - 1) == layout.pieces(), "another length");
  }
}

void put(Bytes* to, size_t i, float x) { std::memcpy(to->data() + 4 * i, &x, 4); }

// What is excluded comes back with the next gradient of the same bucket, once, and of no other.
void feedback() {
  const Layout layout{1000, 256, 2};
  Bits excluded(layout.pieces());
  excluded.set(1);
  excluded.set(3);
  Bytes gradient(1000), next(1000), other(1000);
  for (size_t i = 0; i < 250; ++i) {
    put(&gradient, i, static_cast<float>(i));
    put(&next, i, 1000);
  }
  Feedback kept;
  const Feedback::Bucket bucket{gradient.data(), 1000, DType::kF32};
  const Feedback::Bucket another{other.data(), 1000, DType::kF32};
  kept.keep(bucket, gradient.data(), layout, excluded);
  expect(kept.has(bucket) && !kept.has(another), "kept for another");
  kept.add(another, next.data());
  kept.add(bucket, next.data());
  for (size_t i = 0; i < 250; ++i) {
    const float more = excluded.test(4 * i / 256) ? static_cast<float>(i) : 0;
    float found = 0;
    std::memcpy(&found, next.data() + 4 * i, 4);
    expect(found == 1000 + more, "comes back otherwise");
  }
  kept.keep(bucket, next.data(), layout, Bits(layout.pieces()));
  expect(!kept.has(bucket), "comes back twice");
}

// An operation on a path that carries so much, where some is lost, or excluded.
void operate(Pace* pace, double carries, double lost = 0, double excluded = 0,
             uint64_t overruns = 0) {
  constexpr size_t kBytes = 4 << 20;
  Outcome outcome;
  outcome.excluded = Bits(1000);
  for (size_t i = 0; i < static_cast<size_t>(1000 * excluded); ++i) outcome.excluded.set(i);
  Report report;
  report.expected = 1000;
  report.lost = static_cast<uint32_t>(1000 * lost);
  const double rate = std::min(pace->rate(), carries) * (1 - lost);
  report.elapsed_us = static_cast<uint32_t>(1e6 * (1.5 * kBytes / rate + 1e-3));
  outcome.reports.assign(4, report);
  outcome.reports[2].overruns = overruns;
  pace->ended(kBytes, outcome);
}

Pace learned(double carries, double times) {
  Pace pace(4, 1, 0);
  for (size_t i = 0; i < Pace::kLearn; ++i) {
    expect(pace.exact(4 << 20), "nothing is known yet");
    pace.ran_exactly(4 << 20, Time(static_cast<int64_t>(1e9 * times * 1.5 * (4 << 20) / carries)));
  }
  expect(!pace.exact(4 << 20), "learned");
  return pace;
}

void pace() {
  constexpr double kCarries = 30e6;
  const auto near = [&](const Pace& p, double carries, const char* when) {
    const double share = p.rate() / carries;
    expect(share > 0.95 && share < 1.5, std::string(when) + ": " + std::to_string(share));
  };
  // Whatever the exact ones met.
  for (const double times : {1.0, 5.0}) {
    Pace p = learned(kCarries, times);
    for (int i = 0; i < 40; ++i) operate(&p, kCarries);
    near(p, kCarries, "found");
    // What others take for a moment.
    for (int i = 0; i < 6; ++i) operate(&p, kCarries, 0.2);
    near(p, kCarries, "beside bursts");
    for (int i = 0; i < 200; ++i) operate(&p, kCarries / 4);
    near(p, kCarries / 4, "a path that became slower");
    for (int i = 0; i < 200; ++i) operate(&p, kCarries);
    near(p, kCarries, "and faster again");
    for (int i = 0; i < 40; ++i) operate(&p, kCarries, 0.5);
    expect(p.rate() < 0.5 * kCarries, "where half of all is lost it gives way");
  }
  // A host that takes less than the path brings, and loses little by it.
  Pace slow = learned(2 * kCarries, 1);
  double all = 0;
  for (int i = 0; i < 600; ++i) {
    const bool much = slow.rate() > kCarries;
    operate(&slow, 2 * kCarries, much ? 0.03 : 0, 0, much ? 5 : 0);
    if (i >= 300) all += slow.rate() / kCarries / 300;
  }
  expect(all > 0.8 && all < 1.15, "a host without room: " + std::to_string(all));
  for (int i = 0; i < 300; ++i) operate(&slow, 2 * kCarries);
  near(slow, 2 * kCarries, "it has room again");
  // Time for what would be excluded, and no more than is needed.
  Pace p = learned(kCarries, 1);
  Job before, more, less;
  p.plan(4 << 20, &before);
  for (int i = 0; i < 20; ++i) operate(&p, kCarries, 0.01, 0.1);
  p.plan(4 << 20, &more);
  for (int i = 0; i < 1000; ++i) operate(&p, kCarries);
  p.plan(4 << 20, &less);
  expect(more.end > before.end && less.end < before.end, "time follows what is excluded");
}

// Through the kernel, with and without its help.
void runs_of_packets(unsigned seed) {
  std::mt19937 random(seed);
  Socket from("tcp:1:127.0.0.1"), one("tcp:1:127.0.0.1"), two("tcp:1:127.0.0.1");
  const std::vector<std::string> all{from.address(), one.address(), two.address()};
  for (Socket* s : {&from, &one, &two}) s->meet(all);
  for (const bool helps : {true, false}) {
    if (!helps) {  // the kernel divides no packets that have no sum
      const int on = 1;
      for (int fd = 3; fd < 64; ++fd) setsockopt(fd, SOL_SOCKET, SO_NO_CHECK, &on, sizeof on);
    }
    std::vector<Bytes> sent[3], came[3];
    for (int i = 0; i < 300; ++i) {
      const int to = 1 + static_cast<int>(random() % 2);
      const size_t bytes = random() % 8 == 0 ? sizeof(Wire) + random() % 1400 : 1472;
      std::byte* const made = from.place(1472);
      std::fill_n(made, bytes, static_cast<std::byte>(i));
      const Wire h;
      std::memcpy(made, &h, sizeof h);
      sent[to].emplace_back(made, made + bytes);
      from.send(to, bytes);
      if (i % 50 == 49) {
        from.flush();
        for (int r : {1, 2}) {
          Socket& socket = r == 1 ? one : two;
          while (socket.receive([&](int who, const std::byte* packet, size_t size) {
            expect(who == 0, "of a stranger");
            came[r].emplace_back(packet, packet + size);
          })) {
          }
        }
      }
    }
    for (int r : {1, 2}) expect(came[r] == sent[r], "rank " + std::to_string(r) + " got others");
  }
  expect(from.refused() == 0, "refused");
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string& what = words.at(0);
  const auto seed = static_cast<unsigned>(std::stoul(words.at(1)));
  if (what == "packets") {
    for (const size_t length : {64, 1024, 1440, 8200}) packets(seed, length);
  }
  if (what == "feedback") feedback();
  if (what == "pace") pace();
  if (what == "socket") runs_of_packets(seed);
  std::puts("ok");
  return 0;
}
