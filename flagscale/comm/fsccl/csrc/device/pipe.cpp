#include "pipe.h"

namespace fsccl {

size_t Ring::bytes(size_t slot_bytes) { return kHeaderBytes + kSlots * slot_bytes; }

Ring::Ring(Segment segment, size_t slot_bytes, Streams& streams)
    : segment_(std::move(segment)), slot_bytes_(slot_bytes) {
  registration_ = streams.register_host_memory(segment_.data(), segment_.bytes());
}

// A word has two cache lines of its own, because processors fetch lines in pairs.
Word& Ring::word(size_t i) const {
  return *reinterpret_cast<Word*>(segment_.data() + i * 2 * kCacheLine);
}

std::byte* Ring::slot(uint32_t n) const {
  return segment_.data() + kHeaderBytes + static_cast<size_t>(n % kSlots) * slot_bytes_;
}

at::Tensor Pipe::slot_tensor(size_t bytes) const {
  return at::from_blob(ring_->slot(message_count_), {static_cast<int64_t>(bytes)}, at::kByte);
}

void Pipe::send(Streams& streams, const at::Tensor& bytes) {
  if (message_count_ >= Ring::kSlots) {
    streams.wait_word(StreamId::kToHost, ring_->consumed(), message_count_ + 1 - Ring::kSlots,
                      peer_);
  }
  {
    const StreamScope to_host(streams, StreamId::kToHost);
    slot_tensor(bytes.nbytes()).copy_(bytes, /*non_blocking=*/true);
  }
  // Not for a device, which fills the slot later: the slot may still contain an earlier message.
  if (!streams.stream(StreamId::kToHost)) {
    ring_->message_bytes(message_count_)
        .store(static_cast<uint32_t>(bytes.nbytes()), std::memory_order_relaxed);
  }
  streams.write_word(StreamId::kToHost, ring_->posted(), ++message_count_);
  if (proxy_ != nullptr) proxy_->send(peer_, ring_, message_count_ - 1, bytes.nbytes());
}

void Pipe::check_size(size_t expected) const {
  const size_t actual = ring_->message_bytes(message_count_).load(std::memory_order_relaxed);
  if (actual == expected || actual == kUnknownSize) return;
  throw Error(Fault::kMismatch, peer_,
              peer_name_ + " sends " + std::to_string(actual) + " bytes where this rank expects " +
                  std::to_string(expected));
}

void Pipe::receive(Streams& streams, const at::Tensor& bytes) {
  if (proxy_ != nullptr) proxy_->receive(peer_, ring_, message_count_, bytes.nbytes());
  streams.wait_word(StreamId::kFromHost, ring_->posted(), message_count_ + 1, peer_);
  // Not for a device, which receives later: the sender may not have written the size yet.
  if (shared() && !streams.stream(StreamId::kFromHost)) check_size(bytes.nbytes());
  {
    const StreamScope from_host(streams, StreamId::kFromHost);
    bytes.copy_(slot_tensor(bytes.nbytes()), /*non_blocking=*/true);
  }
  streams.write_word(StreamId::kFromHost, ring_->consumed(), ++message_count_);
}

}  // namespace fsccl
