#include "pipe.h"

namespace fsccl {

size_t Ring::bytes(size_t slot_bytes) { return kWords + kSlots * slot_bytes; }

Ring::Ring(Segment segment, size_t slot_bytes, Tracks& tracks)
    : segment_(std::move(segment)), slot_bytes_(slot_bytes) {
  adopted_ = tracks.adopt(segment_.data(), segment_.bytes());
}

Word& Ring::word(size_t i) const {
  return *reinterpret_cast<Word*>(segment_.data() + i * 2 * kCacheLine);
}

std::byte* Ring::slot(uint32_t n) const {
  return segment_.data() + kWords + static_cast<size_t>(n % kSlots) * slot_bytes_;
}

at::Tensor Pipe::slot_tensor(size_t bytes) const {
  return at::from_blob(ring_->slot(count_), {static_cast<int64_t>(bytes)}, at::kByte);
}

void Pipe::put(Tracks& tracks, const at::Tensor& bytes) {
  if (count_ >= Ring::kSlots) {
    tracks.await(Track::kOut, ring_->taken(), count_ + 1 - Ring::kSlots, peer_);
  }
  {
    const OnTrack out(tracks, Track::kOut);
    slot_tensor(bytes.nbytes()).copy_(bytes, /*non_blocking=*/true);
  }
  if (!tracks.stream(Track::kOut)) {  // a device fills the slot later, when it may not be free yet
    ring_->size(count_).store(static_cast<uint32_t>(bytes.nbytes()), std::memory_order_relaxed);
  }
  tracks.signal(Track::kOut, ring_->posted(), ++count_);
  if (courier_ != nullptr) courier_->send(peer_, ring_, count_ - 1, bytes.nbytes());
}

void Pipe::check_size(size_t expected) const {
  const size_t found = ring_->size(count_).load(std::memory_order_relaxed);
  if (found == expected || found == kUntold) return;
  throw Error(Fault::kMismatch, peer_,
              name_ + " sends " + std::to_string(found) + " bytes where this rank expects " +
                  std::to_string(expected));
}

void Pipe::take(Tracks& tracks, const at::Tensor& bytes) {
  if (courier_ != nullptr) courier_->receive(peer_, ring_, count_, bytes.nbytes());
  tracks.await(Track::kIn, ring_->posted(), count_ + 1, peer_);
  // A device takes later than this, when the sender may have written of other messages.
  if (shared() && !tracks.stream(Track::kIn)) check_size(bytes.nbytes());
  {
    const OnTrack in(tracks, Track::kIn);
    bytes.copy_(slot_tensor(bytes.nbytes()), /*non_blocking=*/true);
  }
  tracks.signal(Track::kIn, ring_->taken(), ++count_);
}

}  // namespace fsccl
