#include "driver.h"

#include <dlfcn.h>

#include <string>

#include "../core/types.h"

namespace fsccl {
namespace cuda {

const Driver& driver() {
  static const Driver loaded = [] {
    Driver d;
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      throw Error(Fault::kSystem, -1, std::string("no CUDA driver: ") + dlerror());
    }
#define FSCCL_FIND(member, symbol, parameters)                                         \
  d.member = reinterpret_cast<decltype(d.member)>(dlsym(library, symbol));             \
  if (d.member == nullptr) {                                                           \
    throw Error(Fault::kSystem, -1, "the CUDA driver is too old: it has no " symbol);  \
  }
    FSCCL_CUDA_FUNCTIONS(FSCCL_FIND)
#undef FSCCL_FIND
    return d;
  }();
  return loaded;
}

void check(Result result, const char* what) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  driver().error_string(result, &text);
  throw Error(Fault::kSystem, -1,
              std::string(what) + ": " + (text != nullptr ? text : "unknown error") + " (CUDA " +
                  std::to_string(result) + ")");
}

}  // namespace cuda
}  // namespace fsccl
