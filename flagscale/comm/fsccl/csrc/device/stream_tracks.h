// Tracks on a device with streams: every step is enqueued, by torch's device-generic interface and
// a few calls of the CUDA driver.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

#include "../cuda/driver.h"
#include "tracks.h"

namespace fsccl {

// A word that a stream has been told to wait for.
struct Awaited {
  Word* word;
  uint32_t value;
  int peer;
};

class StreamTracks : public Tracks {
 public:
  explicit StreamTracks(at::Device device);

  at::Device device() const override { return device_; }
  std::optional<c10::Stream> stream(Track t) const override {
    return streams_[static_cast<size_t>(t)];
  }
  Mark mark(Track t) override { return mark_of(*stream(t)); }
  void wait(Track t, const Mark& mark) override { mark->block(*stream(t)); }
  void signal(Track t, Word& word, uint32_t value) override;
  void await(Track t, Word& word, uint32_t value, int peer) override;
  std::shared_ptr<void> adopt(std::byte* memory, size_t bytes) override;
  char* seen_by_device(std::byte* at) const override;

  // What streams have been told to await since the last call.
  std::vector<Awaited> take_awaited();
  c10::Stream current() const { return guard_.getStream(device_); }
  Mark mark_of(const c10::Stream& stream) const;

 private:
  // Host memory that the device knows, and where it sees it.
  struct Adopted {
    const std::byte* memory;
    size_t bytes;
    cuda::DevicePointer address;
  };

  void* handle(Track t) const;
  cuda::DevicePointer address_of(const std::byte* at) const;

  at::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  const cuda::Driver& driver_;
  std::vector<c10::Stream> streams_;
  std::vector<Adopted> adopted_;
  std::vector<Awaited> awaited_;
};

// Whether what is done on the stream goes into a graph.
bool is_capturing(const c10::Stream& stream);

}  // namespace fsccl
