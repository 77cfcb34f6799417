// A pipe carries bytes from the device of one rank to the device of another, through host memory.
//
// It is a ring of slots and two words that only grow: `posted`, how many slots the sender has
// filled, and `taken`, how many the receiver has emptied. Putting a message of at most a slot is
//
//   await taken >= n+1-kSlots;  copy device -> slot n % kSlots;  signal posted = n+1
//
// on the track kOut, and taking it
//
//   await posted >= n+1;  copy slot n % kSlots -> device;  signal taken = n+1
//
// on kIn. Between ranks that share memory both ends map one ring, which the devices read and write
// directly: no byte is copied by a processor, and on CUDA no thread waits. Between others each end
// has a ring of its own, and couriers carry messages from one to the other (courier.h).
//
// A program may put at most kSlots messages before it takes the one that the same peer sent at the
// same place of its own program; then no ring is ever full where a rank that would empty it waits.
#pragma once

#include <memory>
#include <string>

#include "../core/segment.h"
#include "courier.h"
#include "tracks.h"

namespace fsccl {

class Ring {
 public:
  static constexpr uint32_t kSlots = 4;
  static size_t bytes(size_t slot_bytes);

  Ring(Segment segment, size_t slot_bytes, Tracks& tracks);

  Word& posted() const { return word(0); }
  Word& taken() const { return word(1); }
  Word& opened() const { return word(2); }                       // the receiver has mapped it
  // Of a slot's message, where steps are done at once; devices leave it at zero.
  Word& size(uint32_t n) const { return word(3 + n % kSlots); }
  std::byte* slot(uint32_t n) const;
  const Segment& segment() const { return segment_; }

 private:
  static constexpr size_t kWords = 4096;  // slots begin on a page
  Word& word(size_t i) const;

  Segment segment_;
  size_t slot_bytes_;
  std::shared_ptr<void> adopted_;
};

// One end of a pipe; `courier` is null where both ends share the ring.
class Pipe {
 public:
  // `name` is the peer's, for messages.
  Pipe(int peer, std::string name, std::shared_ptr<Ring> ring, Courier* courier)
      : peer_(peer), name_(std::move(name)), ring_(std::move(ring)), courier_(courier) {}

  // `bytes`: flat uint8 on the tracks' device, at most a slot. Where both ends do steps at once, a
  // size that is not the one put throws Error(kMismatch).
  void put(Tracks& tracks, const at::Tensor& bytes);
  void take(Tracks& tracks, const at::Tensor& bytes);

  const Ring& ring() const { return *ring_; }
  bool shared() const { return courier_ == nullptr; }

 private:
  at::Tensor slot_tensor(size_t bytes) const;

  static constexpr size_t kUntold = 0;
  void check_size(size_t expected) const;

  int peer_;
  std::string name_;
  std::shared_ptr<Ring> ring_;
  Courier* courier_;
  uint32_t count_ = 0;  // messages put, or taken, so far
};

}  // namespace fsccl
