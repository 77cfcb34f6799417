// Element types, and the reduction of sixteen or eight bytes of elements in registers.
//
// Inputs are reduced in the order of ranks. 16-bit floats are summed in float and rounded once;
// integers wrap; MIN and MAX with a NaN give NaN. core/reduce.cpp has the same rules, and the tests
// compare the results bit by bit. The kernels are compiled without contraction of a*b+c, which the
// compiler could apply differently in two of them.
#pragma once

#include "kernel_args.h"
#if !defined(__CUDACC__)
#include "../core/half.h"
#endif

namespace fsccl {
namespace nvlink {

// Element types define: Stored, the type in memory; Sum, the type in which elements are reduced;
// the conversions load() and store(); and kStoredInPairs, whether store_pair() rounds two at once.

// An element of a C++ arithmetic type, reduced in that type.
template <class T>
struct BuiltinElement {
  using Stored = T;
  using Sum = T;
  static constexpr bool kStoredInPairs = false;
  static FSCCL_FN Sum load(Stored v) { return v; }
  static FSCCL_FN Stored store(Sum v) { return v; }
};

struct Float16 {
  using Stored = u16;
  using Sum = float;
  static constexpr bool kStoredInPairs = true;  // two are stored at once
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
  static constexpr bool kStoredInPairs = true;  // two are stored at once
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

// Properties of a type in which elements are reduced.
template <class T>
struct Traits {
  using WrappingType = T;
  using DivisionType = T;
  static constexpr bool kInteger = false;
};
#define FSCCL_INTEGER(T, W, D)                                      \
  template <>                                                       \
  struct Traits<T> {                                                \
    using WrappingType = W; /* unsigned: its overflow is defined */ \
    using DivisionType = D; /* holds every value and divisor */     \
    static constexpr bool kInteger = true;                          \
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

// Returns `a` reduced with `b`. PREMUL_SUM and AVG are sums here.
template <class T>
FSCCL_FN T combine(T a, T b, KernelOp op) {
  using W = typename Traits<T>::WrappingType;
  switch (op) {
    case KernelOp::kProduct:
      return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
    case KernelOp::kMin:
      return (b < a || b != b) ? b : a;
    case KernelOp::kMax:
      return (a < b || b != b) ? b : a;
    default:
      break;
  }
  if constexpr (Traits<T>::kInteger) {
    switch (op) {
      case KernelOp::kBand:
        return static_cast<T>(a & b);
      case KernelOp::kBor:
        return static_cast<T>(a | b);
      case KernelOp::kBxor:
        return static_cast<T>(a ^ b);
      default:
        break;
    }
  }
  return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
}

template <class T>
FSCCL_FN T divide(T a, int divisor) {
  using D = typename Traits<T>::DivisionType;
  return static_cast<T>(static_cast<D>(a) / static_cast<D>(divisor));
}

// The widest access of a thread: 16 bytes.
struct alignas(16) Vec {
  u32 word[4];
};

// The running reduction of the elements of type E in one Raw (Vec or u64). KernelArgs::op is the
// operation.
template <class E, class Raw>
class Sum {
 public:
  FSCCL_FN void add(const KernelArgs& a, bool first, const Raw& packed) {
    typename E::Stored stored_values[kCount];
    memcpy(stored_values, &packed, sizeof packed);
    const bool premultiply = a.op == KernelOp::kPremulSum;
    FSCCL_UNROLL for (int i = 0; i < kCount; ++i) {
      S x = E::load(stored_values[i]);
      if (premultiply) x = combine<S>(x, static_cast<S>(a.factor), KernelOp::kProduct);
      sum_[i] = first ? x : combine<S>(sum_[i], x, a.op);
    }
  }

  FSCCL_FN Raw finish(const KernelArgs& a) {
    if (a.op == KernelOp::kAvg) {
      FSCCL_UNROLL for (int i = 0; i < kCount; ++i) sum_[i] = divide<S>(sum_[i], a.ranks);
    }
    return pack_sums();
  }

  // The following methods do the same with few instructions, for the most frequent reductions:
  // sums, and averages of floats over a power of two of ranks, where multiplication by the
  // reciprocal is exact.
  static FSCCL_FN bool is_simple(const KernelArgs& a) {
    const bool exact_reciprocal = !Traits<S>::kInteger && (a.ranks & (a.ranks - 1)) == 0;
    return a.op == KernelOp::kSum || (a.op == KernelOp::kAvg && exact_reciprocal);
  }
  FSCCL_FN void begin_simple(const Raw& packed) {
    typename E::Stored stored_values[kCount];
    memcpy(stored_values, &packed, sizeof packed);
    FSCCL_UNROLL for (int i = 0; i < kCount; ++i) sum_[i] = E::load(stored_values[i]);
  }
  FSCCL_FN void add_simple(const Raw& packed) {
    typename E::Stored stored_values[kCount];
    memcpy(stored_values, &packed, sizeof packed);
    FSCCL_UNROLL for (int i = 0; i < kCount; ++i) {
      sum_[i] = combine<S>(sum_[i], E::load(stored_values[i]), KernelOp::kSum);
    }
  }
  FSCCL_FN Raw finish_simple(const KernelArgs& a) {
    if constexpr (!Traits<S>::kInteger) {
      if (a.op == KernelOp::kAvg) {
        const S reciprocal = S{1} / static_cast<S>(a.ranks);
        FSCCL_UNROLL for (int i = 0; i < kCount; ++i) sum_[i] *= reciprocal;
      }
    }
    return pack_sums();
  }

 private:
  using S = typename E::Sum;
  static constexpr int kCount = sizeof(Raw) / sizeof(typename E::Stored);

  FSCCL_FN Raw pack_sums() const {
    Raw packed;
    if constexpr (E::kStoredInPairs) {
      u32 pairs[kCount / 2];
      FSCCL_UNROLL for (int i = 0; i < kCount / 2; ++i) {
        pairs[i] = E::store_pair(sum_[2 * i], sum_[2 * i + 1]);
      }
      memcpy(&packed, pairs, sizeof packed);
    } else {
      typename E::Stored rounded[kCount];
      FSCCL_UNROLL for (int i = 0; i < kCount; ++i) rounded[i] = E::store(sum_[i]);
      memcpy(&packed, rounded, sizeof packed);
    }
    return packed;
  }

  S sum_[kCount] = {};
};

}  // namespace nvlink
}  // namespace fsccl
