// Pipe: transfers bytes from the device of one rank to the device of another, through host memory.
//
// It is a ring of slots and two words (32-bit counters that only grow): `posted`, the number of
// slots that the sender has filled, and `consumed`, the number that the receiver has emptied.
// Sending message n, which must fit a slot, is
//
//   wait for consumed >= n+1-kSlots;  copy device -> slot n % kSlots;  write posted = n+1
//
// on the stream kToHost, and receiving it
//
//   wait for posted >= n+1;  copy slot n % kSlots -> device;  write consumed = n+1
//
// on kFromHost (streams.h). Between ranks that share memory both ends map the same ring, which the
// devices read and write directly: no processor copies a byte, and on CUDA no thread waits. Between
// other ranks each end has a ring of its own, and proxy threads send messages from one to the other
// (proxy_thread.h).
//
// To avoid a deadlock, an operation may send at most kSlots messages to a peer before it receives
// the corresponding message of the same peer. Then no ring is full while the rank that would empty
// it waits.
#pragma once

#include <memory>
#include <string>

#include "../core/segment.h"
#include "proxy_thread.h"
#include "streams.h"

namespace fsccl {

// The shared memory of a pipe.
class Ring {
 public:
  static constexpr uint32_t kSlots = 4;
  static size_t bytes(size_t slot_bytes);

  Ring(Segment segment, size_t slot_bytes, Streams& streams);

  Word& posted() const { return word(0); }
  Word& consumed() const { return word(1); }
  Word& receiver_mapped() const { return word(2); }  // 1: the receiver has mapped the ring
  // Bytes of the message in a slot. Only ranks on CPUs write it; devices leave it at zero.
  Word& message_bytes(uint32_t n) const { return word(3 + n % kSlots); }
  std::byte* slot(uint32_t n) const;
  const Segment& segment() const { return segment_; }

 private:
  static constexpr size_t kHeaderBytes = 4096;  // slots begin on a page
  Word& word(size_t i) const;

  Segment segment_;
  size_t slot_bytes_;
  std::shared_ptr<void> registration_;
};

// One end of a pipe. Used by the thread that runs the engine's operations.
class Pipe {
 public:
  // `peer_name` is for error messages. `proxy` is null if both ends share the ring.
  Pipe(int peer, std::string peer_name, std::shared_ptr<Ring> ring, ProxyThread* proxy)
      : peer_(peer), peer_name_(std::move(peer_name)), ring_(std::move(ring)), proxy_(proxy) {}

  // Sends or receives one message. `bytes`: flat uint8 on the streams' device, at most a slot. If
  // both ends are on CPUs, receiving a message of another size throws Error(kMismatch).
  void send(Streams& streams, const at::Tensor& bytes);
  void receive(Streams& streams, const at::Tensor& bytes);

  const Ring& ring() const { return *ring_; }
  bool shared() const { return proxy_ == nullptr; }

 private:
  at::Tensor slot_tensor(size_t bytes) const;

  static constexpr size_t kUnknownSize = 0;
  void check_size(size_t expected) const;

  int peer_;
  std::string peer_name_;
  std::shared_ptr<Ring> ring_;
  ProxyThread* proxy_;
  uint32_t message_count_ = 0;  // messages sent, or received, so far
};

}  // namespace fsccl
