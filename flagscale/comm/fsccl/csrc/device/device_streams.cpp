#include "device_streams.h"

#include <utility>

namespace fsccl {
namespace {

// Returns torch's native handle (CUstream) of a stream. torch 2.11 may lack getStreamNativeHandle;
// then the second overload is chosen, so that fsccl still compiles for CPUs.
template <class Guard>
auto native_handle(const Guard& guard, const c10::Stream& s, int)
    -> decltype(guard.getStreamNativeHandle(s)) {
  return guard.getStreamNativeHandle(s);
}
template <class Guard>
void* native_handle(const Guard&, const c10::Stream&, long) {
  throw Error(Fault::kSystem, -1,
              "this torch does not provide a stream's handle; a newer one does");
}

}  // namespace

DeviceStreams::DeviceStreams(at::Device device)
    : device_(device), guard_(device.type()), driver_(cuda::driver()) {
  for (int s = 0; s < 3; ++s) {
    streams_.push_back(guard_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true));
  }
  record_on(current());  // makes the device's context current, as calls of the driver require
}

void* DeviceStreams::handle(StreamId s) const { return native_handle(guard_, *stream(s), 0); }

StreamEvent DeviceStreams::record_on(const c10::Stream& stream) const {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(stream);
  return event;
}

bool is_capturing(const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  int status = cuda::kCaptureNone;
  cuda::check(cuda::driver().stream_capturing(native_handle(guard, stream, 0), &status),
              "cannot query whether a stream is captured");
  return status != cuda::kCaptureNone;
}

cuda::DevicePointer DeviceStreams::address_of(const std::byte* host) const {
  for (const RegisteredMemory& r : registered_) {
    if (host >= r.memory && host < r.memory + r.bytes) {
      return r.address + static_cast<cuda::DevicePointer>(host - r.memory);
    }
  }
  throw Error(Fault::kSystem, -1, "host memory is not registered with the device");
}

void DeviceStreams::write_word(StreamId s, Word& word, uint32_t value) {
  const auto address = address_of(reinterpret_cast<const std::byte*>(&word));
  cuda::check(driver_.stream_write_value(handle(s), address, value, cuda::kWriteWithBarrier),
              "cannot set a word of a stream");
}

void DeviceStreams::wait_word(StreamId s, Word& word, uint32_t value, int peer) {
  const auto address = address_of(reinterpret_cast<const std::byte*>(&word));
  cuda::check(driver_.stream_wait_value(handle(s), address, value, cuda::kWaitGreaterOrEqual),
              "cannot make a stream wait for a word");
  word_waits_.push_back({&word, value, peer});
}

std::shared_ptr<void> DeviceStreams::register_host_memory(std::byte* memory, size_t bytes) {
  cuda::check(driver_.host_register(memory, bytes, cuda::kHostPortableMapped),
              "cannot register shared memory with the GPU");
  cuda::DevicePointer address = 0;
  cuda::check(driver_.host_pointer(&address, memory, 0), "shared memory has no address on the GPU");
  registered_.push_back({memory, bytes, address});
  return std::shared_ptr<void>(
      memory, [](void* registered) { cuda::driver().host_unregister(registered); });
}

char* DeviceStreams::device_address(std::byte* host) const {
  return reinterpret_cast<char*>(address_of(host));
}

std::vector<WordWait> DeviceStreams::take_word_waits() { return std::exchange(word_waits_, {}); }

}  // namespace fsccl
