// The few functions of CUDA's driver that are used, declared here so that building needs no CUDA.
#pragma once

#include <cstddef>

namespace fsccl {
namespace nvlink {
namespace cuda {

using Result = int;
using DevicePointer = unsigned long long;
struct IpcHandle {
  char reserved[64];
};
struct Uuid {
  char bytes[16];
};

struct LaunchAttribute {
  int id;
  int unused;
  union {
    int allowed;
    char most[64];
  };
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};

constexpr int kLaunchEarly = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int kLaunchEarlyVersion = 12030;  // graphs capture it since
constexpr int kDeviceMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kIpcLazyPeerAccess = 1;
constexpr unsigned kHostPortableMapped = 1 | 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr int kCaptureNone = 0;
constexpr int kPairAtomics = 3;  // a pair's atomics are done by the hardware: not over PCIe

// X(member, symbol, parameters); all return a Result.
#define FSCCL_CUDA_FUNCTIONS(X)                                                                    \
  X(init, "cuInit", (unsigned))                                                                    \
  X(error_string, "cuGetErrorString", (Result, const char**))                                      \
  X(device_get, "cuDeviceGet", (int*, int))                                                        \
  X(device_uuid, "cuDeviceGetUuid_v2", (Uuid*, int))                                               \
  X(device_count, "cuDeviceGetCount", (int*))                                                      \
  X(device_pair, "cuDeviceGetP2PAttribute", (int*, int, int, int))                                 \
  X(context_retain, "cuDevicePrimaryCtxRetain", (void**, int))                                     \
  X(context_current, "cuCtxGetCurrent", (void**))                                                  \
  X(context_set, "cuCtxSetCurrent", (void*))                                                       \
  X(memory_allocate, "cuMemAlloc_v2", (DevicePointer*, size_t))                                    \
  X(memory_range, "cuMemGetAddressRange_v2", (DevicePointer*, size_t*, DevicePointer))             \
  X(memory_set, "cuMemsetD8Async", (DevicePointer, unsigned char, size_t, void*))                  \
  X(host_allocate, "cuMemHostAlloc", (void**, size_t, unsigned))                                   \
  X(ipc_get, "cuIpcGetMemHandle", (IpcHandle*, DevicePointer))                                     \
  X(ipc_open, "cuIpcOpenMemHandle_v2", (DevicePointer*, IpcHandle, unsigned))                      \
  X(ipc_close, "cuIpcCloseMemHandle", (DevicePointer))                                             \
  X(module_load, "cuModuleLoadData", (void**, const void*))                                        \
  X(module_function, "cuModuleGetFunction", (void**, void*, const char*))                          \
  X(function_load, "cuFuncLoad", (void*))                                                          \
  X(version, "cuDriverGetVersion", (int*))                                                         \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, int))                                    \
  X(launch, "cuLaunchKernelEx", (const LaunchConfig*, void*, void**, void**))                      \
  X(stream_create, "cuStreamCreate", (void**, unsigned))                                           \
  X(stream_synchronize, "cuStreamSynchronize", (void*))                                            \
  X(stream_query, "cuStreamQuery", (void*))                                                        \
  X(stream_capturing, "cuStreamIsCapturing", (void*, int*))                                        \
  X(stream_wait, "cuStreamWaitEvent", (void*, void*, unsigned))                                    \
  X(event_create, "cuEventCreate", (void**, unsigned))                                             \
  X(event_record, "cuEventRecord", (void*, void*))

struct Driver {
#define FSCCL_MEMBER(member, symbol, parameters) Result(*member) parameters = nullptr;
  FSCCL_CUDA_FUNCTIONS(FSCCL_MEMBER)
#undef FSCCL_MEMBER
};

}  // namespace cuda
}  // namespace nvlink
}  // namespace fsccl
