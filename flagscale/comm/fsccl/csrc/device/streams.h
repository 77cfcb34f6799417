// The three streams on which the steps of the device engine's operations (engine.h) run.
//
// An operation is a sequence of steps: collectives of the native library, copies between the device
// and host memory, reductions, and writes of and waits for words (32-bit counters in shared
// memory). Each step is put on one of three streams. Steps of one stream run in order; events order
// steps of different streams.
//
// On CUDA these are streams of the device, on which steps are enqueued: the caller's thread
// enqueues all steps without waiting, and the device runs them later. Writing a word and waiting
// for one are stream operations, too, so that no host thread takes part in the transfer of data. On
// the CPU each step is run before the call returns, and events have no effect. Operations are
// written such that this order never makes two ranks wait for each other: a rank writes the words
// for which its peers wait before it waits for theirs.
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
  kNative,    // collectives of the native library; an operation begins and ends on this stream
  kToHost,    // copies from the device to host memory
  kFromHost,  // copies from host memory to the device, and reductions
};

// A point on a stream; null on the CPU.
using StreamEvent = std::shared_ptr<c10::Event>;

// Called by one thread at a time. Methods throw Error(kSystem) if the device refuses a step.
class Streams {
 public:
  virtual ~Streams() = default;

  virtual at::Device device() const = 0;
  // The stream of the device; none on the CPU.
  virtual std::optional<c10::Stream> stream(StreamId s) const = 0;

  virtual StreamEvent record(StreamId s) = 0;
  virtual void wait_event(StreamId s, const StreamEvent& event) = 0;

  // Sets the word to `value` after all earlier steps of the stream, whose writes are visible to a
  // reader that finds the word at `value` or beyond.
  virtual void write_word(StreamId s, Word& word, uint32_t value) = 0;
  // Makes the next step of the stream wait until the word, which `peer` writes, has reached
  // `value`.
  virtual void wait_word(StreamId s, Word& word, uint32_t value, int peer) = 0;

  // Lets the device access host memory that contains words and copied data, until the returned
  // handle is destroyed.
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

// Returns whether a word has reached a value. Words only grow, and wrap, so that is the case if the
// word is less than 2^31 beyond the value.
inline bool has_reached(const Word& word, uint32_t value) {
  return static_cast<int32_t>(word.load(std::memory_order_acquire) - value) >= 0;
}

// Writes a word from the host, and wakes threads that sleep on it (futex).
inline void store_and_wake(Word& word, uint32_t value) {
  word.store(value, std::memory_order_release);
  futex_wake_all(word);
}

// Streams of ranks on CPUs: each step runs in the calling thread.
class HostStreams : public Streams {
 public:
  // During a wait for a word, check_wait(peer) is called ten times a second and may throw to end
  // the wait. If it was called, check_wait(-1) is called after the wait.
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
