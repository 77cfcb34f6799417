// Interface of a GPU for the engine: CudaDevice implements it, and the tests have an implementation
// on the CPU.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "kernel_args.h"

namespace fsccl {
namespace nvlink {

using Function = void*;
using Stream = void*;

// All methods throw Error(kSystem). Any thread may call.
class Device {
 public:
  virtual ~Device() = default;

  // Identifies the GPU, independently of its number in the process.
  virtual std::string identity() = 0;
  // Returns whether a GPU of this identity is known to be linked to this one by NVLink, or is this
  // one.
  virtual bool has_nvlink_to(const std::string& identity) = 0;
  // Allocates memory of the device, zeroed, that processes can share; it lives as long as the
  // process.
  virtual char* allocate(u64 bytes) = 0;
  // Zeroes memory, after the work enqueued on the stream `after`, if given, and waits until it is
  // zero.
  virtual void clear(char* at, u64 bytes, const Stream* after) = 0;
  // Returns a handle of the allocation around `at` for other processes of this host, and the offset
  // of `at` in it.
  virtual std::string export_memory(const char* at, u64* offset) = 0;
  virtual char* import_memory(const std::string& shared) = 0;
  // Called as often as import_memory(). The last call unmaps the memory, and only then may its
  // owner free it.
  virtual void release_memory(const std::string& shared) = 0;
  // Returns whether it is memory of this process.
  virtual bool is_own_memory(const std::string& shared) = 0;
  // Allocates host memory, zeroed, that kernels can read and write at the same address.
  virtual char* allocate_host(u64 bytes) = 0;

  // Returns null if there is none of this name.
  virtual Function find_kernel(const std::string& name) = 0;
  // `early`: the kernel calls wait_previous_kernel() first, and may be put on the GPU while the
  // previous one runs.
  virtual void launch(Function f, u32 blocks, u32 threads, const KernelArgs& args, Stream stream,
                      bool early) = 0;
  // Makes all that is put on `later` from now on run after all that was put on `earlier`.
  virtual void order_streams(Stream earlier, Stream later) = 0;
  // Returns whether nothing is left to do on the stream, as far as that is known.
  virtual bool is_idle(Stream stream) = 0;
};

// Returns the device with this number; `cubins` are its kernels, by unit. CUDA's driver is loaded
// when this is called; nothing here is linked against it.
std::unique_ptr<Device> cuda_device(int number, const std::map<std::string, std::string>& cubins);

}  // namespace nvlink
}  // namespace fsccl
