// Where the steps of an engine's operations run.
//
// An operation is a straight program of steps: native collectives, copies between the device and
// host memory, sums, and words of memory that are set and waited for. Each step is put on one of
// three tracks. A track keeps its order; marks order steps of different tracks.
//
// On CUDA a track is a stream and a step is enqueued: the program runs through in the caller's
// thread without waiting for anything, and the device does the steps later. Setting a word and
// waiting for one are stream operations too, so that no thread of the host takes part in moving
// data. On the CPU every step is done before the call returns, in the order of the program, and
// marks mean nothing. Programs are written so that this order never blocks two ranks on each
// other: a rank sets what its peers wait for before it waits for them.
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

enum class Track {
  kNative,  // native collectives; the operation begins and ends here
  kOut,     // from the device to host memory
  kIn,      // from host memory to the device, and sums
};

using Mark = std::shared_ptr<c10::Event>;

class Tracks {
 public:
  virtual ~Tracks() = default;

  virtual at::Device device() const = 0;
  // The track as a stream of the device; none where steps are done at once.
  virtual std::optional<c10::Stream> stream(Track t) const = 0;

  virtual Mark mark(Track t) = 0;
  virtual void wait(Track t, const Mark& mark) = 0;

  // What was put on the track before is visible to whoever sees the word at `value` or beyond.
  virtual void signal(Track t, Word& word, uint32_t value) = 0;
  // What comes next on the track waits until the word, which `peer` sets, has reached `value`.
  virtual void await(Track t, Word& word, uint32_t value, int peer) = 0;

  // Host memory that copies and words lie in, for as long as the handle lives; and where the device
  // sees what lies in it.
  virtual std::shared_ptr<void> adopt(std::byte* memory, size_t bytes) = 0;
  virtual char* seen_by_device(std::byte* at) const = 0;

  // The other tracks begin after, and end before, what kNative does.
  void fork() {
    const Mark here = mark(Track::kNative);
    wait(Track::kOut, here);
    wait(Track::kIn, here);
  }
  void join() {
    wait(Track::kNative, mark(Track::kOut));
    wait(Track::kNative, mark(Track::kIn));
  }
};

// Makes a track the current stream.
class OnTrack {
 public:
  OnTrack(const Tracks& tracks, Track t) {
    if (const auto stream = tracks.stream(t)) guard_.emplace(*stream);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

inline bool reached(const Word& word, uint32_t value) {
  return static_cast<int32_t>(word.load(std::memory_order_acquire) - value) >= 0;
}

inline void set_word(Word& word, uint32_t value) {
  word.store(value, std::memory_order_release);
  futex_wake_all(word);
}

// Steps in the calling thread.
class HostTracks : public Tracks {
 public:
  // `look` is called ten times a second while a word is awaited, and throws to end the wait; at its
  // end it is called once more, with -1.
  HostTracks(SpinPolicy spin, std::function<void(int peer)> look)
      : spin_(spin), look_(std::move(look)) {}

  at::Device device() const override { return at::kCPU; }
  std::optional<c10::Stream> stream(Track) const override { return std::nullopt; }
  Mark mark(Track) override { return nullptr; }
  void wait(Track, const Mark&) override {}
  void signal(Track, Word& word, uint32_t value) override { set_word(word, value); }
  void await(Track t, Word& word, uint32_t value, int peer) override;
  std::shared_ptr<void> adopt(std::byte*, size_t) override { return nullptr; }
  char* seen_by_device(std::byte* at) const override { return reinterpret_cast<char*>(at); }

 private:
  SpinPolicy spin_;
  std::function<void(int)> look_;
};

}  // namespace fsccl
