// Reductions of tensors by torch's operations, so that they run on every device that torch
// supports.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "../core/types.h"

namespace fsccl {

at::ScalarType scalar_type(DType t);

// Reduces the sources, in order, into `out`, which may be the first source but no other. The same
// sources give the same bits on every device: 16-bit floats are reduced in float32 and rounded
// once, and IEEE 754 defines the result of each step exactly. All tensors are flat, of type
// r.dtype.
void reduce_tensors(const Reduction& r, const std::vector<at::Tensor>& sources,
                    const at::Tensor& out);

// Returns an input of PREMUL_SUM multiplied by its factor.
at::Tensor apply_premul_factor(const Reduction& r, const at::Tensor& in);

}  // namespace fsccl
