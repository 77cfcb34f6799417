// The list of kernels: X(algorithm) moves bytes, and X(algorithm, most, suffix, element) reduces
// elements of so many ranks at most: code for more of them would take registers from groups that
// are small.
#pragma once

#include "direct.h"
#include "flagged.h"
#include "staged.h"

#define FSCCL_MOVERS(X) X(copy_flagged) X(copy_lines) X(copy_staged) X(copy_direct)

#define FSCCL_REDUCERS(X, suffix, E)               \
  FSCCL_SIZED(X, reduce_flagged, suffix, E)        \
  FSCCL_SIZED(X, reduce_lines, suffix, E)          \
  FSCCL_SIZED(X, all_reduce_lines, suffix, E)      \
  FSCCL_SIZED(X, all_reduce_staged, suffix, E)     \
  FSCCL_SIZED(X, reduce_scatter_staged, suffix, E) \
  FSCCL_SIZED(X, all_reduce_direct, suffix, E)     \
  FSCCL_SIZED(X, reduce_scatter_direct, suffix, E)
#define FSCCL_SIZED(X, name, suffix, E) \
  X(name, 2, suffix, E) X(name, 4, suffix, E) X(name, 8, suffix, E)
