// From torch's words to the core's.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <vector>

#include "../core/buffer_list.h"
#include "../core/types.h"
#include "expect.h"

namespace fsccl {

// Where an operation is done: on the host, or on a device. Tensors that lie elsewhere are moved.
struct Site {
  const char* op;  // for messages
  at::Device device;
};

// The element type of a reduction. A complex number is two floats.
inline DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kByte:
      return DType::kU8;
    case at::kChar:
      return DType::kI8;
    case at::kUInt16:
      return DType::kU16;
    case at::kShort:
      return DType::kI16;
    case at::kUInt32:
      return DType::kU32;
    case at::kInt:
      return DType::kI32;
    case at::kUInt64:
      return DType::kU64;
    case at::kLong:
      return DType::kI64;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kFloat:
    case at::kComplexFloat:
      return DType::kF32;
    case at::kDouble:
    case at::kComplexDouble:
      return DType::kF64;
    case at::kBool:
      return DType::kBool;
    default:
      TORCH_CHECK_TYPE(false, "fsccl: cannot reduce tensors of type ", t.scalar_type());
  }
}

inline const c10d::NCCLPreMulSumSupplement& factor_of(const c10d::ReduceOp& op) {
  const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(factor != nullptr, "fsccl: PREMUL_SUM without its factor");
  return *factor;
}

// It may lie on a device, of which it cannot be asked without waiting.
inline bool factor_is_tensor(const c10d::ReduceOp& op) {
  return op.op_ == c10d::ReduceOp::PREMUL_SUM && factor_of(op).tensor_factor.defined();
}

inline Reduction reduction_of(const at::Tensor& t, const c10d::ReduceOp& op, int ranks) {
  Reduction r;
  r.dtype = dtype_of(t);
  r.divisor = ranks;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      r.op = RedOp::kSum;
      break;
    case c10d::ReduceOp::AVG:
      r.op = RedOp::kAvg;
      break;
    case c10d::ReduceOp::PRODUCT:
      r.op = RedOp::kProduct;
      break;
    case c10d::ReduceOp::MIN:
      r.op = RedOp::kMin;
      break;
    case c10d::ReduceOp::MAX:
      r.op = RedOp::kMax;
      break;
    case c10d::ReduceOp::BAND:
      r.op = RedOp::kBand;
      break;
    case c10d::ReduceOp::BOR:
      r.op = RedOp::kBor;
      break;
    case c10d::ReduceOp::BXOR:
      r.op = RedOp::kBxor;
      break;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto& factor = factor_of(op);
      r.op = RedOp::kPremulSum;
      r.factor = factor.tensor_factor.defined() ? factor.tensor_factor.item<double>()
                                                : factor.double_factor;
      break;
    }
    default:
      TORCH_CHECK_VALUE(false, "fsccl: unknown reduction ",
                        digits(static_cast<int>(op.op_)));
  }
  if (t.is_complex()) {
    TORCH_CHECK_TYPE(r.op == RedOp::kSum || r.op == RedOp::kAvg || r.op == RedOp::kPremulSum,
                     "fsccl: reduction ", name_of(r.op), " is not defined for complex tensors");
  }
  return r;
}

inline BufferList buffers_of(const at::Tensor& t) { return BufferList(t.const_data_ptr(), t.nbytes()); }

inline size_t elements_of(const at::Tensor& t, const Reduction& r) {
  return t.nbytes() / r.width();
}

// A tensor as one run of memory at the site of an operation, in its logical order, whatever its
// strides. `settle` writes back.
class Flat {
 public:
  enum Use { kRead, kWrite, kReadWrite };

  Flat(const at::Tensor& t, Use use, const Site& at) : user_(t), use_(use) {
    require_dense(t, at.op);
    const bool here = t.device() == at.device;
    if (here && t.is_contiguous() && !t.is_conj() && !t.is_neg()) {
      flat_ = t;
    } else if (use == kWrite || !here) {
      // Pinned where a device copies from or to it.
      flat_ = at::empty(t.sizes(), t.options().device(at.device).pinned_memory(at.device.is_cpu() &&
                                                                               !t.is_cpu()));
      if (use != kWrite) flat_.copy_(t.detach());
    } else {
      flat_ = t.resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous);
    }
  }
  const at::Tensor& get() const { return flat_; }
  void settle() const {
    if (use_ != kRead && !flat_.is_same(user_)) user_.copy_(flat_);
  }

 private:
  at::Tensor user_, flat_;
  Use use_;
};

inline std::vector<Flat> flats(const std::vector<at::Tensor>& list, Flat::Use use, const Site& at) {
  std::vector<Flat> out;
  for (const at::Tensor& t : list) out.emplace_back(t, use, at);
  return out;
}

inline void settle(const std::vector<Flat>& list) {
  for (const Flat& f : list) f.settle();
}

inline BufferLists buffers_of(const std::vector<Flat>& list) {
  BufferLists out;
  for (const Flat& f : list) out.push_back(buffers_of(f.get()));
  return out;
}

// One tensor, cut along its first dimension: `rows` of each part, or equal parts if empty.
inline BufferLists split_rows(const at::Tensor& t, const std::vector<int64_t>& rows,
                                      int parts, const char* op) {
  const int64_t all = t.dim() > 0 ? t.size(0) : 1;
  std::vector<int64_t> counts = rows;
  if (counts.empty()) {
    TORCH_CHECK_VALUE(all % parts == 0, "fsccl: ", op, ": the first dimension, ",
                      digits(all), ", does not divide by the ", digits(parts), " ranks");
    counts.assign(static_cast<size_t>(parts), all / parts);
  }
  int64_t sum = 0;
  for (const int64_t c : counts) sum += c;
  TORCH_CHECK_VALUE(counts.size() == static_cast<size_t>(parts) && sum == all, "fsccl: ", op, ": ",
                    digits(counts.size()), " split sizes with sum ", digits(sum), " for ",
                    digits(parts), " ranks and ", digits(all), " rows");
  const size_t row = all > 0 ? t.nbytes() / static_cast<size_t>(all) : 0;
  const auto* at = static_cast<const std::byte*>(t.const_data_ptr());
  BufferLists out;
  for (const int64_t c : counts) {
    out.emplace_back(at, static_cast<size_t>(c) * row);
    at += static_cast<size_t>(c) * row;
  }
  return out;
}

}  // namespace fsccl
