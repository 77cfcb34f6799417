// The core's small parts: conversions over all their values, cuts, pieces, reductions.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "half.h"
#include "pieces.h"
#include "reduce.h"
#include "settings.h"

using namespace fsccl;

#define EXPECT(condition)                                                      \
  if (!(condition)) {                                                          \
    std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
    std::exit(1);                                                              \
  }

namespace {

// The float16 of a float by arithmetic: the nearest of all 63488 finite ones, ties to even.
uint16_t nearest_f16(float f) {
  if (std::isnan(f)) return 0x7E00;
  const double a = std::fabs(static_cast<double>(f));
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  if (a >= 65520.0) return sign | 0x7C00;
  const int exponent = a == 0 ? -14 : std::max(-14, std::ilogb(a));
  const double step = std::ldexp(1.0, exponent - 10);
  const auto units = static_cast<uint32_t>(std::nearbyint(a / step));  // ties to even
  return static_cast<uint16_t>(sign | (units + (static_cast<uint32_t>(exponent + 14) << 10)));
}

void conversions() {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<uint16_t>(h);
    const float wide = f16_to_float(half);
    const bool nan = (h & 0x7FFF) > 0x7C00;
    EXPECT(nan ? std::isnan(wide) : float_to_f16(wide) == half);
    const float b = bf16_to_float(half);
    EXPECT((h & 0x7FFF) > 0x7F80 ? std::isnan(bf16_to_float(float_to_bf16(b)))
                                 : float_to_bf16(b) == half);
  }
  uint32_t bits = 12345;
  for (int i = 0; i < 2000000; ++i) {
    bits = bits * 1664525u + 1013904223u;
    const float f = bits_to_float(bits);
    if (std::isnan(f)) continue;
    EXPECT(float_to_f16(f) == nearest_f16(f));
  }
  // Ties go to even; the largest float rounds to infinity.
  EXPECT(float_to_bf16(bits_to_float(0x3F808000)) == 0x3F80);
  EXPECT(float_to_bf16(bits_to_float(0x3F818000)) == 0x3F82);
  EXPECT(float_to_bf16(std::numeric_limits<float>::max()) == 0x7F80);
  float wide[20], back[20];
  uint16_t half[20];
  for (int i = 0; i < 20; ++i) wide[i] = static_cast<float>(i) * 0.37f - 3;
  f16_store(half, wide, 20);
  f16_load(back, half, 20);
  for (int i = 0; i < 20; ++i) EXPECT(back[i] == f16_to_float(float_to_f16(wide[i])));
}

void cuts() {
  const size_t sizes[] = {0, 1, 7, 4096, 100001, (size_t{1} << 33) + 5};
  for (const size_t n : sizes) {
    for (size_t parts = 1; parts <= 9; ++parts) {
      for (const size_t grain : {size_t{1}, size_t{64}, size_t{8192}}) {
        size_t at = 0, largest = 0, smallest = n;
        for (size_t i = 0; i < parts; ++i) {
          const Interval c = cut(n, parts, i, grain);
          EXPECT(c.lo == at && c.hi >= c.lo && (c.hi == n || c.hi % grain == 0));
          at = c.hi;
          largest = std::max(largest, c.size());
          smallest = std::min(smallest, c.size());
        }
        EXPECT(at == n && largest - smallest <= grain + grain - 1);
      }
    }
  }
}

void pieces() {
  char memory[100], copy[100];
  std::iota(memory, memory + 100, static_cast<char>(0));
  Pieces p;
  p.add(piece(memory + 50, 10));
  p.add(piece(memory + 60, 5));  // a neighbour
  p.add(piece(memory, 0));
  p.add(piece(memory + 10, 20));
  EXPECT(p.bytes() == 35 && p.list().size() == 2);
  p.copy_to(copy, {3, 30});
  for (int i = 0; i < 27; ++i) EXPECT(copy[i] == (i < 12 ? 53 + i : 10 + i - 12));
  EXPECT(p.contiguous({0, 15}) == reinterpret_cast<std::byte*>(memory + 50));
  EXPECT(p.contiguous({14, 16}) == nullptr);
  EXPECT(p.slice({14, 16}).list().size() == 2);
  EXPECT(p.contiguous({5, 5}) == nullptr && Pieces().slice({0, 0}).bytes() == 0);
}

void reductions() {
  const int8_t a[] = {100, -100, 3}, b[] = {100, -100, 4};
  const void* both[] = {a, b};
  int8_t out[3];
  reduce({DType::kI8, RedOp::kSum, 1, 2}, out, both, 2, 3);
  EXPECT(out[0] == static_cast<int8_t>(200) && out[1] == static_cast<int8_t>(-200) && out[2] == 7);
  reduce({DType::kI8, RedOp::kAvg, 1, 200}, out, both, 2, 3);  // a divisor that int8 cannot hold
  EXPECT(out[0] == 0 && out[2] == 0);
  const float x[] = {1, NAN, 2}, y[] = {NAN, 1, 3};
  const void* floats[] = {x, y};
  float least[3];
  reduce({DType::kF32, RedOp::kMin, 1, 2}, least, floats, 2, 3);
  EXPECT(std::isnan(least[0]) && std::isnan(least[1]) && least[2] == 2);
  const uint8_t t[] = {2, 0, 1}, u[] = {0, 0, 4};  // booleans with odd bytes
  const void* flags[] = {t, u};
  uint8_t any[3];
  reduce({DType::kBool, RedOp::kSum, 1, 2}, any, flags, 2, 3);
  EXPECT(any[0] == 1 && any[1] == 0 && any[2] == 1);
  // 16-bit sums are rounded once: 256 + 1 - 256 is 1, and would be 0 with bfloat16 in between.
  const uint16_t p = float_to_bf16(256), q = float_to_bf16(1), r = float_to_bf16(-256);
  const void* three[] = {&p, &q, &r};
  uint16_t sum;
  reduce({DType::kBF16, RedOp::kSum, 1, 3}, &sum, three, 3, 1);
  EXPECT(sum == float_to_bf16(1));
  try {
    check_reduction({DType::kF64, RedOp::kBxor, 1, 1});
    EXPECT(false);
  } catch (const Error& e) {
    EXPECT(e.fault == Fault::kUsage);
  }
}

}  // namespace

int main() {
  conversions();
  cuts();
  pieces();
  reductions();
  return 0;
}
