#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "../core/types.h"
#include "../cuda/driver.h"
#include "device.h"
#include "nvml.h"
#include "kernel_plan.h"

namespace fsccl {
namespace nvlink {
namespace {

using cuda::check;
using cuda::driver;

// Content of a memory handle. CUDA lets a process open an IPC handle only once, and not its own,
// but ranks may be threads of one process.
struct MemoryHandle {
  u64 process;  // random, because process numbers repeat in other containers
  u64 base;
  cuda::IpcHandle ipc;
};

u64 process_identity() {
  static const u64 number =
      (u64{std::random_device{}()} << 32) ^ std::random_device{}() ^ static_cast<u64>(getpid());
  return number;
}

MemoryHandle parse_handle(const std::string& handle_text) {
  MemoryHandle handle;
  if (handle_text.size() != sizeof handle) {
    throw Error(Fault::kSystem, -1, "NVLink engine: memory handle of another version");
  }
  memcpy(&handle, handle_text.data(), sizeof handle);
  return handle;
}

cuda::DevicePointer pointer(const char* address) {
  return reinterpret_cast<cuda::DevicePointer>(address);
}

class CudaDevice : public Device {
 public:
  CudaDevice(int number, const std::map<std::string, std::string>& cubins) {
    check(driver().init(0), "starting CUDA's driver");
    check(driver().device_get(&device_, number), "finding the device");
    check(driver().device_uuid(&uuid_, device_), "querying the device's UUID");
    int version = 0, major = 0;
    check(driver().version(&version), "querying the driver's version");
    check(driver().device_attribute(&major, cuda::kComputeCapabilityMajor, device_),
          "querying the compute capability");
    can_launch_early_ = version >= cuda::kMinEarlyLaunchVersion && major >= 9;
    check(driver().context_retain(&context_, device_), "retaining the device's context");
    const CurrentContext current(context_);
    check(driver().stream_create(&stream_, cuda::kStreamNonBlocking), "creating a stream");
    check(driver().event_create(&event_, cuda::kEventDisableTiming), "creating an event");
    for (const auto& [unit, cubin] : cubins) {
      check(driver().module_load(&modules_[unit], cubin.data()), "loading the kernels");
    }
  }

  std::string identity() override { return std::string(uuid_.bytes, sizeof uuid_.bytes); }

  // NVML is queried for a GPU that this process does not see (CUDA_VISIBLE_DEVICES). An unknown
  // link counts as no NVLink: over PCIe a line of a bundle may arrive in parts, which nothing would
  // detect.
  bool has_nvlink_to(const std::string& identity) override {
    int count = 0;
    check(driver().device_count(&count), "counting devices");
    for (int i = 0; i < count; ++i) {
      int other_device = 0, atomics = 0;
      cuda::Uuid uuid;
      check(driver().device_get(&other_device, i), "finding a device");
      check(driver().device_uuid(&uuid, other_device), "querying a device's UUID");
      if (identity != std::string(uuid.bytes, sizeof uuid.bytes) || other_device == device_)
        continue;
      check(driver().device_p2p_attribute(&atomics, cuda::kP2pNativeAtomics, device_, other_device),
            "querying how devices are connected");
      return atomics != 0;
    }
    const std::string own = this->identity();
    return identity == own || query_link(own, identity) == Link::kNvlink;
  }

  char* allocate(u64 bytes) override {
    const CurrentContext current(context_);
    cuda::DevicePointer device_address = 0;
    check(driver().memory_allocate(&device_address, bytes), "allocating memory");
    auto* const memory = reinterpret_cast<char*>(device_address);
    clear(memory, bytes, nullptr);
    return memory;
  }

  void clear(char* address, u64 bytes, const Stream* after) override {
    const CurrentContext current(context_);
    if (after != nullptr) order_streams(*after, stream_);
    check(driver().memory_set(pointer(address), 0, bytes, stream_), "clearing memory");
    check(driver().stream_synchronize(stream_), "clearing memory");
  }

  std::string export_memory(const char* address, u64* offset) override {
    const CurrentContext current(context_);
    MemoryHandle handle{};
    cuda::DevicePointer base = 0;
    size_t size = 0;
    check(driver().memory_range(&base, &size, pointer(address)), "looking up memory");
    check(driver().ipc_get(&handle.ipc, base),
          "sharing memory with other processes (memory of an expandable segment cannot be)");
    handle.process = process_identity();
    handle.base = base;
    *offset = pointer(address) - base;
    return std::string(reinterpret_cast<const char*>(&handle), sizeof handle);
  }

  bool is_own_memory(const std::string& handle_text) override {
    return parse_handle(handle_text).process == process_identity();
  }

