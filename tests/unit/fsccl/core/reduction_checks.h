// Checks of all_reduce. check_all_types(): every type with every operation, compared with a single
// reduction of the inputs of all ranks, for numbers that are exact in every order of summation.
// check_identical_results(): numbers whose sums are rounded, for which all ranks must get the same
// bits.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "group.h"
#include "half.h"
#include "reduce.h"

namespace fsccl {

inline void store_number(std::byte* at, DType type, int value) {
  const auto store = [at](auto v) { std::memcpy(at, &v, sizeof v); };
  switch (type) {
    case DType::kF16:
      return store(float_to_f16(static_cast<float>(value)));
    case DType::kBF16:
      return store(float_to_bf16(static_cast<float>(value)));
    case DType::kF32:
      return store(static_cast<float>(value));
    case DType::kF64:
      return store(static_cast<double>(value));
    case DType::kBool:
      return store(static_cast<uint8_t>(value % 2));
    default:
      const auto wide = static_cast<int64_t>(value);
      std::memcpy(at, &wide, size_of(type));
  }
}

// Returns inputs of ones and twos, whose products are exact as well; for AVG, inputs whose averages
// are integers.
inline std::vector<std::byte> exact_inputs(int rank, int ranks, const Reduction& r, size_t count) {
  std::vector<std::byte> out(count * r.width());
  for (size_t i = 0; i < count; ++i) {
    int value = 1 + static_cast<int>((i / 3 + static_cast<size_t>(rank) * 5) % 7 % 2);
    if (r.op == RedOp::kAvg) value = 1 + (rank == static_cast<int>(i) % ranks ? ranks : 0);
    store_number(out.data() + i * r.width(), r.dtype, value);
  }
  return out;
}

inline bool is_defined(const Reduction& r) {
  try {
    check_reduction(r);
  } catch (const Error&) {
    return false;
  }
  return true;
}

[[noreturn]] inline void fail_wrong_result(const Group& g, const Reduction& r, size_t count,
                                           size_t at) {
  std::fprintf(stderr, "all_reduce of %zu %s, %s, by %s: rank %d differs at byte %zu\n", count,
               name_of(r.dtype), name_of(r.op), g.last_algorithm(), g.rank(), at);
  std::_Exit(1);
}

inline void check_equal(const Group& g, const Reduction& r, const std::vector<std::byte>& actual,
                        const std::vector<std::byte>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (actual[i] != expected[i]) fail_wrong_result(g, r, expected.size() / r.width(), i);
  }
}

inline void check_all_types(Group& g, const std::vector<size_t>& counts) {
  const Deadline d = Deadline::after(Deadline::Ms(60000));
  for (int type = 0; type < static_cast<int>(DType::kOpaque); ++type) {
    for (int op = 0; op <= static_cast<int>(RedOp::kPremulSum); ++op) {
      const Reduction r{static_cast<DType>(type), static_cast<RedOp>(op), 2, g.size()};
      if (!is_defined(r)) continue;
      const size_t count = counts[static_cast<size_t>(type + op) % counts.size()];
      std::vector<std::vector<std::byte>> inputs;
      std::vector<const void*> sources;
      for (int p = 0; p < g.size(); ++p) inputs.push_back(exact_inputs(p, g.size(), r, count));
      for (const auto& input_of_rank : inputs) sources.push_back(input_of_rank.data());
      std::vector<std::byte> expected(count * r.width()), out(expected.size());
      reduce(r, expected.data(), sources.data(), g.size(), count);
      auto& input = inputs[static_cast<size_t>(g.rank())];
      g.all_reduce(input.data(), out.data(), count, r, d);
      check_equal(g, r, out, expected);
      g.all_reduce(input.data(), input.data(), count, r, d);  // in place
      check_equal(g, r, input, expected);
    }
  }
}

// Fractions of very different sizes: each order of summation gives another sum.
inline void check_identical_results(Group& g, size_t count) {
  const Deadline d = Deadline::after(Deadline::Ms(60000));
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Reduction r{type, RedOp::kAvg, 1, g.size()};
    std::mt19937 random(static_cast<unsigned>(g.rank()));
    std::vector<std::byte> v(count * r.width()), rank0_result;
    for (size_t i = 0; i < count; ++i) {
      const float f = std::ldexp(static_cast<float>(random()), -static_cast<int>(random() % 40));
      const uint16_t half = type == DType::kBF16 ? float_to_bf16(f) : float_to_f16(f / 65536);
      const void* const from = type == DType::kF32 ? static_cast<const void*>(&f) : &half;
      std::memcpy(v.data() + i * r.width(), from, r.width());
    }
    g.all_reduce(v.data(), v.data(), count, r, d);
    rank0_result = v;
    g.broadcast(BufferList(rank0_result.data(), rank0_result.size()), 0, d);
    check_equal(g, r, v, rank0_result);
  }
}

}  // namespace fsccl
