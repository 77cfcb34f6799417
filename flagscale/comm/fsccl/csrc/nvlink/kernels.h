// The list of kernels: X(algorithm) and Y(algorithm, most) move bytes, Y among at most so many
// ranks, and X(algorithm, most, suffix, element) reduces elements. Kernels for more ranks would
// cost small groups time and registers.
#pragma once

#include "direct.h"
#include "flagged.h"
#include "staged.h"

#define FSCCL_MOVERS(X, Y)                                    \
  X(copy_staged) X(copy_direct)                               \
  Y(copy_flagged, 2) Y(copy_flagged, 4) Y(copy_flagged, 8)    \
  Y(copy_lines, 2) Y(copy_lines, 4) Y(copy_lines, 8)

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
