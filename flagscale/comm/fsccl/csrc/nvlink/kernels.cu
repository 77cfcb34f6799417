// Entry points of the kernels on the GPU, named fsccl_<algorithm>[_<element suffix>][_<capacity>].
// nvlink_compile.py compiles this file once without definitions, for the kernels that copy bytes,
// and once for each element type, with FSCCL_SUFFIX and FSCCL_ELEMENT, for those that reduce.
#include "block_cuda.h"
#include "kernels.h"

using namespace fsccl::nvlink;

#define KERNEL(name, function)                                 \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) \
      fsccl_##name(const __grid_constant__ KernelArgs a) {     \
    CudaBlock b;                                               \
    function(b, a);                                            \
  }
#define COPY_KERNEL(name) KERNEL(name, name)
#define SIZED_COPY_KERNEL(name, capacity) KERNEL(name##_##capacity, name<capacity>)
#define REDUCTION_KERNEL(name, capacity, suffix, E) \
  SIZED_KERNEL(name##_##suffix##_##capacity, name, E, capacity)
#define SIZED_KERNEL(kernel, name, E, capacity) KERNEL(kernel, (name<E, capacity>))

#if defined(FSCCL_SUFFIX)
FSCCL_REDUCTION_KERNELS(REDUCTION_KERNEL, FSCCL_SUFFIX, FSCCL_ELEMENT)
#else
FSCCL_COPY_KERNELS(COPY_KERNEL, SIZED_COPY_KERNEL)
#endif
