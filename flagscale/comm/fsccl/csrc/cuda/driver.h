// Functions of the CUDA driver API, declared here and looked up in libcuda when driver() is first
// called, so that neither CUDA's headers nor its libraries are needed to build. Signatures are
// those of cuda.h (CUDA 11.8 and newer), with int for CUresult, an integer for CUdeviceptr, and
// void* for CUcontext, CUmodule, CUfunction, CUstream and CUevent.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsccl {
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
    int is_allowed;
    char padding[64];
  };
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may be launched before the
// previous one of the stream has ended.
constexpr int kProgrammaticStreamSerialization = 6;
constexpr int kMinEarlyLaunchVersion = 12030;  // first CUDA version whose graphs capture it
constexpr int kComputeCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kIpcLazyPeerAccess = 1;
constexpr unsigned kHostPortableMapped = 1 | 2;  // for host memory, allocated or registered
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kWaitGreaterOrEqual = 0;  // compares by the signed difference
constexpr unsigned kWriteWithBarrier = 0;    // after earlier operations and their memory accesses
constexpr int kCaptureNone = 0;
constexpr int kCaptureRelaxed = 2;  // this thread may call while another captures
// CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: true for GPUs with NVLink between them, and not
// for GPUs that are connected by PCIe.
constexpr int kP2pNativeAtomics = 3;

// The functions, as X(member of Driver, symbol in libcuda, parameters). All return a Result.
#define FSCCL_CUDA_FUNCTIONS(X)                                                                    \
  X(init, "cuInit", (unsigned))                                                                    \
  X(error_string, "cuGetErrorString", (Result, const char**))                                      \
  X(device_get, "cuDeviceGet", (int*, int))                                                        \
  X(device_uuid, "cuDeviceGetUuid_v2", (Uuid*, int))                                               \
  X(device_count, "cuDeviceGetCount", (int*))                                                      \
  X(device_p2p_attribute, "cuDeviceGetP2PAttribute", (int*, int, int, int))                        \
  X(context_retain, "cuDevicePrimaryCtxRetain", (void**, int))                                     \
  X(context_current, "cuCtxGetCurrent", (void**))                                                  \
  X(context_set, "cuCtxSetCurrent", (void*))                                                       \
  X(memory_allocate, "cuMemAlloc_v2", (DevicePointer*, size_t))                                    \
  X(memory_range, "cuMemGetAddressRange_v2", (DevicePointer*, size_t*, DevicePointer))             \
  X(memory_set, "cuMemsetD8Async", (DevicePointer, unsigned char, size_t, void*))                  \
  X(host_allocate, "cuMemHostAlloc", (void**, size_t, unsigned))                                   \
  X(host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))                              \
  X(host_unregister, "cuMemHostUnregister", (void*))                                               \
  X(host_pointer, "cuMemHostGetDevicePointer_v2", (DevicePointer*, void*, unsigned))               \
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
  X(stream_write_value, "cuStreamWriteValue32_v2", (void*, DevicePointer, uint32_t, unsigned))     \
  X(stream_wait_value, "cuStreamWaitValue32_v2", (void*, DevicePointer, uint32_t, unsigned))       \
  X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int*))                                     \
  X(stream_wait, "cuStreamWaitEvent", (void*, void*, unsigned))                                    \
  X(event_create, "cuEventCreate", (void**, unsigned))                                             \
  X(event_record, "cuEventRecord", (void*, void*))

struct Driver {
#define FSCCL_MEMBER(member, symbol, parameters) Result(*member) parameters = nullptr;
  FSCCL_CUDA_FUNCTIONS(FSCCL_MEMBER)
#undef FSCCL_MEMBER
};

// Returns the functions. Throws Error(kSystem) if there is no driver, or if it lacks a function.
const Driver& driver();
// Throws Error(kSystem) with `what` and the driver's description of the result, unless that is
// kSuccess.
void check(Result result, const char* what);

}  // namespace cuda
}  // namespace fsccl
