// Buckets that ranks of a played network reduce, and what must hold of the outcome whatever the
// network did.
#pragma once

#include "core/half.h"
#include "core/reduce.h"
#include "network.h"

namespace fsccl::datagram {

constexpr size_t kPayload = 256;

struct Bucket {
  std::vector<Bytes> in;  // of every rank
  Bytes exact;            // by core/reduce
  Job job;
};

inline double element(DType t, const std::byte* at, size_t i) {
  float f = 0;
  uint16_t h = 0;
  double d = 0;
  if (t == DType::kF64) return std::memcpy(&d, at + 8 * i, 8), d;
  if (t == DType::kF32) return std::memcpy(&f, at + 4 * i, 4), f;
  std::memcpy(&h, at + 2 * i, 2);
  return t == DType::kBF16 ? bf16_to_float(h) : f16_to_float(h);
}

inline void put(DType t, std::byte* at, size_t i, double x) {
  const auto f = static_cast<float>(x);
  if (t == DType::kF64) {
    std::memcpy(at + 8 * i, &x, 8);
  } else if (t == DType::kF32) {
    std::memcpy(at + 4 * i, &f, 4);
  } else {
    const uint16_t h = t == DType::kBF16 ? float_to_bf16(f) : float_to_f16(f);
    std::memcpy(at + 2 * i, &h, 2);
  }
}

inline Bucket bucket(World& world, size_t bytes, DType dtype, RedOp op, double phase_ms = 40) {
  Bucket b;
  b.job.bytes = bytes;
  b.job.how.dtype = dtype;
  b.job.how.op = op;
  b.job.how.divisor = world.ranks();
  b.job.phase = ms(phase_ms);
  b.job.end = ms(2.25 * phase_ms);
  b.job.early = ms(2);
  b.job.rate = 4e9 * static_cast<double>(bytes) / (phase_ms * 1e6);  // half of a phase
  std::vector<const void*> all;
  const size_t count = bytes / size_of(dtype);
  for (int r = 0; r < world.ranks(); ++r) {
    b.in.emplace_back(bytes);
    for (size_t i = 0; i < count; ++i) {
      put(dtype, b.in.back().data(), i, static_cast<double>(world.random()() % 2001) / 1000 - 1);
    }
  }
  for (const Bytes& one : b.in) all.push_back(one.data());
  b.exact.resize(bytes);
  reduce(b.job.how, b.exact.data(), all.data(), world.ranks(), count);
  return b;
}

inline void start_all(World& world, const Bucket& b) {
  for (int r = 0; r < world.ranks(); ++r) {
    Job job = b.job;
    job.in = b.in[static_cast<size_t>(r)].data();
    world.start(r, job);
  }
}

// What must hold whatever the network did.
inline void check_alike(World& world, const Bucket& b) {
  const Outcome& first = world[0].outcome();
  for (int r = 1; r < world.ranks(); ++r) {
    expect(std::memcmp(world[r].result(), world[0].result(), b.job.bytes) == 0, "unlike replicas");
    expect(world[r].outcome().excluded.bytes() == first.excluded.bytes(), "unlike exclusions");
    expect(world[r].outcome().reports.size() == first.reports.size() &&
               std::memcmp(world[r].outcome().reports.data(), first.reports.data(),
                           sizeof(Report) * first.reports.size()) == 0,
           "unlike reports");
  }
}

// Pieces are exact, excluded (zero), or scaled, and of these no more than owners have reported; an
// element of a scaled one is the mean of what came, times the ranks.
inline void check_error(World& world, const Bucket& b) {
  const Layout& layout = world[0].layout();
  const Outcome& outcome = world[0].outcome();
  const DType t = b.job.how.dtype;
  const double n = b.job.how.op == RedOp::kAvg ? 1 : world.ranks();
  const double rounding = t == DType::kF32 ? 1e-6 : t == DType::kF64 ? 1e-14 : 1e-2;
  size_t scaled = 0, reported = 0;
  for (size_t p = 0; p < layout.pieces(); ++p) {
    const Interval span = layout.span(p);
    const std::byte* const got = world[0].result() + span.lo;
    const std::byte* const right = b.exact.data() + span.lo;
    if (outcome.excluded.test(p)) {
      for (size_t i = 0; i < span.size(); ++i) expect(got[i] == std::byte{0}, "excluded, not zero");
      continue;
    }
    if (std::memcmp(got, right, span.size()) == 0) continue;
    ++scaled;
    for (size_t i = 0; i < span.size() / size_of(t); ++i) {
      double least = 9, most = -9;
      for (const Bytes& in : b.in) {
        least = std::min(least, element(t, in.data() + span.lo, i));
        most = std::max(most, element(t, in.data() + span.lo, i));
      }
      const double mean = element(t, got, i) / n;
      expect(mean >= least - rounding && mean <= most + rounding, "a sum out of its parts' range");
    }
  }
  for (const Report& r : outcome.reports) reported += r.scaled;
  expect(scaled <= reported, "more pieces differ than were scaled");
}

// Of an operation whose ranks began together: its phases, and Limits::patience with datagrams before
// each of what may go the reliable way, and before the first that comes.
inline Time bound(const Bucket& b) {
  return b.job.end + 3 * Limits().patience + ms(60);
}

}  // namespace fsccl::datagram
