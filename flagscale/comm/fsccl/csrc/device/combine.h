// Reductions in the device's own memory, with torch's kernels, so that they run wherever it does.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "../core/types.h"

namespace fsccl {

at::ScalarType scalar_type(DType t);

// Folds the sources, in order, into `out`, which is none of them but may be the first. The same
// sources give the same bits on every device: 16-bit floats are folded in float32 and rounded once,
// and each step is one that IEEE 754 defines exactly. All are flat, of r.dtype.
void combine(const Reduction& r, const std::vector<at::Tensor>& sources, const at::Tensor& out);

// What PREMUL_SUM does to an input before it is summed.
at::Tensor premultiplied(const Reduction& r, const at::Tensor& in);

}  // namespace fsccl
