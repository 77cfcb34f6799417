// The three streams on which the steps of a device engine's operations run.
//
// An operation is a straight program of steps: native collectives, copies between the device and
// host memory, reductions, and words of memory that are written and waited for. Each step is put on
// one of three streams. A stream keeps its order; events order steps of different streams.
//
// On CUDA these are streams of the device and a step is enqueued: the program runs through in the
// caller's thread without waiting for anything, and the device does the steps later. Writing a word
// and waiting for one are stream operations too, so that no thread of the host takes part in moving
// data. On the CPU every step is done before the call returns, in the order of the program, and
// events mean nothing. Programs are written so that this order never blocks two ranks on each
// other: a rank writes the words that its peers wait for before it waits for theirs.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "../core/futex.h"

namespace fsccl {

enum class StreamId {
  kNative,    // native collectives; the operation begins and ends here
  kToHost,    // copies from the device to host memory
  kFromHost,  // copies from host memory to the device, and reductions
};

// A point on a stream; null where steps are done at once.
using StreamEvent = std::shared_ptr<c10::Event>;

// Called by one thread at a time. Methods throw Error(kSystem) if the device refuses a step.
class Streams {
 public:
  virtual ~Streams() = default;

  virtual at::Device device() const = 0;
  // The stream of the device; none where steps are done at once.
  virtual std::optional<c10::Stream> stream(StreamId s) const = 0;

  virtual StreamEvent record(StreamId s) = 0;
  virtual void wait_event(StreamId s, const StreamEvent& event) = 0;

  // Steps enqueued on the stream before are visible to a reader that finds the word at `value` or
  // beyond.
  virtual void write_word(StreamId s, Word& word, uint32_t value) = 0;
  // The next step of the stream waits until the word, which `peer` writes, has reached `value`.
  virtual void wait_word(StreamId s, Word& word, uint32_t value, int peer) = 0;

  // Lets the device access host memory in which copies and words lie, until the handle is released.
  virtual std::shared_ptr<void> register_host_memory(std::byte* memory, size_t bytes) = 0;
  // The device's address of a byte in registered host memory.
  virtual char* device_address(std::byte* host) const = 0;

  // Makes the other two streams begin after, and end before, the steps of kNative.
  void fork() {
    const StreamEvent begin = record(StreamId::kNative);
    wait_event(StreamId::kToHost, begin);
    wait_event(StreamId::kFromHost, begin);
  }
  void join() {
    wait_event(StreamId::kNative, record(StreamId::kToHost));
    wait_event(StreamId::kNative, record(StreamId::kFromHost));
  }
};

// Makes a stream torch's current one for a scope, so that tensor operations are enqueued on it.
class StreamScope {
 public:
  StreamScope(const Streams& streams, StreamId s) {
    if (const auto stream = streams.stream(s)) guard_.emplace(*stream);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

// Words only grow, and wrap: a word has reached a value if it is less than 2^31 beyond it.
inline bool has_reached(const Word& word, uint32_t value) {
  return static_cast<int32_t>(word.load(std::memory_order_acquire) - value) >= 0;
}

// Writes a word on the host, and wakes threads that sleep on it.
inline void store_and_wake(Word& word, uint32_t value) {
  word.store(value, std::memory_order_release);
  futex_wake_all(word);
}

// Streams of ranks on CPUs: each step is done in the calling thread.
class HostStreams : public Streams {
 public:
  // While a word is waited for, check_wait(peer) is called ten times a second and throws to end the
  // wait. After the wait it is called once more, with -1, if it was called at all.
  HostStreams(SpinPolicy spin, std::function<void(int peer)> check_wait)
      : spin_(spin), check_wait_(std::move(check_wait)) {}

  at::Device device() const override { return at::kCPU; }
  std::optional<c10::Stream> stream(StreamId) const override { return std::nullopt; }
  StreamEvent record(StreamId) override { return nullptr; }
  void wait_event(StreamId, const StreamEvent&) override {}
  void write_word(StreamId, Word& word, uint32_t value) override { store_and_wake(word, value); }
  void wait_word(StreamId s, Word& word, uint32_t value, int peer) override;
  std::shared_ptr<void> register_host_memory(std::byte*, size_t) override { return nullptr; }
  char* device_address(std::byte* host) const override { return reinterpret_cast<char*>(host); }

 private:
  SpinPolicy spin_;
  std::function<void(int)> check_wait_;
};

}  // namespace fsccl
