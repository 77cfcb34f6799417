#include "driver.h"

#include <dlfcn.h>

#include <string>

#include "../core/types.h"

namespace fsccl {
namespace {

constexpr unsigned kPortable = 1, kDeviceMap = 2;  // CU_MEMHOSTREGISTER_*
constexpr unsigned kGreaterOrEqual = 0;            // CU_STREAM_WAIT_VALUE_GEQ
constexpr unsigned kWithBarrier = 0;               // CU_STREAM_WRITE_VALUE_DEFAULT
constexpr int kRelaxed = 2;                        // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kNotCapturing = 0;                   // CU_STREAM_CAPTURE_STATUS_NONE

}  // namespace

const Driver& Driver::get() {
  static const Driver it;
  return it;
}

Driver::Driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    throw Error(Fault::kSystem, -1, std::string("no CUDA driver: ") + dlerror());
  }
  find(library, "cuMemHostRegister_v2", &mem_host_register_);
  find(library, "cuMemHostUnregister", &mem_host_unregister_);
  find(library, "cuMemHostGetDevicePointer_v2", &mem_host_get_device_pointer_);
  find(library, "cuStreamWriteValue32_v2", &stream_write_value_);
  find(library, "cuStreamWaitValue32_v2", &stream_wait_value_);
  find(library, "cuStreamIsCapturing", &stream_is_capturing_);
  find(library, "cuThreadExchangeStreamCaptureMode", &thread_exchange_capture_mode_);
  find(library, "cuGetErrorString", &get_error_string_);
}

template <class F>
void Driver::find(void* library, const char* name, F* out) {
  *out = reinterpret_cast<F>(dlsym(library, name));
  if (*out == nullptr) {
    throw Error(Fault::kSystem, -1,
                std::string("the CUDA driver has no ") + name + ": it is older than CUDA 11.7");
  }
}

void Driver::check(Result code, const char* what) const {
  if (code == 0) return;
  const char* text = nullptr;
  get_error_string_(code, &text);
  throw Error(Fault::kSystem, -1,
              std::string(what) + ": " + (text != nullptr ? text : "unknown error") + " (CUDA " +
                  std::to_string(code) + ")");
}

void Driver::add_host(void* memory, size_t bytes) const {
  check(mem_host_register_(memory, bytes, kPortable | kDeviceMap),
        "cannot make shared memory known to the GPU");
}

void Driver::remove_host(void* memory) const noexcept { mem_host_unregister_(memory); }

uint64_t Driver::device_address(const void* memory) const {
  unsigned long long out = 0;
  check(mem_host_get_device_pointer_(&out, const_cast<void*>(memory), 0),
        "shared memory has no address on the GPU");
  return out;
}

void Driver::write_word(void* stream, uint64_t address, uint32_t value) const {
  check(stream_write_value_(stream, address, value, kWithBarrier), "cannot set a word of a stream");
}

void Driver::wait_word(void* stream, uint64_t address, uint32_t value) const {
  check(stream_wait_value_(stream, address, value, kGreaterOrEqual),
        "cannot have a stream wait for a word");
}

bool Driver::is_capturing(void* stream) const {
  int status = 0;
  check(stream_is_capturing_(stream, &status), "cannot ask a stream whether it is captured");
  return status != kNotCapturing;
}

void Driver::allow_while_capturing() const noexcept {
  int mode = kRelaxed;
  thread_exchange_capture_mode_(&mode);
}

}  // namespace fsccl
