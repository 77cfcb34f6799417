// The list of kernels: X(algorithm) moves bytes, X(algorithm, suffix, element) reduces elements.
#pragma once

#include "direct.h"
#include "flagged.h"
#include "staged.h"

#define FSCCL_MOVERS(X) X(copy_flagged) X(copy_staged) X(copy_direct)

#define FSCCL_REDUCERS(X, suffix, E)  \
  X(reduce_flagged, suffix, E)        \
  X(all_reduce_flagged, suffix, E)    \
  X(all_reduce_staged, suffix, E)     \
  X(reduce_scatter_staged, suffix, E) \
  X(all_reduce_direct, suffix, E)     \
  X(reduce_scatter_direct, suffix, E)
