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
#include "plan.h"

namespace fsccl {
namespace nvlink {
namespace {

using cuda::check;
using cuda::driver;

// One handle may be opened only once in a process, and ranks may be threads of one process.
struct Shared {
  u64 process;  // by chance: process numbers repeat in other containers
  u64 base;
  cuda::IpcHandle handle;
};

u64 this_process() {
  static const u64 number = (u64{std::random_device{}()} << 32) ^ std::random_device{}() ^
                            static_cast<u64>(getpid());
  return number;
}

Shared parse(const std::string& text) {
  Shared shared;
  if (text.size() != sizeof shared) {
    throw Error(Fault::kSystem, -1, "NVLink engine: memory that another version shares");
  }
  memcpy(&shared, text.data(), sizeof shared);
  return shared;
}

cuda::DevicePointer pointer(const char* at) { return reinterpret_cast<cuda::DevicePointer>(at); }

class CudaDevice : public Device {
 public:
  CudaDevice(int number, const std::map<std::string, std::string>& cubins) {
    check(driver().init(0), "starting CUDA's driver");
    check(driver().device_get(&device_, number), "finding the device");
    check(driver().device_uuid(&uuid_, device_), "asking for the device's identity");
    int version = 0, major = 0;
    check(driver().version(&version), "asking for the driver's version");
    check(driver().device_attribute(&major, cuda::kDeviceMajor, device_), "asking for what it can");
    can_launch_early_ = version >= cuda::kLaunchEarlyVersion && major >= 9;
    check(driver().context_retain(&context_, device_), "the device's context");
    const Current here(context_);
    check(driver().stream_create(&stream_, cuda::kStreamNonBlocking), "making a stream");
    check(driver().event_create(&event_, cuda::kEventDisableTiming), "making an event");
    for (const auto& [unit, cubin] : cubins) {
      check(driver().module_load(&modules_[unit], cubin.data()), "loading the kernels");
    }
  }

  std::string identity() override { return std::string(uuid_.bytes, sizeof uuid_.bytes); }

  // Of a GPU that this process does not see (CUDA_VISIBLE_DEVICES) NVML is asked. What nobody
  // knows is taken for no NVLink: over PCIe lines may arrive in parts, and nobody would notice.
  bool linked(const std::string& identity) override {
    int count = 0;
    check(driver().device_count(&count), "counting devices");
    for (int i = 0; i < count; ++i) {
      int other = 0, atomics = 0;
      cuda::Uuid uuid;
      check(driver().device_get(&other, i), "finding a device");
      check(driver().device_uuid(&uuid, other), "asking for a device's identity");
      if (identity != std::string(uuid.bytes, sizeof uuid.bytes) || other == device_) continue;
      check(driver().device_pair(&atomics, cuda::kPairAtomics, device_, other),
            "asking how devices are connected");
      return atomics != 0;
    }
    const std::string own = this->identity();
    return identity == own || link_between(own, identity) == Link::kNvlink;
  }

  char* allocate(u64 bytes) override {
    const Current here(context_);
    cuda::DevicePointer at = 0;
    check(driver().memory_allocate(&at, bytes), "allocating memory");
    auto* const memory = reinterpret_cast<char*>(at);
    clear(memory, bytes, nullptr);
    return memory;
  }

  void clear(char* at, u64 bytes, const Stream* after) override {
    const Current here(context_);
    if (after != nullptr) order(*after, stream_);
    check(driver().memory_set(pointer(at), 0, bytes, stream_), "clearing memory");
    check(driver().stream_synchronize(stream_), "clearing memory");
  }

  std::string share(const char* at, u64* offset) override {
    const Current here(context_);
    Shared shared{};
    cuda::DevicePointer base = 0;
    size_t size = 0;
    check(driver().memory_range(&base, &size, pointer(at)), "looking up memory");
    check(driver().ipc_get(&shared.handle, base),
          "sharing memory with other processes (memory of an expandable segment cannot be)");
    shared.process = this_process();
    shared.base = base;
    *offset = pointer(at) - base;
    return std::string(reinterpret_cast<const char*>(&shared), sizeof shared);
  }

  bool own(const std::string& text) override { return parse(text).process == this_process(); }

