// Interface of a GPU for the NVLink engine. CudaDevice (cuda_device.cpp) implements it; the tests
// have an implementation on the CPU.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "kernel_args.h"

namespace fsccl {
namespace nvlink {

using Function = void*;  // a loaded kernel: CUfunction
using Stream = void*;    // CUstream

// All methods throw Error(kSystem). Any thread may call.
class Device {
 public:
  virtual ~Device() = default;

  // Identifies the GPU, independently of its number in the process.
  virtual std::string identity() = 0;
  // Returns whether the GPU with this identity is this one, or is known to be linked to it by
  // NVLink.
  virtual bool has_nvlink_to(const std::string& identity) = 0;
  // Allocates memory of the device, zeroed, that processes can share; it lives as long as the
  // process.
  virtual char* allocate(u64 bytes) = 0;
  // Zeroes memory after the work that is enqueued on the stream `after`, unless that is null, and
  // waits until it is done.
  virtual void clear(char* address, u64 bytes, const Stream* after) = 0;
  // Returns a handle of the allocation that contains `address`, for other processes of this host,
  // and sets `offset` to the offset of `address` in it.
  virtual std::string export_memory(const char* address, u64* offset) = 0;
  // Maps the allocation of a handle and returns its address here.
  virtual char* import_memory(const std::string& handle) = 0;
  // Called as often as import_memory(). The last call unmaps the memory; only then may its owner
  // free it.
  virtual void release_memory(const std::string& handle) = 0;
  // Returns whether the handle is of memory of this process.
  virtual bool is_own_memory(const std::string& handle) = 0;
  // Allocates host memory, zeroed, that kernels can read and write at the same address.
  virtual char* allocate_host(u64 bytes) = 0;

  // Returns null if there is no kernel of this name.
  virtual Function find_kernel(const std::string& name) = 0;
  // `early`: the kernel calls wait_previous_kernel() first, and may be put on the GPU while the
  // previous one runs.
  virtual void launch(Function kernel, u32 blocks, u32 threads, const KernelArgs& args,
                      Stream stream, bool early) = 0;
  // Makes work that is enqueued on `later` from now on run after the work on `earlier` so far.
  virtual void order_streams(Stream earlier, Stream later) = 0;
  // Returns whether all work on the stream has ended, or true if that cannot be queried.
  virtual bool is_idle(Stream stream) = 0;
};

// Returns the GPU with this number; `cubins` are the compiled kernels by unit (nvlink_compile.py).
// The first call loads CUDA's driver library, against which nothing is linked.
std::unique_ptr<Device> cuda_device(int number, const std::map<std::string, std::string>& cubins);

}  // namespace nvlink
}  // namespace fsccl
