#include "nvml.h"

#include <dlfcn.h>

namespace fsccl {
namespace nvlink {
namespace {

// Declarations of NVIDIA's <nvml.h>, which need not be installed.
using Handle = void*;
constexpr int kSuccess = 0;
constexpr int kP2pCapabilityNvlink = 2;  // NVML_P2P_CAPS_INDEX_NVLINK
constexpr int kStatusOk = 0;             // NVML_P2P_STATUS_OK

struct Nvml {
  int (*init)() = nullptr;
  int (*get_handle_by_uuid)(const char*, Handle*) = nullptr;
  int (*get_p2p_status)(Handle, Handle, int, int*) = nullptr;
  bool is_ready = false;
};

template <typename F>
bool look_up(void* library, const char* symbol, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, symbol));
  return *function != nullptr;
}

const Nvml& nvml() {
  static const Nvml loaded = [] {
    Nvml n;
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    n.is_ready = library != nullptr && look_up(library, "nvmlInit_v2", &n.init) &&
                 look_up(library, "nvmlDeviceGetHandleByUUID", &n.get_handle_by_uuid) &&
                 look_up(library, "nvmlDeviceGetP2PStatus", &n.get_p2p_status) &&
                 n.init() == kSuccess;
    return n;
  }();
  return loaded;
}

}  // namespace

std::string nvml_uuid_of(const std::string& identity) {
  static const char kHexDigits[] = "0123456789abcdef";
  std::string name = "GPU";
  for (size_t i = 0; i < identity.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    const auto byte = static_cast<unsigned char>(identity[i]);
    name += kHexDigits[byte >> 4];
    name += kHexDigits[byte & 15];
  }
  return name;
}

Link query_link(const std::string& first_identity, const std::string& second_identity) {
  const Nvml& n = nvml();
  Handle first_gpu = nullptr, second_gpu = nullptr;
  int status = 0;
  if (!n.is_ready ||
      n.get_handle_by_uuid(nvml_uuid_of(first_identity).c_str(), &first_gpu) != kSuccess ||
      n.get_handle_by_uuid(nvml_uuid_of(second_identity).c_str(), &second_gpu) != kSuccess ||
      n.get_p2p_status(first_gpu, second_gpu, kP2pCapabilityNvlink, &status) != kSuccess) {
    return Link::kUnknown;
  }
  return status == kStatusOk ? Link::kNvlink : Link::kOther;
}

}  // namespace nvlink
}  // namespace fsccl
