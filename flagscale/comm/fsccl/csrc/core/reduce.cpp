// Works block by block: the accumulators of a block stay in the first-level cache while every
// source is folded in, by loops plain enough for the compiler to vectorise.
#include "reduce.h"

#include <algorithm>
#include <string>
#include <type_traits>

#include "half.h"

namespace fsccl {
namespace {

constexpr size_t kBlock = 1024;  // elements

// How elements lie in memory (Elem) and what they are summed in (Acc).
template <class T>
struct Plain {
  using Elem = T;
  using Acc = T;
  static void load(Acc* out, const Elem* in, size_t n) { std::copy(in, in + n, out); }
  static void store(Elem* out, const Acc* in, size_t n) { std::copy(in, in + n, out); }
};

struct BFloat16 {
  using Elem = uint16_t;
  using Acc = float;
  static void load(Acc* out, const Elem* in, size_t n) { bf16_load(out, in, n); }
  static void store(Elem* out, const Acc* in, size_t n) { bf16_store(out, in, n); }
};

struct Float16 {
  using Elem = uint16_t;
  using Acc = float;
  static void load(Acc* out, const Elem* in, size_t n) { f16_load(out, in, n); }
  static void store(Elem* out, const Acc* in, size_t n) { f16_store(out, in, n); }
};

struct Bool {  // any non-zero byte is true
  using Elem = uint8_t;
  using Acc = uint8_t;
  static void load(Acc* out, const Elem* in, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = in[i] != 0;
  }
  static void store(Elem* out, const Acc* in, size_t n) { std::copy(in, in + n, out); }
};

// Signed sums wrap as torch's do; in unsigned arithmetic that is defined.
template <class T, bool = std::is_integral_v<T>>
struct Wrap {
  using type = T;
};
template <class T>
struct Wrap<T, true> {
  using type = std::make_unsigned_t<T>;
};
template <class T>
using wrap_t = typename Wrap<T>::type;

struct Sum {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(static_cast<wrap_t<T>>(a) + static_cast<wrap_t<T>>(b));
  }
};
struct Product {
  template <class T>
  static T of(T a, T b) {
    if constexpr (sizeof(T) < sizeof(int) && std::is_integral_v<T>) {
      return static_cast<T>(static_cast<unsigned>(a) * static_cast<unsigned>(b));
    } else {
      return static_cast<T>(static_cast<wrap_t<T>>(a) * static_cast<wrap_t<T>>(b));
    }
  }
};
// Like torch's own amin and amax, a NaN on any rank wins.
struct Min {
  template <class T>
  static T of(T a, T b) {
    return (b < a || b != b) ? b : a;
  }
};
struct Max {
  template <class T>
  static T of(T a, T b) {
    return (a < b || b != b) ? b : a;
  }
};
struct Band {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Bor {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Bxor {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <class Type>
void scale(typename Type::Acc* acc, size_t n, double factor) {
  using Acc = typename Type::Acc;
  const Acc f = static_cast<Acc>(factor);
  for (size_t i = 0; i < n; ++i) acc[i] = Product::of(acc[i], f);
}

template <class Type>
void divide(typename Type::Acc* acc, size_t n, int divisor) {
  using Acc = typename Type::Acc;
  // A narrow integer may not hold the divisor; int64 holds every quotient of the types we have.
  using Wide = std::conditional_t<std::is_integral_v<Acc> && sizeof(Acc) < 8, int64_t, Acc>;
  const Wide d = static_cast<Wide>(divisor);
  for (size_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(static_cast<Wide>(acc[i]) / d);
}

template <class Type, class Op>
void fold(typename Type::Acc* acc, const typename Type::Elem* in, size_t n, const Reduction& r) {
  using Acc = typename Type::Acc;
  if constexpr (std::is_same_v<Acc, typename Type::Elem> && !std::is_same_v<Type, Bool>) {
    if (r.op != RedOp::kPremulSum) {
      for (size_t i = 0; i < n; ++i) acc[i] = Op::of(acc[i], in[i]);
      return;
    }
  }
  alignas(kCacheLine) Acc next[kBlock];
  Type::load(next, in, n);
  if (r.op == RedOp::kPremulSum) scale<Type>(next, n, r.factor);
  for (size_t i = 0; i < n; ++i) acc[i] = Op::of(acc[i], next[i]);
}

template <class Type, class Op>
void run(const Reduction& r, void* out, const void* const* sources, int n, size_t count) {
  using Elem = typename Type::Elem;
  alignas(kCacheLine) typename Type::Acc acc[kBlock];
  for (size_t base = 0; base < count; base += kBlock) {
    const size_t m = std::min(kBlock, count - base);
    Type::load(acc, static_cast<const Elem*>(sources[0]) + base, m);
    if (r.op == RedOp::kPremulSum) scale<Type>(acc, m, r.factor);
    for (int p = 1; p < n; ++p) {
      fold<Type, Op>(acc, static_cast<const Elem*>(sources[p]) + base, m, r);
    }
    if (r.op == RedOp::kAvg) divide<Type>(acc, m, r.divisor);
    Type::store(static_cast<Elem*>(out) + base, acc, m);
  }
}

using Kernel = void (*)(const Reduction&, void*, const void* const*, int, size_t);

template <class Type>
Kernel arithmetic(RedOp op) {
  switch (op) {
    case RedOp::kSum:
    case RedOp::kAvg:
    case RedOp::kPremulSum:
      return run<Type, Sum>;
    case RedOp::kProduct:
      return run<Type, Product>;
    case RedOp::kMin:
      return run<Type, Min>;
    case RedOp::kMax:
      return run<Type, Max>;
    default:
      return nullptr;
  }
}

template <class T>
Kernel integral(RedOp op) {
  switch (op) {
    case RedOp::kBand:
      return run<Plain<T>, Band>;
    case RedOp::kBor:
      return run<Plain<T>, Bor>;
    case RedOp::kBxor:
      return run<Plain<T>, Bxor>;
    default:
      return arithmetic<Plain<T>>(op);
  }
}

Kernel boolean(RedOp op) {
  switch (op) {
    case RedOp::kSum:
    case RedOp::kMax:
    case RedOp::kBor:
      return run<Bool, Bor>;
    case RedOp::kProduct:
    case RedOp::kMin:
    case RedOp::kBand:
      return run<Bool, Band>;
    case RedOp::kBxor:
      return run<Bool, Bxor>;
    default:
      return nullptr;  // an average of booleans is none
  }
}

Kernel kernel_for(DType t, RedOp op) {
  switch (t) {
    case DType::kU8:
      return integral<uint8_t>(op);
    case DType::kI8:
      return integral<int8_t>(op);
    case DType::kU16:
      return integral<uint16_t>(op);
    case DType::kI16:
      return integral<int16_t>(op);
    case DType::kU32:
      return integral<uint32_t>(op);
    case DType::kI32:
      return integral<int32_t>(op);
    case DType::kU64:
      return integral<uint64_t>(op);
    case DType::kI64:
      return integral<int64_t>(op);
    case DType::kF16:
      return arithmetic<Float16>(op);
    case DType::kBF16:
      return arithmetic<BFloat16>(op);
    case DType::kF32:
      return arithmetic<Plain<float>>(op);
    case DType::kF64:
      return arithmetic<Plain<double>>(op);
    case DType::kBool:
      return boolean(op);
    case DType::kOpaque:
      return nullptr;
  }
  return nullptr;
}

}  // namespace

void check_reduction(const Reduction& r) {
  if (kernel_for(r.dtype, r.op) == nullptr) {
    fail_usage(std::string("reduction ") + name_of(r.op) + " is not defined for " +
               name_of(r.dtype));
  }
}

void reduce(const Reduction& r, void* out, const void* const* sources, int n, size_t count) {
  kernel_for(r.dtype, r.op)(r, out, sources, n, count);
}

}  // namespace fsccl
