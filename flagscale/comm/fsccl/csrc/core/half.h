// Conversions between float and bfloat16 or float16. They round to nearest even, as IEEE 754
// requires; NaN stays NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "types.h"

#if defined(__F16C__) && defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#define FSCCL_F16C 1
#endif

namespace fsccl {

FSCCL_HD inline float bits_to_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

FSCCL_HD inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

FSCCL_HD inline float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t{h} << 16); }

FSCCL_HD inline uint16_t float_to_bf16(float f) {
  const uint32_t b = float_to_bits(f);
  const uint32_t rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (b >> 16) | 0x40;
  return static_cast<uint16_t>((b & 0x7FFFFFFF) > 0x7F800000 ? quiet_nan : rounded);
}

FSCCL_HD inline float f16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16, magnitude = h & 0x7FFFu;
  if (magnitude >= 0x7C00) return bits_to_float(sign | 0x7F800000 | ((magnitude & 0x3FF) << 13));
  if (magnitude >= 0x400) return bits_to_float(sign | ((magnitude << 13) + 0x38000000));
  const float subnormal =
      static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // magnitude * 2^-24
  return bits_to_float(sign | float_to_bits(subnormal));
}

FSCCL_HD inline uint16_t float_to_f16(float f) {
  const uint32_t b = float_to_bits(f), sign = (b >> 16) & 0x8000, a = b & 0x7FFFFFFF;
  if (a > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);   // NaN
  if (a >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // rounds above 65504: inf
  if (a >= 0x38800000) {                                             // normal
    const uint32_t r = a - 0x38000000 + 0xFFF + ((a >> 13) & 1);
    return static_cast<uint16_t>(sign | (r >> 13));
  }
  // Subnormal: adding 0.5 makes the hardware round to the precision of float16; the low bits of the
  // sum are the result.
  const float shifted = bits_to_float(a) + 0.5f;
  return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3F000000));
}

inline void bf16_load(float* out, const uint16_t* in, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = bf16_to_float(in[i]);
}

inline void bf16_store(uint16_t* out, const float* in, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = float_to_bf16(in[i]);
}

inline void f16_load(float* out, const uint16_t* in, size_t n) {
  size_t i = 0;
#if defined(FSCCL_F16C)
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(h));
  }
#endif
  for (; i < n; ++i) out[i] = f16_to_float(in[i]);
}

inline void f16_store(uint16_t* out, const float* in, size_t n) {
  size_t i = 0;
#if defined(FSCCL_F16C)
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), h);
  }
#endif
  for (; i < n; ++i) out[i] = float_to_f16(in[i]);
}

}  // namespace fsccl
