// All_reduces by datagrams over a played network. Usage, by test_fsccl_datagram.py:
//   datagram_test storm <seed> <ranks> <bytes> <dtype> <op> <lost> <doubled> <delay ms> <burst>
//   datagram_test random-storms <seed> <how many>
//   datagram_test stranger|clocks|silence|one-way|dead|late|unbiased|feedback <seed>
#include <cmath>

#include "bucket.h"
#include "datagram/feedback.h"
#include "datagram/runs.h"

namespace {

using namespace fsccl;
using namespace fsccl::datagram;

void storm(World& world, size_t bytes, DType dtype, RedOp op) {
  for (int k = 0; k < 3; ++k) {
    const Bucket b = bucket(world, bytes, dtype, op);
    const Time begun = world.now();
    start_all(world, b);
    expect(world.play(ms(5000)), "does not end");
    expect(world.now() - begun <= bound(b), "takes longer than its bound");
    check_alike(world, b);
    check_error(world, b);
    const Weather& w = world.weather();
    if (w.lost == 0) {
      expect(std::memcmp(world[0].result(), b.exact.data(), bytes) == 0, "lost nothing, inexact");
      expect(world[0].outcome().lost_share() == 0 || w.delay_ms > 1, "lost where nothing is");
    }
    if (w.lost <= 0.02) expect(world[0].outcome().excluded_share() <= 0.02, "excludes too much");
  }
}

void stranger(unsigned seed) {
  Weather weather;
  weather.forged = 2;
  World world(4, kPayload, seed, weather);
  for (int k = 0; k < 6; ++k) {
    const Bucket b = bucket(world, 40000, DType::kF32, RedOp::kSum);
    start_all(world, b);
    expect(world.play(ms(5000)), "a stranger holds it up");
    check_alike(world, b);
    expect(std::memcmp(world[0].result(), b.exact.data(), b.job.bytes) == 0, "a stranger's word");
  }
  const Dropped& d = world[1].dropped();
  expect(d.forged > 100 && d.foreign > 100 && d.late > 10 && d.repeated > 10, "not counted");
  expect(d.malformed == 0, "a stranger's packet was taken for signed");
}

void clocks(unsigned seed) {
  Weather weather;
  weather.jumps = 0.02;
  weather.lost = 0.01;
  World world(3, kPayload, seed, weather);
  for (int k = 0; k < 6; ++k) {
    const Bucket b = bucket(world, 30000, DType::kF32, RedOp::kSum);
    const Time begun = world.now();
    start_all(world, b);
    expect(world.play(ms(20000)), "a clock stops it");
    expect(world.now() - begun <= 2 * bound(b), "a clock holds it up");
    check_alike(world, b);
    check_error(world, b);
  }
}

// No datagram arrives, or none of one rank's does: ranks agree on it by the reliable way.
void silence(unsigned seed, bool one_way) {
  World world(4, kPayload, seed, {});
  world.weather().cut = [=](int from, int) { return !one_way || from == 2; };
  for (int k = 0; k < 3; ++k) {
    const Bucket b = bucket(world, 40000, DType::kBF16, RedOp::kAvg);
    const Time begun = world.now();
    start_all(world, b);
    expect(world.play(ms(5000)), "does not end");
    expect(world.now() - begun <= bound(b), "takes longer than its bound");
    check_alike(world, b);
    const double share = world[0].outcome().excluded_share();
    // Of rank 2 nobody has the sums; it has everyone's.
    expect(one_way ? share > 0.2 && share < 0.3 : share == 1, "excludes other than what is lost");
  }
  world.weather().cut = [](int, int) { return false; };
  const Bucket b = bucket(world, 40000, DType::kF32, RedOp::kSum);
  start_all(world, b);
  expect(world.play(ms(5000)), "does not go on");
  check_alike(world, b);
  expect(std::memcmp(world[0].result(), b.exact.data(), b.job.bytes) == 0, "inexact afterwards");
}

// What ranks lead with is kept by one that begins late. Where all that is said is late, nothing is lost.
void late(unsigned seed) {
  World world(4, kPayload, seed, {});
  for (int k = 0; k < 3; ++k) {
    const Bucket b = bucket(world, 40000, DType::kF32, RedOp::kSum);
    const int last = static_cast<int>(world.random()() % 4);
    const auto start = [&](int r) {
      Job job = b.job;
      job.in = b.in[static_cast<size_t>(r)].data();
      world.start(r, job);
    };
    for (int r = 0; r < 4; ++r) {
      if (r != last) start(r);
    }
    expect(!world.play(ms(200)), "without a rank");
    const Time begun = world.now();
    start(last);
    expect(world.play(ms(5000)), "does not end");
    // Half of a phase for the parts, of which two of three had been sent, and half for the sums.
    expect(world.now() - begun < b.job.phase * 9 / 10, "what had been sent is sent again");
    check_alike(world, b);
    expect(std::memcmp(world[0].result(), b.exact.data(), b.job.bytes) == 0, "inexact");
    for (const Report& r : world[0].outcome().reports) expect(r.lost == 0, "what came early is not kept");
  }
  Weather far;
  far.delay_ms = 20;
  World slow(2, kPayload, seed, far);
  const Bucket b = bucket(slow, 40000, DType::kF32, RedOp::kSum);
  start_all(slow, b);
  expect(slow.play(ms(5000)), "does not end");
  expect(std::memcmp(slow[0].result(), b.exact.data(), b.job.bytes) == 0, "inexact");
}

// A rank dies at any moment: whoever finishes has the others' outcome, whoever cannot knows whom it
// waits for.
void dead(unsigned seed) {
  Weather weather;
  weather.lost = 0.05;
  World world(4, kPayload, seed, weather);
  const Bucket b = bucket(world, 60000, DType::kF32, RedOp::kSum);
  const Time dies = ms(static_cast<double>(world.random()() % 600) / 10);
  world.weather().dead = [&world, dies](int r) { return r == 3 && world.now() >= dies; };
  start_all(world, b);
  const bool all = world.play(ms(3000));
  int first = -1;
  for (int r = 0; r < 3; ++r) {
    if (!world[r].done()) {
      expect(world[r].awaited() == 3, "waits for another than who died");
      expect(!all, "not done");
      continue;
    }
    if (first < 0) first = r;
    expect(std::memcmp(world[r].result(), world[first].result(), b.job.bytes) == 0, "unlike");
  }
  // The next one cannot begin.
  for (int r = 0; r < 3; ++r) {
    if (!world[r].done()) return;
  }
  start_all(world, b);
  expect(!world.play(ms(1000)), "goes on without a rank");
  for (int r = 0; r < 3; ++r) expect(world[r].awaited() == 3, "waits for another than who died");
}

// Parts are lost, and not repaired: the mean over many operations is the sum.
void unbiased(unsigned seed) {
  Weather weather;
  weather.lost = 0.2;
  weather.parts_only = true;
  Limits limits;
  limits.repairs = 0;
  double of_ones = 0, squares = 0, count = 0;
  for (unsigned k = 0; k < 16; ++k) {
    World world(4, kPayload, seed * 1000 + k, weather, limits);
    Bucket b = bucket(world, 40000, DType::kF32, RedOp::kSum, 10);
    for (int r = 0; r < 4; ++r) {
      for (size_t i = 0; i < b.job.bytes / 4; ++i) {
        put(DType::kF32, b.in[static_cast<size_t>(r)].data(), i, r);  // 0 + 1 + 2 + 3
      }
    }
    start_all(world, b);
    expect(world.play(ms(5000)), "does not end");
    const Layout& layout = world[0].layout();
    expect(world[0].outcome().excluded.count() == 0, "parts alone are lost");
    for (size_t p = 0; p < layout.pieces(); ++p) {
      const double x = element(DType::kF32, world[0].result() + layout.span(p).lo, 0);
      of_ones += x, squares += x * x, ++count;
    }
  }
  // Owners' own parts are never lost: over all shards that evens out, as each owns as much.
  const double mean = of_ones / count, deviation = std::sqrt(squares / count - mean * mean);
  expect(deviation > 0.5, "nothing was scaled");
  expect(std::abs(mean - 6) < 4 * deviation / std::sqrt(count), "biased: " + std::to_string(mean));
}

// Sums are lost, and not repaired. What is excluded of each operation comes back with the next: over
// operations the results add up to what was to be summed but for what is kept last, and without it
// they lack what was excluded. Both over seeds, since which pieces it hits is chance.
void feedback(unsigned seed) {
  constexpr int kRanks = 4, kOperations = 12, kWorlds = 3;
  constexpr double kLost = 0.1, kSum = 10;  // of 1 + 2 + 3 + 4
  Limits limits;
  limits.repairs = 0;
  double with = 0, without = 0, pieces = 0;
  for (unsigned k = 0; k < kWorlds; ++k) {
    Weather weather;
    weather.lost = kLost;
    World world(kRanks, kPayload, seed * 1000 + k, weather, limits);
    Bucket b = bucket(world, 20'000, DType::kF32, RedOp::kSum, 10);
    for (int r = 0; r < kRanks; ++r) {
      for (size_t i = 0; i < b.job.bytes / 4; ++i) {
        put(DType::kF32, b.in[static_cast<size_t>(r)].data(), i, r + 1);
      }
    }
    std::vector<Feedback> kept(kRanks);
    const Feedback::Bucket name{b.in[0].data(), b.job.bytes, DType::kF32};
    std::vector<double> got, plain;
    const std::vector<Bytes> gradients = b.in;
    for (int n = 0; n < kOperations; ++n) {
      b.in = gradients;
      for (size_t r = 0; r < kRanks; ++r) kept[r].add(name, b.in[r].data());
      start_all(world, b);
      expect(world.play(ms(5000)), "does not end");
      const Layout& layout = world[0].layout();
      const Bits& excluded = world[0].outcome().excluded;
      got.resize(layout.pieces()), plain.resize(layout.pieces());
      for (size_t p = 0; p < layout.pieces(); ++p) {
        got[p] += element(DType::kF32, world[0].result() + layout.span(p).lo, 0) / kOperations;
        plain[p] += excluded.test(p) ? 0 : kSum / kOperations;
      }
      for (size_t r = 0; r < kRanks; ++r) kept[r].keep(name, b.in[r].data(), layout, excluded);
    }
    for (size_t p = 0; p < got.size(); ++p) {
      // What is kept at the end is the only thing that has not come back.
      double last = 0;
      for (size_t r = 0; r < kRanks; ++r) {
        Bytes nothing(b.job.bytes);
        kept[r].add(name, nothing.data());
        last += element(DType::kF32, nothing.data() + world[0].layout().span(p).lo, 0);
      }
      with += got[p] + last / kOperations, without += plain[p], ++pieces;
    }
  }
  with /= pieces, without /= pieces;
  expect(without < 0.8 * kSum, "hardly anything was excluded: " + std::to_string(without));
  expect(std::abs(with / kSum - 1) < 0.02, "biased: " + std::to_string(with));
}

// A storm that is drawn: nobody has chosen what meets in it.
void drawn(std::mt19937& random) {
  const auto draw = [&](double most) { return std::uniform_real_distribution<>(0, most)(random); };
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  Weather weather;
  weather.lost = one_in(4) ? draw(1) : one_in(3) ? 0 : draw(0.2);
  weather.doubled = one_in(2) ? 0 : draw(0.6);
  weather.delay_ms = one_in(2) ? draw(1) : draw(30);
  weather.burst = one_in(2) ? 1 : 1 + draw(40);
  weather.forged = one_in(4) ? draw(1) : 0;
  weather.jumps = one_in(8) ? draw(0.02) : 0;
  const int ranks = 2 + static_cast<int>(random() % (one_in(6) ? 16 : 6));
  const DType dtypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
  const DType dtype = dtypes[random() % 4];
  const size_t bytes = (1 + random() % (one_in(3) ? 60 : 6000)) * size_of(dtype);
  const RedOp op = one_in(2) ? RedOp::kSum : RedOp::kAvg;
  const unsigned seed = static_cast<unsigned>(random() % 100'000);
  const int halvings = static_cast<int>(random() % (Runs::kMost + 1));
  World world(ranks, kPayload, seed, weather);
  for (int k = 0; k < 2; ++k) {
    Bucket b = bucket(world, bytes, dtype, op);
    b.job.halvings = halvings;
    const Time begun = world.now();
    start_all(world, b);
    const std::string which = "a storm over " + std::to_string(ranks) + " ranks, seed " +
                              std::to_string(seed) + ", lost " + std::to_string(weather.lost);
    expect(world.play(ms(20000)), which + " does not end");
    const Time late = ms(4 * weather.delay_ms);
    expect(world.now() - begun <= (weather.jumps > 0 ? 2 : 1) * bound(b) + late,
           which + " takes longer than its bound");
    check_alike(world, b);
    check_error(world, b);
  }
}

DType dtype_of(const std::string& name) {
  for (const DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    if (name == name_of(t)) return t;
  }
  expect(false, "no type " + name);
  return DType::kF32;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string& what = words.at(0);
  const auto seed = static_cast<unsigned>(std::stoul(words.at(1)));
  if (what == "storm") {
    Weather weather;
    weather.lost = std::stod(words.at(6));
    weather.doubled = std::stod(words.at(7));
    weather.delay_ms = std::stod(words.at(8));
    weather.burst = std::stod(words.at(9));
    World world(std::stoi(words.at(2)), kPayload, seed, weather);
    storm(world, std::stoul(words.at(3)), dtype_of(words.at(4)),
          words.at(5) == "avg" ? RedOp::kAvg : RedOp::kSum);
  }
  if (what == "random-storms") {
    std::mt19937 random(seed);
    for (unsigned long n = std::stoul(words.at(2)); n > 0; --n) drawn(random);
  }
  if (what == "feedback") feedback(seed);
  if (what == "stranger") stranger(seed);
  if (what == "clocks") clocks(seed);
  if (what == "silence") silence(seed, false);
  if (what == "one-way") silence(seed, true);
  if (what == "dead") dead(seed);
  if (what == "late") late(seed);
  if (what == "unbiased") unbiased(seed);
  std::puts("ok");
  return 0;
}
