// What the engine needs of a GPU: CudaDevice is one, and the tests have one that is a CPU.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "args.h"

namespace fsccl {
namespace nvlink {

using Function = void*;
using Stream = void*;

// Everything throws Error(kSystem). Any thread may call.
class Device {
 public:
  virtual ~Device() = default;

  // Which GPU it is, whatever number the process knows it by.
  virtual std::string identity() = 0;
  // Whether it is known that a GPU of this identity is beside it on an NVLink, or is it itself.
  virtual bool linked(const std::string& identity) = 0;
  // Memory of the device, zeroed, that processes can share; it lives as long as the process.
  virtual char* allocate(u64 bytes) = 0;
  // Returns when it is zero; begins after what was put on the stream `after`, if given.
  virtual void clear(char* at, u64 bytes, const Stream* after) = 0;
  // A name of the allocation around `at` for other processes of this host, and where `at` is in it.
  virtual std::string share(const char* at, u64* offset) = 0;
  virtual char* open(const std::string& shared) = 0;
  // As often as it was opened; it ends with the last, and only then may its owner free it.
  virtual void close(const std::string& shared) = 0;
  // Whether it is memory of this very process.
  virtual bool own(const std::string& shared) = 0;
  // Host memory, zeroed, that kernels can read and write under the same address.
  virtual char* host_memory(u64 bytes) = 0;

  // Null when there is none of this name.
  virtual Function function(const std::string& name) = 0;
  // `early`: the kernel calls follow() first, and may be put on the GPU while the one before runs.
  virtual void launch(Function f, u32 blocks, u32 threads, const Args& args, Stream stream,
                      bool early) = 0;
  // What is put on `later` from now on runs after what was put on `earlier`.
  virtual void order(Stream earlier, Stream later) = 0;
  // Whether nothing is left to do on the stream, as far as can be told.
  virtual bool idle(Stream stream) = 0;
};

// The device with this number, `cubins` its kernels by unit. CUDA's driver is found when this is
// called; nothing here is linked against it.
std::unique_ptr<Device> cuda_device(int number, const std::map<std::string, std::string>& cubins);

}  // namespace nvlink
}  // namespace fsccl
