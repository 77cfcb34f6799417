// Reduces block by block: the accumulators of a block stay in the L1 cache while all sources are
// folded in, by loops simple enough for the compiler to vectorise.
#include "reduce.h"

#include <algorithm>
#include <string>
#include <type_traits>

#include "half.h"

namespace fsccl {
namespace {

constexpr size_t kBlockElements = 1024;

// Element types: their representation in memory (Elem) and the type of the accumulator (Acc).
template <class T>
struct NativeType {
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

// Unsigned type of the same size as an integer type T; T itself for floats. Signed sums wrap around
// as in torch, and unsigned arithmetic makes that defined behaviour.
template <class T, bool = std::is_integral_v<T>>
struct WrapType {
  using type = T;
};
template <class T>
struct WrapType<T, true> {
  using type = std::make_unsigned_t<T>;
};
template <class T>
using wrap_t = typename WrapType<T>::type;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<wrap_t<T>>(a) + static_cast<wrap_t<T>>(b));
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (sizeof(T) < sizeof(int) && std::is_integral_v<T>) {
      return static_cast<T>(static_cast<unsigned>(a) * static_cast<unsigned>(b));
    } else {
      return static_cast<T>(static_cast<wrap_t<T>>(a) * static_cast<wrap_t<T>>(b));
    }
  }
};
// As in torch's amin and amax, the result is NaN if the value of any rank is.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return (b < a || b != b) ? b : a;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return (a < b || b != b) ? b : a;
  }
};
struct Band {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Bor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Bxor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <class Type>
void scale(typename Type::Acc* acc, size_t n, double factor) {
  using Acc = typename Type::Acc;
  const Acc f = static_cast<Acc>(factor);
  for (size_t i = 0; i < n; ++i) acc[i] = Product::apply(acc[i], f);
}

template <class Type>
void divide(typename Type::Acc* acc, size_t n, int divisor) {
  using Acc = typename Type::Acc;
  // A narrow integer type may not hold the divisor; int64 holds every quotient of these types.
  using Wide = std::conditional_t<std::is_integral_v<Acc> && sizeof(Acc) < 8, int64_t, Acc>;
  const Wide d = static_cast<Wide>(divisor);
  for (size_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(static_cast<Wide>(acc[i]) / d);
}

template <class Type, class Op>
void fold_source(typename Type::Acc* acc, const typename Type::Elem* in, size_t n,
                 const Reduction& r) {
  using Acc = typename Type::Acc;
  if constexpr (std::is_same_v<Acc, typename Type::Elem> && !std::is_same_v<Type, Bool>) {
    if (r.op != RedOp::kPremulSum) {
      for (size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], in[i]);
      return;
    }
  }
  alignas(kCacheLine) Acc converted[kBlockElements];
  Type::load(converted, in, n);
  if (r.op == RedOp::kPremulSum) scale<Type>(converted, n, r.factor);
  for (size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], converted[i]);
}

template <class Type, class Op>
void reduce_blocks(const Reduction& r, void* out, const void* const* sources, int n, size_t count) {
  using Elem = typename Type::Elem;
  alignas(kCacheLine) typename Type::Acc acc[kBlockElements];
  for (size_t base = 0; base < count; base += kBlockElements) {
    const size_t m = std::min(kBlockElements, count - base);
    Type::load(acc, static_cast<const Elem*>(sources[0]) + base, m);
    if (r.op == RedOp::kPremulSum) scale<Type>(acc, m, r.factor);
    for (int p = 1; p < n; ++p) {
      fold_source<Type, Op>(acc, static_cast<const Elem*>(sources[p]) + base, m, r);
    }
    if (r.op == RedOp::kAvg) divide<Type>(acc, m, r.divisor);
    Type::store(static_cast<Elem*>(out) + base, acc, m);
  }
}

using ReduceFunction = void (*)(const Reduction&, void*, const void* const*, int, size_t);

template <class Type>
ReduceFunction arithmetic_function(RedOp op) {
  switch (op) {
    case RedOp::kSum:
    case RedOp::kAvg:
    case RedOp::kPremulSum:
      return reduce_blocks<Type, Sum>;
    case RedOp::kProduct:
      return reduce_blocks<Type, Product>;
    case RedOp::kMin:
      return reduce_blocks<Type, Min>;
    case RedOp::kMax:
      return reduce_blocks<Type, Max>;
    default:
      return nullptr;
  }
}

template <class T>
ReduceFunction integral_function(RedOp op) {
  switch (op) {
    case RedOp::kBand:
      return reduce_blocks<NativeType<T>, Band>;
    case RedOp::kBor:
      return reduce_blocks<NativeType<T>, Bor>;
    case RedOp::kBxor:
      return reduce_blocks<NativeType<T>, Bxor>;
    default:
      return arithmetic_function<NativeType<T>>(op);
  }
}

ReduceFunction boolean_function(RedOp op) {
  switch (op) {
    case RedOp::kSum:
    case RedOp::kMax:
    case RedOp::kBor:
      return reduce_blocks<Bool, Bor>;
    case RedOp::kProduct:
    case RedOp::kMin:
    case RedOp::kBand:
      return reduce_blocks<Bool, Band>;
    case RedOp::kBxor:
      return reduce_blocks<Bool, Bxor>;
    default:
      return nullptr;  // the average of booleans is not defined
  }
}

ReduceFunction function_for(DType t, RedOp op) {
  switch (t) {
    case DType::kU8:
      return integral_function<uint8_t>(op);
    case DType::kI8:
      return integral_function<int8_t>(op);
    case DType::kU16:
      return integral_function<uint16_t>(op);
    case DType::kI16:
      return integral_function<int16_t>(op);
    case DType::kU32:
      return integral_function<uint32_t>(op);
    case DType::kI32:
      return integral_function<int32_t>(op);
    case DType::kU64:
      return integral_function<uint64_t>(op);
    case DType::kI64:
      return integral_function<int64_t>(op);
    case DType::kF16:
      return arithmetic_function<Float16>(op);
    case DType::kBF16:
      return arithmetic_function<BFloat16>(op);
    case DType::kF32:
      return arithmetic_function<NativeType<float>>(op);
    case DType::kF64:
      return arithmetic_function<NativeType<double>>(op);
    case DType::kBool:
      return boolean_function(op);
    default:
      return nullptr;  // types that are only moved
  }
}

}  // namespace

void check_reduction(const Reduction& r) {
  if (function_for(r.dtype, r.op) == nullptr) {
    fail_usage(std::string("reduction ") + name_of(r.op) + " is not defined for " +
               name_of(r.dtype));
  }
}

void reduce(const Reduction& r, void* out, const void* const* sources, int n, size_t count) {
  function_for(r.dtype, r.op)(r, out, sources, n, count);
}

}  // namespace fsccl
