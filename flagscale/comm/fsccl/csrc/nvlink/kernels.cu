// All kernels for the GPU, named fsccl_<algorithm>[_<element>].
#include "block_cuda.h"
#include "kernels.h"

using namespace fsccl::nvlink;

#define KERNEL(name, body)                                           \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)       \
      fsccl_##name(const __grid_constant__ Args a) {                 \
    CudaBlock b;                                                     \
    body(b, a);                                                      \
  }
#define MOVER(name) KERNEL(name, name)
#define REDUCER(name, suffix, E) KERNEL(name##_##suffix, name<E>)

FSCCL_MOVERS(MOVER)
FSCCL_REDUCERS(REDUCER, u8, Plain<u8>)
FSCCL_REDUCERS(REDUCER, i8, Plain<signed char>)
FSCCL_REDUCERS(REDUCER, u16, Plain<u16>)
FSCCL_REDUCERS(REDUCER, i16, Plain<short>)
FSCCL_REDUCERS(REDUCER, u32, Plain<u32>)
FSCCL_REDUCERS(REDUCER, i32, Plain<int>)
FSCCL_REDUCERS(REDUCER, u64, Plain<u64>)
FSCCL_REDUCERS(REDUCER, i64, Plain<long long>)
FSCCL_REDUCERS(REDUCER, f16, Float16)
FSCCL_REDUCERS(REDUCER, bf16, BFloat16)
FSCCL_REDUCERS(REDUCER, f32, Plain<float>)
FSCCL_REDUCERS(REDUCER, f64, Plain<double>)
