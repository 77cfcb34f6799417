#include "stream_tracks.h"

#include <utility>

namespace fsccl {
namespace {

// torch 2.11 may lack it, and what lacks it must still compile for the CPU.
template <class Guard>
auto native_handle(const Guard& guard, const c10::Stream& s, int)
    -> decltype(guard.getStreamNativeHandle(s)) {
  return guard.getStreamNativeHandle(s);
}
template <class Guard>
void* native_handle(const Guard&, const c10::Stream&, long) {
  throw Error(Fault::kSystem, -1, "this torch does not tell a stream's handle; a newer one does");
}

}  // namespace

StreamTracks::StreamTracks(at::Device device)
    : device_(device), guard_(device.type()), driver_(cuda::driver()) {
  for (int t = 0; t < 3; ++t) {
    streams_.push_back(guard_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true));
  }
  mark_of(current());  // makes the device's context this thread's, which the driver asks for
}

void* StreamTracks::handle(Track t) const { return native_handle(guard_, *stream(t), 0); }

Mark StreamTracks::mark_of(const c10::Stream& stream) const {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(stream);
  return event;
}

bool is_capturing(const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  int status = cuda::kCaptureNone;
  cuda::check(cuda::driver().stream_capturing(native_handle(guard, stream, 0), &status),
              "cannot ask a stream whether it is captured");
  return status != cuda::kCaptureNone;
}

cuda::DevicePointer StreamTracks::address_of(const std::byte* at) const {
  for (const Adopted& a : adopted_) {
    if (at >= a.memory && at < a.memory + a.bytes) {
      return a.address + static_cast<cuda::DevicePointer>(at - a.memory);
    }
  }
  throw Error(Fault::kSystem, -1, "host memory that the device does not see");
}

void StreamTracks::signal(Track t, Word& word, uint32_t value) {
  const auto at = address_of(reinterpret_cast<const std::byte*>(&word));
  cuda::check(driver_.stream_write(handle(t), at, value, cuda::kWriteWithBarrier),
              "cannot set a word of a stream");
}

void StreamTracks::await(Track t, Word& word, uint32_t value, int peer) {
  const auto at = address_of(reinterpret_cast<const std::byte*>(&word));
  cuda::check(driver_.stream_await(handle(t), at, value, cuda::kWaitGreaterOrEqual),
              "cannot have a stream wait for a word");
  awaited_.push_back({&word, value, peer});
}

std::shared_ptr<void> StreamTracks::adopt(std::byte* memory, size_t bytes) {
  cuda::check(driver_.host_register(memory, bytes, cuda::kHostPortableMapped),
              "cannot make shared memory known to the GPU");
  cuda::DevicePointer address = 0;
  cuda::check(driver_.host_pointer(&address, memory, 0), "shared memory has no address on the GPU");
  adopted_.push_back({memory, bytes, address});
  return std::shared_ptr<void>(memory, [](void* at) { cuda::driver().host_unregister(at); });
}

char* StreamTracks::seen_by_device(std::byte* at) const {
  return reinterpret_cast<char*>(address_of(at));
}

std::vector<Awaited> StreamTracks::take_awaited() { return std::exchange(awaited_, {}); }

}  // namespace fsccl
