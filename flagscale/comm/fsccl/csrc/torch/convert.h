// Conversion of torch's tensors, element types and reductions to those of the core.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <utility>
#include <vector>

#include "../core/buffer_list.h"
#include "../core/collectives.h"
#include "../core/types.h"
#include "checks.h"

namespace fsccl {

// The device on which an operation runs. Tensors on other devices are copied to it.
struct Placement {
  const char* op;  // name of the operation, for error messages
  at::Device device;
};

// Returns the element type of a tensor, kOpaque if its elements cannot be reduced. A complex number
// is reduced as two floats.
inline DType find_dtype(const at::Tensor& t) {
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
      return DType::kOpaque;
  }
}

// Returns the element type for a reduction.
inline DType dtype_of(const at::Tensor& t) {
  const DType dtype = find_dtype(t);
  TORCH_CHECK_TYPE(dtype != DType::kOpaque, "fsccl: cannot reduce tensors of type ",
                   t.scalar_type());
  return dtype;
}

inline const c10d::NCCLPreMulSumSupplement& factor_of(const c10d::ReduceOp& op) {
  const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(factor != nullptr, "fsccl: PREMUL_SUM without its factor");
  return *factor;
}

// Returns whether PREMUL_SUM's factor is a tensor. It may be on a device, where reading it would
// block.
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
      TORCH_CHECK_VALUE(false, "fsccl: unknown reduction ", digits(static_cast<int>(op.op_)));
  }
  if (t.is_complex()) {
    TORCH_CHECK_TYPE(r.op == RedOp::kSum || r.op == RedOp::kAvg || r.op == RedOp::kPremulSum,
                     "fsccl: reduction ", name_of(r.op), " is not defined for complex tensors");
  }
  return r;
}

// Returns the element type by which ranks recognize that they move different types; kOpaque for
// types that the core does not know.
inline DType moved_dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kComplexHalf:
      return DType::kComplex32;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    case at::kFloat8_e5m2:
      return DType::kF8E5M2;
    case at::kFloat8_e4m3fn:
      return DType::kF8E4M3;
    default:
      return find_dtype(t);
  }
}

inline BufferList buffers_of(const at::Tensor& t) {
  return BufferList(t.const_data_ptr(), t.nbytes(), moved_dtype_of(t));
}

inline size_t elements_of(const at::Tensor& t, const Reduction& r) {
  return t.nbytes() / r.width();
}

inline size_t element_size_of(const at::Tensor& t) { return static_cast<size_t>(t.element_size()); }

// Direction in which an operation uses a tensor.
enum class TensorAccess { kRead, kWrite, kReadWrite };

// Contiguous view of a tensor on the device of an operation: the tensor itself if it is contiguous
// there, else a contiguous copy, from which write_back() updates the tensor. Holds references, so
// copying a ContiguousTensor copies no data.
class ContiguousTensor {
 public:
  ContiguousTensor(const at::Tensor& t, TensorAccess access, const Placement& placement)
      : caller_tensor_(t), access_(access) {
    check_dense(t, placement.op);
    const bool in_place = t.device() == placement.device;
    if (in_place && t.is_contiguous() && !t.is_conj() && !t.is_neg()) {
      buffer_ = t;
    } else if (access == TensorAccess::kWrite || !in_place) {
      // Pinned where a device copies from or to it.
      const bool pinned = placement.device.is_cpu() && !t.is_cpu();
      buffer_ = at::empty(t.sizes(), t.options().device(placement.device).pinned_memory(pinned));
      if (access != TensorAccess::kWrite) buffer_.copy_(t.detach());
    } else {
      buffer_ = t.resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous);
    }
  }
  const at::Tensor& get() const { return buffer_; }
  void write_back() const {
    if (access_ != TensorAccess::kRead && !buffer_.is_same(caller_tensor_))
      caller_tensor_.copy_(buffer_);
  }

 private:
  at::Tensor caller_tensor_, buffer_;
  TensorAccess access_;
};

using ContiguousTensors = std::vector<ContiguousTensor>;

inline ContiguousTensors contiguous_tensors(const std::vector<at::Tensor>& list,
                                            TensorAccess access, const Placement& placement) {
  ContiguousTensors out;
  for (const at::Tensor& t : list) out.emplace_back(t, access, placement);
  return out;
}

inline void write_back(const ContiguousTensors& list) {
  for (const ContiguousTensor& t : list) t.write_back();
}

inline BufferLists buffers_of(const ContiguousTensors& list) {
  BufferLists out;
  for (const ContiguousTensor& t : list) out.push_back(buffers_of(t.get()));
  return out;
}

// Returns the CollectiveBody (dispatch.h) that all-reduces several tensors in place, one after the
// other.
inline auto all_reduce_each(ContiguousTensors buffers, std::vector<Reduction> reductions) {
  return [buffers = std::move(buffers), reductions = std::move(reductions)](Collectives& group,
                                                                            const Deadline& d) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      void* const data = buffers[i].get().data_ptr();
      group.all_reduce(data, data, elements_of(buffers[i].get(), reductions[i]), reductions[i], d);
    }
    write_back(buffers);
  };
}

// Divides a contiguous tensor into `parts` equal consecutive parts.
inline BufferLists equal_parts(const at::Tensor& t, int parts) {
  const size_t part_bytes = t.nbytes() / static_cast<size_t>(parts);
  const auto* begin = static_cast<const std::byte*>(t.const_data_ptr());
  const DType dtype = moved_dtype_of(t);
  BufferLists out;
  for (int p = 0; p < parts; ++p) {
    out.emplace_back(begin + static_cast<size_t>(p) * part_bytes, part_bytes, dtype);
  }
  return out;
}

// Splits a contiguous tensor along its first dimension. `rows` has the rows of each part; if it is
// empty, the parts are equal.
inline BufferLists split_rows(const at::Tensor& t, const std::vector<int64_t>& rows, int parts,
                              const char* op) {
  const int64_t total = t.dim() > 0 ? t.size(0) : 1;
  std::vector<int64_t> counts = rows;
  if (counts.empty()) {
    TORCH_CHECK_VALUE(total % parts == 0, "fsccl: ", op, ": the first dimension, ", digits(total),
                      ", is not divisible by the ", digits(parts), " ranks");
    counts.assign(static_cast<size_t>(parts), total / parts);
  }
  int64_t requested_rows = 0;
  for (const int64_t c : counts) requested_rows += c;
  TORCH_CHECK_VALUE(counts.size() == static_cast<size_t>(parts) && requested_rows == total,
                    "fsccl: ", op, ": ", digits(counts.size()), " split sizes with sum ",
                    digits(requested_rows), " for ", digits(parts), " ranks and ", digits(total),
                    " rows");
  const size_t row_bytes = total > 0 ? t.nbytes() / static_cast<size_t>(total) : 0;
  const auto* begin = static_cast<const std::byte*>(t.const_data_ptr());
  const DType dtype = moved_dtype_of(t);
  BufferLists out;
  for (const int64_t c : counts) {
    out.emplace_back(begin, static_cast<size_t>(c) * row_bytes, dtype);
    begin += static_cast<size_t>(c) * row_bytes;
  }
  return out;
}

}  // namespace fsccl
