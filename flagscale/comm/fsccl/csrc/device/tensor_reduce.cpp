#include "tensor_reduce.h"

namespace fsccl {
namespace {

// Returns the signed type of the same width, because torch has few operations on unsigned types.
// Sums, products and bitwise operations give the same bits in both.
at::ScalarType signed_type(DType t) {
  switch (t) {
    case DType::kU16:
      return at::kShort;
    case DType::kU32:
      return at::kInt;
    case DType::kU64:
      return at::kLong;
    default:
      return scalar_type(t);
  }
}

bool is_half(DType t) { return t == DType::kF16 || t == DType::kBF16; }

bool is_float(DType t) { return is_half(t) || t == DType::kF32 || t == DType::kF64; }

// Returns whether the reduction needs a wider type: comparison and division would take the highest
// bit of an unsigned number for its sign.
bool needs_wide_type(const Reduction& r) {
  const bool is_unsigned = r.dtype == DType::kU16 || r.dtype == DType::kU32;
  return is_unsigned && (r.op == RedOp::kMin || r.op == RedOp::kMax || r.op == RedOp::kAvg);
}

// Reduces a wide integer modulo the range of the unsigned type: the sum of 16- or 32-bit integers
// wraps, and AVG divides the wrapped sum.
at::Tensor wrap_narrow(const at::Tensor& wide, DType t) {
  return wide.bitwise_and(at::Scalar(t == DType::kU16 ? int64_t{0xffff} : int64_t{0xffffffff}));
}

at::Tensor widen(const Reduction& r, const at::Tensor& x) {
  if (is_half(r.dtype)) return x.to(at::kFloat);
  if (needs_wide_type(r)) return wrap_narrow(x.view(signed_type(r.dtype)).to(at::kLong), r.dtype);
  return x.view(signed_type(r.dtype));
}

void accumulate(const Reduction& r, at::Tensor& acc, const at::Tensor& next) {
  const bool is_bool = r.dtype == DType::kBool;
  switch (r.op) {
    case RedOp::kSum:
    case RedOp::kAvg:
    case RedOp::kPremulSum:
      is_bool ? acc.bitwise_or_(next) : acc.add_(next);
      return;
    case RedOp::kProduct:
      is_bool ? acc.bitwise_and_(next) : acc.mul_(next);
      return;
    case RedOp::kMin:
      at::minimum_out(acc, acc, next);
      return;
    case RedOp::kMax:
      at::maximum_out(acc, acc, next);
      return;
    case RedOp::kBand:
      acc.bitwise_and_(next);
      return;
    case RedOp::kBor:
      acc.bitwise_or_(next);
      return;
    case RedOp::kBxor:
      acc.bitwise_xor_(next);
      return;
  }
}

void divide(const Reduction& r, at::Tensor& acc) {
  if (needs_wide_type(r)) acc = wrap_narrow(acc, r.dtype);
  if (is_float(r.dtype)) {
    // The divisor is a tensor on the device: by a number, torch's CUDA kernel multiplies with its
    // reciprocal, which rounds differently.
    acc.div_(at::full({}, r.divisor, acc.options()));
  } else {
    // Divides in 64 bits, because a narrow integer may not hold the divisor.
    acc = acc.to(at::kLong).div_(at::Scalar(r.divisor), "trunc");
  }
}

}  // namespace

at::ScalarType scalar_type(DType t) {
  switch (t) {
    case DType::kI8:
      return at::kChar;
    case DType::kU16:
      return at::kUInt16;
    case DType::kI16:
      return at::kShort;
    case DType::kU32:
      return at::kUInt32;
    case DType::kI32:
      return at::kInt;
    case DType::kU64:
      return at::kUInt64;
    case DType::kI64:
      return at::kLong;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF32:
      return at::kFloat;
    case DType::kF64:
      return at::kDouble;
    case DType::kBool:
      return at::kBool;
    default:
      return at::kByte;
  }
}

at::Tensor apply_premul_factor(const Reduction& r, const at::Tensor& in) {
  if (is_float(r.dtype)) return in.mul(r.factor);
  return in.view(signed_type(r.dtype))
      .mul(at::Scalar(static_cast<int64_t>(r.factor)))
      .view(scalar_type(r.dtype));
}

void reduce_tensors(const Reduction& r, const std::vector<at::Tensor>& sources,
                    const at::Tensor& out) {
  if (r.dtype == DType::kU64 &&
      (r.op == RedOp::kMin || r.op == RedOp::kMax || r.op == RedOp::kAvg)) {
    fail_usage(std::string("reduction ") + name_of(r.op) +
               " of uint64 is not supported on devices");
  }
  at::Tensor target = out.view(signed_type(r.dtype));
  const bool in_place = !is_half(r.dtype) && !needs_wide_type(r) && r.op != RedOp::kAvg;
  at::Tensor acc = widen(r, sources[0]);
  if (in_place) {
    if (!acc.is_same(target) && acc.data_ptr() != target.data_ptr()) target.copy_(acc);
    acc = target;
  } else if (!is_half(r.dtype) && !needs_wide_type(r)) {
    acc = acc.clone();
  }
  for (size_t i = 1; i < sources.size(); ++i) {
    accumulate(r, acc, is_half(r.dtype) ? sources[i] : widen(r, sources[i]));
  }
  if (r.op == RedOp::kAvg) divide(r, acc);
  if (!in_place) target.copy_(acc);
}

}  // namespace fsccl