  char* import_memory(const std::string& handle_text) override {
    const MemoryHandle handle = parse_handle(handle_text);
    if (handle.process == process_identity()) return reinterpret_cast<char*>(handle.base);
    std::lock_guard<std::mutex> lock(mapped_memory_mutex());
    MappedMemory& mapping = mapped_memory()[{context_, handle_text}];
    if (mapping.address == nullptr) {
      const CurrentContext current(context_);
      cuda::DevicePointer mapped = 0;
      check(driver().ipc_open(&mapped, handle.ipc, cuda::kIpcLazyPeerAccess),
            "mapping a peer's memory");
      mapping.address = reinterpret_cast<char*>(mapped);
    }
    ++mapping.users;
    return mapping.address;
  }

  void release_memory(const std::string& handle_text) override {
    if (is_own_memory(handle_text)) return;
    std::lock_guard<std::mutex> lock(mapped_memory_mutex());
    const auto mapping = mapped_memory().find({context_, handle_text});
    if (mapping == mapped_memory().end() || --mapping->second.users > 0) return;
    const CurrentContext current(context_);
    const cuda::DevicePointer mapped = pointer(mapping->second.address);
    mapped_memory().erase(mapping);
    check(driver().ipc_close(mapped), "unmapping a peer's memory");
  }

  char* allocate_host(u64 bytes) override {
    const CurrentContext current(context_);
    void* memory = nullptr;
    check(driver().host_allocate(&memory, bytes, cuda::kHostPortableMapped),
          "allocating host memory");
    memset(memory, 0, bytes);
    return static_cast<char*>(memory);
  }

  // Loads the code now. CUDA would otherwise load it at the first launch, and might first wait for
  // running kernels, which wait for peers.
  Function find_kernel(const std::string& name) override {
    const auto module = modules_.find(unit_of(name));
    if (module == modules_.end()) return nullptr;
    const CurrentContext current(context_);
    void* function = nullptr;
    const std::string symbol = "fsccl_" + name;
    if (driver().module_function(&function, module->second, symbol.c_str()) != cuda::kSuccess) {
      return nullptr;
    }
    check(driver().function_load(function), "loading a kernel");
    return function;
  }

  void launch(Function kernel, u32 blocks, u32 threads, const KernelArgs& args, Stream stream,
              bool early) override {
    const CurrentContext current(context_);
    void* parameters[] = {const_cast<KernelArgs*>(&args)};
    cuda::LaunchAttribute attribute{};
    attribute.id = cuda::kProgrammaticStreamSerialization;
    attribute.is_allowed = 1;
    const unsigned attributes = early && can_launch_early_ ? 1 : 0;
    const cuda::LaunchConfig config{{blocks, 1, 1}, {threads, 1, 1}, 0,
                                    stream,         &attribute,      attributes};
    check(driver().launch(&config, kernel, parameters, nullptr), "launching a kernel");
  }

  // A stream that captures a graph cannot be ordered after one that does not; a program that
  // captures must have waited for earlier operations, as with any other library.
  void order_streams(Stream earlier, Stream later) override {
    const CurrentContext current(context_);
    int before = cuda::kCaptureNone, after = cuda::kCaptureNone;
    if (driver().stream_capturing(earlier, &before) != cuda::kSuccess) return;
    if (driver().stream_capturing(later, &after) != cuda::kSuccess || before != after) return;
    std::lock_guard<std::mutex> lock(event_mutex_);
    check(driver().event_record(event_, earlier), "recording an event");
    check(driver().stream_wait(later, event_, 0), "waiting for an event");
  }

  bool is_idle(Stream stream) override {
    const CurrentContext current(context_);
    int capture = cuda::kCaptureNone;  // a stream that captures must not be queried
    if (driver().stream_capturing(stream, &capture) != cuda::kSuccess) return true;
    return capture != cuda::kCaptureNone || driver().stream_query(stream) != cuda::kNotReady;
  }

 private:
  // Makes the context current for a scope. A thread that has not called CUDA's runtime yet has no
  // current context.
  class CurrentContext {
   public:
    explicit CurrentContext(void* context) : context_(context) {
      check(driver().context_current(&previous_), "querying the current context");
      if (previous_ != context_) check(driver().context_set(context_), "setting the context");
    }
    ~CurrentContext() {
      if (previous_ != context_) driver().context_set(previous_);
    }

   private:
    void* const context_;
    void* previous_ = nullptr;
  };

  // Mapped memory of peers, for all devices of the process, by context and handle. Never destroyed:
  // kernels may still run when the process ends.
  struct MappedMemory {
    char* address = nullptr;
    int users = 0;
  };
  static std::map<std::pair<void*, std::string>, MappedMemory>& mapped_memory() {
    static auto* const all = new std::map<std::pair<void*, std::string>, MappedMemory>;
    return *all;
  }
  static std::mutex& mapped_memory_mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }

  std::mutex event_mutex_;
  int device_ = 0;
  cuda::Uuid uuid_{};
  bool can_launch_early_ = false;
  void *context_ = nullptr, *stream_ = nullptr, *event_ = nullptr;
  std::map<std::string, void*> modules_;
};

}  // namespace

std::unique_ptr<Device> cuda_device(int number, const std::map<std::string, std::string>& cubins) {
  return std::make_unique<CudaDevice>(number, cubins);
}

}  // namespace nvlink
}  // namespace fsccl
