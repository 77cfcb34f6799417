// Streams of a CUDA device (streams.h): every step is enqueued, by torch's device-generic interface
// and a few calls of the CUDA driver.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

#include "../cuda/driver.h"
#include "streams.h"

namespace fsccl {

// A wait that has been enqueued on a stream: until `word` has reached `value`.
struct WordWait {
  Word* word;
  uint32_t value;
  int peer;  // the rank that writes the word
};

class DeviceStreams : public Streams {
 public:
  explicit DeviceStreams(at::Device device);

  at::Device device() const override { return device_; }
  std::optional<c10::Stream> stream(StreamId s) const override {
    return streams_[static_cast<size_t>(s)];
  }
  StreamEvent record(StreamId s) override { return record_on(*stream(s)); }
  void wait_event(StreamId s, const StreamEvent& event) override { event->block(*stream(s)); }
  void write_word(StreamId s, Word& word, uint32_t value) override;
  void wait_word(StreamId s, Word& word, uint32_t value, int peer) override;
  std::shared_ptr<void> register_host_memory(std::byte* memory, size_t bytes) override;
  char* device_address(std::byte* host) const override;

  // Returns the waits that were enqueued since the last call of this method.
  std::vector<WordWait> take_word_waits();
  c10::Stream current() const { return guard_.getStream(device_); }
  StreamEvent record_on(const c10::Stream& stream) const;

 private:
  struct RegisteredMemory {
    const std::byte* memory;
    size_t bytes;
    cuda::DevicePointer address;  // on the device
  };

  void* handle(StreamId s) const;
  cuda::DevicePointer address_of(const std::byte* host) const;

  at::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  const cuda::Driver& driver_;
  std::vector<c10::Stream> streams_;
  std::vector<RegisteredMemory> registered_;
  std::vector<WordWait> word_waits_;
};

// Returns whether operations on the stream are being captured into a graph.
bool is_capturing(const c10::Stream& stream);

}  // namespace fsccl
