// The kernels for the GPU, named fsccl_<algorithm>[_<element>][_<most ranks>]: compiled once for
// those that move bytes, and once for each element in nvlink_compile.py.
#include "block_cuda.h"
#include "kernels.h"

using namespace fsccl::nvlink;

#define KERNEL(name, body)                                           \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)       \
      fsccl_##name(const __grid_constant__ KernelArgs a) {                 \
    CudaBlock b;                                                     \
    body(b, a);                                                      \
  }
#define MOVER(name) KERNEL(name, name)
#define SIZED_MOVER(name, most) KERNEL(name##_##most, name<most>)
#define REDUCER(name, most, suffix, E) SIZED_KERNEL(name##_##suffix##_##most, name, E, most)
#define SIZED_KERNEL(kernel, name, E, most) KERNEL(kernel, (name<E, most>))

#if defined(FSCCL_SUFFIX)
FSCCL_REDUCERS(REDUCER, FSCCL_SUFFIX, FSCCL_ELEMENT)
#else
FSCCL_MOVERS(MOVER, SIZED_MOVER)
#endif
