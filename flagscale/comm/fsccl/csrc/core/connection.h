// One connection of a TcpTransport, and its frames: the wire protocol.
//
// A rank opens connections to a peer when it first sends something to it, or waits for something
// from it. The rank that opened a connection sends messages on it. The other side only sends
// replies on it (kClearToSend, kWaitReply) and control frames (kAbort, kBye).
//
// A frame is a header and, unless `bytes` is 0, a body of that size and a 4-byte trailer, the seal,
// which says whether the body is complete. If the sender fails in the middle of a body, it fills
// the rest with zeros and sends the seal kBroken. So the receiver can parse the frames that follow,
// and discards the body.
//
// Every header carries a message authentication code (MAC). Its key belongs to the connection: it
// is derived from the key of the group and the contents of the hello, which include a random
// number. The MAC covers the number of the frame on its connection and direction. A hello is
// accepted once, so that it cannot be replayed. Bodies are not authenticated.
//
// Frames, and the meaning of header fields in them:
//
//   kHello        first frame of the side that opens a connection: tag = token of the endpoint
//                 (tcp_device.h), message = rank of the sender, offset = index of the connection
//                 among those to this peer, flags = protocol version, total = random number. The
//                 receiver's TcpDevice reads it, and passes it to the transport
//   kMessage      a whole message in one frame
//   kAnnounce     announcement of a message whose body follows in kStripe frames, like the
//                 request-to-send of MPI's rendezvous protocol. With kNeedsClearToSend in `flags`,
//                 the body is not sent before kClearToSend
//   kClearToSend  the receive for the announced message `message` has been posted
//   kStripe       bytes [offset, offset + bytes) of an announced message, on any connection
//   kWaitQuery    query for the rank that the receiver of this frame waits for: tag = number of the
//                 query
//   kWaitReply    reply to kWaitQuery: tag = number of the query, message = that rank, or -1
//   kAbort        the group has failed: tag = rank at fault, body = the error message
//   kBye          the sender leaves the group in an orderly way and has opened `offset` connections
//                 to the receiver
//
// A rank that has left answers a later hello with kAbort or kBye. If it left before it knew the key
// of the group, the key of the connection is derived from its farewell key (transport.h) instead.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "mac.h"
#include "request.h"
#include "socket.h"

namespace fsccl {

enum class FrameKind : uint32_t {
  kHello = 1,
  kMessage,
  kAnnounce,
  kClearToSend,
  kStripe,
  kAbort,
  kBye,
  kWaitQuery,
  kWaitReply,
};
constexpr size_t kMaxReasonBytes = 4000;  // of the error message in kAbort
// Bit of Frame::flags in kAnnounce.
constexpr uint32_t kNeedsClearToSend = 1;

// Header of a frame as it is sent, little-endian. `tag` is that of the message, except as noted
// above.
struct Frame {
  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kHello;
  uint32_t flags = 0;
  uint32_t reserved = 0;
  uint64_t tag = 0;
  uint64_t message = 0;  // number of the message from its sender to its receiver
  uint64_t bytes = 0;    // of the body that follows
  uint64_t offset = 0;
  uint64_t total = 0;  // size of the whole message
  uint64_t mac = 0;
  // Of the operation that the message belongs to; the same on both sides.
  CollectiveFingerprint fingerprint;
  static constexpr uint32_t kMagic = 0x6c636366;  // "fccl" in little-endian order
};
static_assert(sizeof(Frame) == 96, "the layout on the wire");

// Returns the MAC of a header. The side that opened a connection numbers its frames 0, 2, 4, ...,
// the other side 1, 3, 5, ...
inline uint64_t mac_of(const Key& key, Frame f, uint64_t frame_number) {
  f.mac = frame_number;
  return mac_of(key, &f, sizeof f);
}
Key key_of_connection(const Key& group, const Frame& hello);

// Trailer of a body: whether all of its bytes are those of the message.
enum class Seal : uint32_t { kWhole = 0x656c6f77, kBroken = 0x6e6b7262 };
inline size_t body_and_seal_bytes(const Frame& f) {
  return f.bytes == 0 ? 0 : f.bytes + sizeof(Seal);
}

class Connection;

// Callbacks of a connection. They run under the owner's lock, which on_body() may release.
class ConnectionOwner {
 public:
  enum class Decision { kReceiveBody, kStall, kRefuse };
  virtual ~ConnectionOwner() = default;
  // Called when a header has arrived. Returns kReceiveBody after setting `body` to memory of
  // frame.bytes bytes, kStall to be called again after Connection::resume(), or kRefuse to close
  // the connection.
  virtual Decision on_frame(Connection& connection, const Frame& frame, Body* body) = 0;
  // Called when a frame has arrived completely.
  virtual void on_body(Connection& connection, const Frame& frame, LockHold& hold) = 0;
};

// A connection. Any thread may send, one at a time; a single thread receives. The lock of its
// owner, a TcpTransport, guards it.
class Connection {
 public:
  // If the peer opened the connection, its hello has been received and verified. `farewell_key`
  // verifies the answer of a peer that has left without knowing the key of the group.
  Connection(Fd fd, int peer, bool opened_here, const Key& key,
             const std::optional<Key>& farewell_key = std::nullopt)
      : fd_(std::move(fd)),
        peer_(peer),
        opened_here_(opened_here),
        key_(key),
        farewell_key_(farewell_key),
        next_sent_number_(opened_here ? 0 : 1),
        next_received_number_(opened_here ? 1 : 2) {}