  char* open(const std::string& text) override {
    const Shared shared = parse(text);
    if (shared.process == this_process()) return reinterpret_cast<char*>(shared.base);
    std::lock_guard<std::mutex> hold(opened_mutex());
    Opened& it = opened()[{context_, text}];
    if (it.at == nullptr) {
      const Current here(context_);
      cuda::DevicePointer mapped = 0;
      check(driver().ipc_open(&mapped, shared.handle, cuda::kIpcLazyPeerAccess),
            "mapping a peer's memory");
      it.at = reinterpret_cast<char*>(mapped);
    }
    ++it.users;
    return it.at;
  }

  void close(const std::string& text) override {
    if (own(text)) return;
    std::lock_guard<std::mutex> hold(opened_mutex());
    const auto found = opened().find({context_, text});
    if (found == opened().end() || --found->second.users > 0) return;
    const Current here(context_);
    const cuda::DevicePointer mapped = pointer(found->second.at);
    opened().erase(found);
    check(driver().ipc_close(mapped), "giving back a peer's memory");
  }

  char* host_memory(u64 bytes) override {
    const Current here(context_);
    void* at = nullptr;
    check(driver().host_allocate(&at, bytes, cuda::kHostPortableMapped),
          "allocating host memory");
    memset(at, 0, bytes);
    return static_cast<char*>(at);
  }

  // Loads the code now: at the first launch it could wait for kernels that wait for peers.
  Function function(const std::string& name) override {
    const auto module = modules_.find(unit_of(name));
    if (module == modules_.end()) return nullptr;
    const Current here(context_);
    void* found = nullptr;
    const std::string symbol = "fsccl_" + name;
    if (driver().module_function(&found, module->second, symbol.c_str()) != cuda::kSuccess) {
      return nullptr;
    }
    check(driver().function_load(found), "loading a kernel");
    return found;
  }

  void launch(Function f, u32 blocks, u32 threads, const Args& args, Stream stream,
              bool early) override {
    const Current here(context_);
    void* parameters[] = {const_cast<Args*>(&args)};
    cuda::LaunchAttribute attribute{};
    attribute.id = cuda::kLaunchEarly;
    attribute.allowed = 1;
    const unsigned attributes = early && can_launch_early_ ? 1 : 0;
    const cuda::LaunchConfig config{
        {blocks, 1, 1}, {threads, 1, 1}, 0, stream, &attribute, attributes};
    check(driver().launch(&config, f, parameters, nullptr), "launching a kernel");
  }

  // Nothing can be ordered across the edge of a graph's capture; a program that captures must have
  // waited for what came before, as with any other library.
  void order(Stream earlier, Stream later) override {
    const Current here(context_);
    int before = cuda::kCaptureNone, after = cuda::kCaptureNone;
    if (driver().stream_capturing(earlier, &before) != cuda::kSuccess) return;
    if (driver().stream_capturing(later, &after) != cuda::kSuccess || before != after) return;
    std::lock_guard<std::mutex> hold(ordering_);
    check(driver().event_record(event_, earlier), "recording an event");
    check(driver().stream_wait(later, event_, 0), "waiting for an event");
  }

  bool idle(Stream stream) override {
    const Current here(context_);
    int capture = cuda::kCaptureNone;  // of a stream that captures nothing must be asked
    if (driver().stream_capturing(stream, &capture) != cuda::kSuccess) return true;
    return capture != cuda::kCaptureNone || driver().stream_query(stream) != cuda::kNotReady;
  }

 private:
  // A thread that has made no call of CUDA's runtime yet has no context.
  class Current {
   public:
    explicit Current(void* wanted) : wanted_(wanted) {
      check(driver().context_current(&before_), "asking for the context");
      if (before_ != wanted_) check(driver().context_set(wanted_), "setting the context");
    }
    ~Current() {
      if (before_ != wanted_) driver().context_set(before_);
    }

   private:
    void* const wanted_;
    void* before_ = nullptr;
  };

  // Of all devices of the process. Never destroyed: kernels may still run when it ends.
  struct Opened {
    char* at = nullptr;
    int users = 0;
  };
  static std::map<std::pair<void*, std::string>, Opened>& opened() {
    static auto* const it = new std::map<std::pair<void*, std::string>, Opened>;
    return *it;
  }
  static std::mutex& opened_mutex() {
    static auto* const it = new std::mutex;
    return *it;
  }

  std::mutex ordering_;
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
