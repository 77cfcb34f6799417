// Elements in registers: sixteen or eight bytes of them, reduced in the order of ranks.
//
// 16-bit floats are summed in float and rounded once; integers wrap; a NaN wins MIN and MAX: the
// same rules as in core/reduce.cpp, against which the tests compare bit by bit. The kernels are
// compiled without contraction of a*b+c, which could differ between two of them.
#pragma once

#include "kernel_args.h"
#if !defined(__CUDACC__)
#include "../core/half.h"
#endif

namespace fsccl {
namespace nvlink {

template <class T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static constexpr bool kPairs = false;
  static FSCCL_FN Sum load(Stored v) { return v; }
  static FSCCL_FN Stored store(Sum v) { return v; }
};

struct Float16 {
  using Stored = u16;
  using Sum = float;
  static constexpr bool kPairs = true;  // two are stored at once
  static FSCCL_FN Sum load(Stored v) {
#if defined(__CUDACC__)
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#else
    return f16_to_float(v);
#endif
  }
  static FSCCL_FN Stored store(Sum v) {
#if defined(__CUDACC__)
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
#else
    return float_to_f16(v);
#endif
  }
  static FSCCL_FN u32 store_pair(Sum low, Sum high) {
#if defined(__CUDACC__)
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return store(low) | static_cast<u32>(store(high)) << 16;
#endif
  }
};

struct BFloat16 {
  using Stored = u16;
  using Sum = float;
  static constexpr bool kPairs = true;  // two are stored at once
  static FSCCL_FN Sum load(Stored v) {
    const u32 bits = static_cast<u32>(v) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
  }
  static FSCCL_FN Stored store(Sum v) {
#if defined(__CUDACC__)
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
#else
    return float_to_bf16(v);
#endif
  }
  static FSCCL_FN u32 store_pair(Sum low, Sum high) {
#if defined(__CUDACC__)
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return store(low) | static_cast<u32>(store(high)) << 16;
#endif
  }
};

// Properties of a type of elements.
template <class T>
struct Traits {
  using Wrap = T;
  using Wide = T;
  static constexpr bool kInteger = false;
};
#define FSCCL_INTEGER(T, W, D)             \
  template <>                              \
  struct Traits<T> {                       \
    using Wrap = W; /* does not overflow */ \
    using Wide = D; /* holds a divisor */  \
    static constexpr bool kInteger = true; \
  };
FSCCL_INTEGER(u8, u32, long long)
FSCCL_INTEGER(signed char, u32, long long)
FSCCL_INTEGER(u16, u32, long long)
FSCCL_INTEGER(short, u32, long long)
FSCCL_INTEGER(u32, u32, long long)
FSCCL_INTEGER(int, u32, long long)
FSCCL_INTEGER(u64, u64, u64)
FSCCL_INTEGER(long long, u64, long long)
#undef FSCCL_INTEGER

template <class T>
FSCCL_FN T combine(T a, T b, Math math) {
  using W = typename Traits<T>::Wrap;
  switch (math) {
    case Math::kProduct:
      return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
    case Math::kMin:
      return (b < a || b != b) ? b : a;
    case Math::kMax:
      return (a < b || b != b) ? b : a;
    default:
      break;
  }
  if constexpr (Traits<T>::kInteger) {
    switch (math) {
      case Math::kBand:
        return static_cast<T>(a & b);
      case Math::kBor:
        return static_cast<T>(a | b);
      case Math::kBxor:
        return static_cast<T>(a ^ b);
      default:
        break;
    }
  }
  return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
}

template <class T>
FSCCL_FN T divide(T a, int divisor) {
  using D = typename Traits<T>::Wide;
  return static_cast<T>(static_cast<D>(a) / static_cast<D>(divisor));
}

struct alignas(16) Vec {
  u32 word[4];
};

// The running reduction of one Raw (Vec or u64) of elements E. `KernelArgs` has the operation.
template <class E, class Raw>
class Sum {
 public:
  FSCCL_FN void add(const KernelArgs& a, bool first, const Raw& raw) {
    typename E::Stored next[kCount];
    memcpy(next, &raw, sizeof raw);
    const bool scale = a.math == Math::kPremulSum;
    FSCCL_UNROLL for (int i = 0; i < kCount; ++i) {
      S x = E::load(next[i]);
      if (scale) x = combine<S>(x, static_cast<S>(a.factor), Math::kProduct);
      sum_[i] = first ? x : combine<S>(sum_[i], x, a.math);
    }
  }

  FSCCL_FN Raw finish(const KernelArgs& a) {
    if (a.math == Math::kAvg) {
      FSCCL_UNROLL for (int i = 0; i < kCount; ++i) sum_[i] = divide<S>(sum_[i], a.ranks);
    }
    return stored();
  }

  // The same with few instructions, for the most frequent reductions: sums of inputs as they are,
  // and means whose division is an exact multiplication.
  static FSCCL_FN bool is_simple(const KernelArgs& a) {
    const bool halves = !Traits<S>::kInteger && (a.ranks & (a.ranks - 1)) == 0;
    return a.math == Math::kSum || (a.math == Math::kAvg && halves);
  }
  FSCCL_FN void begin_simple(const Raw& raw) {
    typename E::Stored next[kCount];
    memcpy(next, &raw, sizeof raw);
    FSCCL_UNROLL for (int i = 0; i < kCount; ++i) sum_[i] = E::load(next[i]);
  }
  FSCCL_FN void add_simple(const Raw& raw) {
    typename E::Stored next[kCount];
    memcpy(next, &raw, sizeof raw);
    FSCCL_UNROLL for (int i = 0; i < kCount; ++i) {
      sum_[i] = combine<S>(sum_[i], E::load(next[i]), Math::kSum);
    }
  }
  FSCCL_FN Raw finish_simple(const KernelArgs& a) {
    if constexpr (!Traits<S>::kInteger) {
      if (a.math == Math::kAvg) {
        const S part = S{1} / static_cast<S>(a.ranks);
        FSCCL_UNROLL for (int i = 0; i < kCount; ++i) sum_[i] *= part;
      }
    }
    return stored();
  }

 private:
  using S = typename E::Sum;
  static constexpr int kCount = sizeof(Raw) / sizeof(typename E::Stored);

  FSCCL_FN Raw stored() const {
    Raw raw;
    if constexpr (E::kPairs) {
      u32 pairs[kCount / 2];
      FSCCL_UNROLL for (int i = 0; i < kCount / 2; ++i) {
        pairs[i] = E::store_pair(sum_[2 * i], sum_[2 * i + 1]);
      }
      memcpy(&raw, pairs, sizeof raw);
    } else {
      typename E::Stored last[kCount];
      FSCCL_UNROLL for (int i = 0; i < kCount; ++i) last[i] = E::store(sum_[i]);
      memcpy(&raw, last, sizeof raw);
    }
    return raw;
  }

  S sum_[kCount] = {};
};

}  // namespace nvlink
}  // namespace fsccl