  int fd() const { return fd_.get(); }
  int peer() const { return peer_; }
  bool opened_here() const { return opened_here_; }

  void queue(const Frame& frame, Body body = {});
  bool has_output() const { return !send_queue_.empty(); }
  // Returns whether a thread is in flush(). It also sends frames that are queued in the meantime.
  bool sending() const { return sending_; }
  // Returns whether the owner has returned kStall, so that nothing is received until resume().
  bool stalled() const { return stalled_; }
  void resume() { stalled_ = false; }

  // Send queued frames, and receive, without blocking and at most `max_bytes` bytes per call; the
  // next call continues. Both return false once the connection is broken. Both release the lock
  // while they copy.
  bool flush(LockHold& hold, size_t max_bytes);
  bool receive(ConnectionOwner& owner, LockHold& hold, size_t max_bytes);

  // Called when the group has failed. Fails the requests of queued frames and stops using their
  // memory, in both directions. A frame that has been sent or received in part is completed with
  // zeros, and a hello is kept, so that the peer can parse the frames that follow.
  void release_requests(const Error& error);
  // Calls f(request) for every request whose memory is queued.
  template <class F>
  void each_request(F&& f) const {
    for (const QueuedFrame& o : send_queue_) {
      if (o.body.request) f(*o.body.request);
    }
  }
  // Returns memory for a received body that is discarded; valid as long as this connection.
  Body discard_buffer(size_t bytes);

  bool received_bye = false;                  // from the peer
  bool closed = false;                        // by the owner
  uint32_t polled_events = 0;                 // for the owner: epoll events that it waits for
  std::string abort_text_in, abort_text_out;  // bodies of kAbort
  int io_errno = 0;                           // errno that ended the connection
  std::string close_reason;                   // for messages, if this side ends the connection
  using Clock = std::chrono::steady_clock;
  // For the owner: the last time at which no data of this connection had been waiting for TCP's
  // acknowledgement by the peer's host for longer than the interval of the owner's checks.
  Clock::time_point last_acknowledged = Clock::now();

 private:
  // A frame in the send queue.
  struct QueuedFrame {
    Frame frame;
    Body body;
    size_t sent = 0;           // bytes of header, body and seal together
    bool still_needed = true;  // false: after a failure, sent only if its sending has begun
    Seal seal = Seal::kWhole;
  };
  ssize_t send_front(LockHold& hold);
  void count_sent(size_t bytes);
  ssize_t receive_some(LockHold& hold);
  bool process_received(ConnectionOwner& owner, size_t bytes, LockHold& hold);
  bool is_signed(const Frame& frame) const;

  Fd fd_;
  int peer_;
  bool opened_here_;
  Key key_;
  std::optional<Key> farewell_key_;
  uint64_t next_sent_number_, next_received_number_;  // of frames, for their MACs
  bool stalled_ = false, sending_ = false;
  std::deque<QueuedFrame> send_queue_;
  Frame incoming_frame_;
  bool receiving_body_ = false, header_complete_ = false;
  size_t received_bytes_ = 0;  // of the header, or of the body and its seal
  Body incoming_body_;
  Seal incoming_seal_ = Seal::kBroken;
  std::vector<std::byte> discard_memory_;
};

}  // namespace fsccl
