// Test cases for the bounded all_reduce over a simulated network: inputs with the exact result, and
// checks of the outcome that must hold under all network conditions.
#pragma once

#include "core/half.h"
#include "core/reduce.h"
#include "simulated_network.h"

namespace fsccl::datagram {

constexpr size_t kPayload = 256;  // bytes per packet: small, so that small inputs have many pieces

// Inputs of all ranks, the exact result, and the parameters of the operation.
struct ReductionCase {
  std::vector<Bytes> in;  // of every rank
  Bytes exact;            // result of reduce() (core/reduce.h)
  AllReduceJob job;
};

inline double load_element(DType t, const std::byte* at, size_t i) {
  float f = 0;
  uint16_t h = 0;
  double d = 0;
  if (t == DType::kF64) return std::memcpy(&d, at + 8 * i, 8), d;
  if (t == DType::kF32) return std::memcpy(&f, at + 4 * i, 4), f;
  std::memcpy(&h, at + 2 * i, 2);
  return t == DType::kBF16 ? bf16_to_float(h) : f16_to_float(h);
}

inline void store_element(DType t, std::byte* at, size_t i, double x) {
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

inline ReductionCase make_case(SimulatedNetwork& network, size_t bytes, DType dtype, RedOp op,
                               double reduce_ms = 40) {
  ReductionCase b;
  b.job.bytes = bytes;
  b.job.reduction.dtype = dtype;
  b.job.reduction.op = op;
  b.job.reduction.divisor = network.ranks();
  b.job.reduce_time = ms(reduce_ms);
  b.job.total_time = ms(2.25 * reduce_ms);
  b.job.repair_grace = ms(2);
  b.job.rate = 4e9 * static_cast<double>(bytes) / (reduce_ms * 1e6);  // half of the reduce phase
  std::vector<const void*> sources;
  const size_t count = bytes / size_of(dtype);
  for (int r = 0; r < network.ranks(); ++r) {
    b.in.emplace_back(bytes);
    for (size_t i = 0; i < count; ++i) {
      store_element(dtype, b.in.back().data(), i,
                    static_cast<double>(network.random()() % 2001) / 1000 - 1);
    }
  }
  for (const Bytes& input : b.in) sources.push_back(input.data());
  b.exact.resize(bytes);
  reduce(b.job.reduction, b.exact.data(), sources.data(), network.ranks(), count);
  return b;
}

inline void start_on_all_ranks(SimulatedNetwork& network, const ReductionCase& b) {
  for (int r = 0; r < network.ranks(); ++r) {
    AllReduceJob job = b.job;
    job.in = b.in[static_cast<size_t>(r)].data();
    network.start(r, job);
  }
}

// Checks that all ranks have the same outcome.
inline void check_identical_results(SimulatedNetwork& network, const ReductionCase& b) {
  const Outcome& reference = network[0].outcome();
  for (int r = 1; r < network.ranks(); ++r) {
    expect(std::memcmp(network[r].result(), network[0].result(), b.job.bytes) == 0,
           "replicas differ");
    expect(network[r].outcome().excluded.bytes() == reference.excluded.bytes(),
           "exclusions differ");
    expect(network[r].outcome().reports.size() == reference.reports.size() &&
               std::memcmp(network[r].outcome().reports.data(), reference.reports.data(),
                           sizeof(RankReport) * reference.reports.size()) == 0,
           "reports differ");
  }
}

// Checks that each piece is exact, excluded (zero) or scaled, and that owners have reported all
// scaled pieces. An element of a scaled piece is the mean of the received parts times the number of
// ranks, so the mean must be within the range of the inputs.
inline void check_values(SimulatedNetwork& network, const ReductionCase& b) {
  const BucketLayout& layout = network[0].layout();
  const Outcome& outcome = network[0].outcome();
  const DType t = b.job.reduction.dtype;
  const double n = b.job.reduction.op == RedOp::kAvg ? 1 : network.ranks();
  const double rounding = t == DType::kF32 ? 1e-6 : t == DType::kF64 ? 1e-14 : 1e-2;
  size_t scaled = 0, reported_scaled = 0;
  for (size_t p = 0; p < layout.pieces(); ++p) {
    const Interval span = layout.piece_interval(p);
    const std::byte* const actual = network[0].result() + span.lo;
    const std::byte* const expected = b.exact.data() + span.lo;
    if (outcome.excluded.test(p)) {
      for (size_t i = 0; i < span.size(); ++i)
        expect(actual[i] == std::byte{0}, "excluded, not zero");
      continue;
    }
    if (std::memcmp(actual, expected, span.size()) == 0) continue;
    ++scaled;
    for (size_t i = 0; i < span.size() / size_of(t); ++i) {
      double min_value = 9, max_value = -9;
      for (const Bytes& in : b.in) {
        min_value = std::min(min_value, load_element(t, in.data() + span.lo, i));
        max_value = std::max(max_value, load_element(t, in.data() + span.lo, i));
      }
      const double mean = load_element(t, actual, i) / n;
      expect(mean >= min_value - rounding && mean <= max_value + rounding,
             "a sum outside the range of its parts");
    }
  }
  for (const RankReport& r : outcome.reports) reported_scaled += r.scaled;
  expect(scaled <= reported_scaled, "more pieces differ than were scaled");
}

// Upper bound of the duration of an operation whose ranks start together: its phases, and
// ProtocolLimits::fallback_delay before each message that may need the reliable transport, and
// before the first packet.
inline Time time_bound(const ReductionCase& b) {
  return b.job.total_time + 3 * ProtocolLimits().fallback_delay + ms(60);
}

}  // namespace fsccl::datagram
