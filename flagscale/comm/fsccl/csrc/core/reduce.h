// Elementwise reductions of several sources.
#pragma once

#include "types.h"

namespace fsccl {

// Throws Error(kUsage) if the operation is not defined for the type, such as BAND of floats.
void check_reduction(const Reduction& r);

// Computes out[i] = sources[0][i] op sources[1][i] op ... of `count` elements, always in this
// order, so that ranks that reduce the same sources get the same bits. PREMUL_SUM multiplies each
// source first, AVG divides the sum. 16-bit floats accumulate in fp32 and are rounded once. `out`
// may be one of the sources.
void reduce(const Reduction& r, void* out, const void* const* sources, int source_count,
            size_t count);

}  // namespace fsccl
