// The list of kernels, as X-macros.
//
// FSCCL_COPY_KERNELS: kernels that copy bytes, X(algorithm), or Y(algorithm, capacity) if the
// kernel is compiled for groups of at most `capacity` ranks. FSCCL_REDUCTION_KERNELS: kernels that
// reduce, X(algorithm, capacity, suffix, element). A kernel for eight ranks would cost smaller
// groups time and registers.
#pragma once

#include "direct.h"
#include "flagged.h"
#include "staged.h"

#define FSCCL_COPY_KERNELS(X, Y)                                    \
  X(copy_staged) X(copy_direct)                               \
  Y(copy_flagged, 2) Y(copy_flagged, 4) Y(copy_flagged, 8)    \
  Y(copy_lines, 2) Y(copy_lines, 4) Y(copy_lines, 8)

#define FSCCL_REDUCTION_KERNELS(X, suffix, E)               \
  FSCCL_SIZED(X, reduce_flagged, suffix, E)        \
  FSCCL_SIZED(X, reduce_lines, suffix, E)          \
  FSCCL_SIZED(X, all_reduce_lines, suffix, E)      \
  FSCCL_SIZED(X, all_reduce_staged, suffix, E)     \
  FSCCL_SIZED(X, reduce_scatter_staged, suffix, E) \
  FSCCL_SIZED(X, all_reduce_direct, suffix, E)     \
  FSCCL_SIZED(X, reduce_scatter_direct, suffix, E)
#define FSCCL_SIZED(X, name, suffix, E) \
  X(name, 2, suffix, E) X(name, 4, suffix, E) X(name, 8, suffix, E)
