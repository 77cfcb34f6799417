// Reductions in the memory of a device, by torch's kernels, so they run on all of its
// devices.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "../core/types.h"

namespace fsccl {

at::ScalarType scalar_type(DType t);

// Reduces the sources, in order, into `out`, which is none of them but may be the first. The same
// sources give the same bits on every device: 16-bit floats are reduced in float32 and rounded
// once, and each step is one that IEEE 754 defines exactly. All tensors are flat, of r.dtype.
void reduce_tensors(const Reduction& r, const std::vector<at::Tensor>& sources,
                    const at::Tensor& out);

// Returns an input of PREMUL_SUM multiplied by its factor.
at::Tensor apply_premul_factor(const Reduction& r, const at::Tensor& in);

}  // namespace fsccl
