#include "nvml.h"

#include <dlfcn.h>

namespace fsccl {
namespace nvlink {
namespace {

// Declarations of nvml.h, which need not be installed.
using Handle = void*;
constexpr int kSuccess = 0;
constexpr int kOverNvlink = 2;  // NVML_P2P_CAPS_INDEX_NVLINK
constexpr int kStatusOk = 0;    // NVML_P2P_STATUS_OK

struct Nvml {
  int (*init)() = nullptr;
  int (*find)(const char*, Handle*) = nullptr;
  int (*pair)(Handle, Handle, int, int*) = nullptr;
  bool ready = false;
};

template <typename F>
bool look_up(void* library, const char* symbol, F* found) {
  *found = reinterpret_cast<F>(dlsym(library, symbol));
  return *found != nullptr;
}

const Nvml& nvml() {
  static const Nvml loaded = [] {
    Nvml n;
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    n.ready = library != nullptr && look_up(library, "nvmlInit_v2", &n.init) &&
              look_up(library, "nvmlDeviceGetHandleByUUID", &n.find) &&
              look_up(library, "nvmlDeviceGetP2PStatus", &n.pair) && n.init() == kSuccess;
    return n;
  }();
  return loaded;
}

}  // namespace

std::string name_of(const std::string& identity) {
  static const char digits[] = "0123456789abcdef";
  std::string name = "GPU";
  for (size_t i = 0; i < identity.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    const auto byte = static_cast<unsigned char>(identity[i]);
    name += digits[byte >> 4];
    name += digits[byte & 15];
  }
  return name;
}

Link query_link(const std::string& one, const std::string& other) {
  const Nvml& n = nvml();
  Handle first = nullptr, second = nullptr;
  int status = 0;
  if (!n.ready || n.find(name_of(one).c_str(), &first) != kSuccess ||
      n.find(name_of(other).c_str(), &second) != kSuccess ||
      n.pair(first, second, kOverNvlink, &status) != kSuccess) {
    return Link::kUnknown;
  }
  return status == kStatusOk ? Link::kNvlink : Link::kOther;
}

}  // namespace nvlink
}  // namespace fsccl
