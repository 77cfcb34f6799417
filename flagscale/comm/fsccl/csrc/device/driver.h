// The few calls of the CUDA driver that torch's device-generic interface lacks, found in the driver
// when they are first needed: the extension is built without CUDA's headers and links nothing of
// it.
//
// Signatures are those of cuda.h (CUDA 11.7 and newer): CUresult is an int, CUstream a pointer,
// CUdeviceptr a 64-bit number, flags are unsigned.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsccl {

class Driver {
 public:
  // Throws Error(kSystem) where there is no driver, or one without these calls.
  static const Driver& get();

  // Host memory that the device reads and writes itself, from any context of this process.
  void add_host(void* memory, size_t bytes) const;
  void remove_host(void* memory) const noexcept;
  // Where the device sees it.
  uint64_t device_address(const void* memory) const;

  // Stream operations: set a word after, and with all memory of, what came before; hold what comes
  // after until the signed difference of the word and `value` is not negative.
  void write_word(void* stream, uint64_t address, uint32_t value) const;
  void wait_word(void* stream, uint64_t address, uint32_t value) const;

  bool is_capturing(void* stream) const;
  // Lets this thread call the driver while another captures a graph.
  void allow_while_capturing() const noexcept;

 private:
  using Result = int;
  Driver();
  template <class F>
  void find(void* library, const char* name, F* out);
  void check(Result code, const char* what) const;

  Result (*mem_host_register_)(void*, size_t, unsigned) = nullptr;
  Result (*mem_host_unregister_)(void*) = nullptr;
  Result (*mem_host_get_device_pointer_)(unsigned long long*, void*, unsigned) = nullptr;
  Result (*stream_write_value_)(void*, unsigned long long, uint32_t, unsigned) = nullptr;
  Result (*stream_wait_value_)(void*, unsigned long long, uint32_t, unsigned) = nullptr;
  Result (*stream_is_capturing_)(void*, int*) = nullptr;
  Result (*thread_exchange_capture_mode_)(int*) = nullptr;
  Result (*get_error_string_)(Result, const char**) = nullptr;
};

}  // namespace fsccl
