// One connection of a transport, and its frames.
//
// A rank opens connections to a peer when it first has something to send to it, or waits for
// something from it. The rank that opened a connection sends messages on it; the other side only
// answers (kClear, kAnswer, kAbort, kBye). A frame is a header and, unless `bytes` is 0, a body of
// that size and its seal. If the sender fails in the middle of a body, the rest is filled with
// zeros and not sealed kWhole: the frames that follow can be parsed, and the body is not taken for
// a message.
//
// Every header carries a message authentication code. Its key belongs to the connection: it is
// derived from the key of the group and the contents of the hello, which include a random number.
// The code covers the number of the frame on its connection and direction. A hello is accepted
// once, so that it cannot be replayed. Bodies are not authenticated.
//
//   kHello     first on every connection: tag = token of the endpoint that is called, message =
//              rank of the caller, offset = index, flags = protocol version, total = random. The
//              device handles it
//   kMessage   a whole message in one frame, sent at once
//   kAnnounce  a message whose body follows in stripes; with kNeedsClear in `flags`, only after
//              kClear
//   kClear     the receiver is ready for a message that needs it
//   kStripe    bytes [offset, offset + bytes) of a message, on any connection
//   kAsk       which rank does the receiver wait for? tag = number of the question
//   kAnswer    message = that rank, or -1
//   kAbort     the group failed: tag = rank at fault, body = the error message
//   kBye       the sender leaves in good order and had opened `offset` connections to the receiver
#pragma once

#include <deque>
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
  kClear,
  kStripe,
  kAbort,
  kBye,
  kAsk,
  kAnswer,
};
// In Frame::flags.
constexpr uint32_t kNeedsClear = 1;

// Header of a frame, in the layout of the wire, little-endian.
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

// The side that opened a connection numbers its frames 0, 2, 4, ..., the other side 1, 3, 5, ...
inline uint64_t mac_of(const Key& key, Frame f, uint64_t frame_number) {
  f.mac = frame_number;
  return mac_of(key, &f, sizeof f);
}
Key key_of_connection(const Key& group, const Frame& hello);

enum class Seal : uint32_t { kWhole = 0x656c6f77, kBroken = 0x6e6b7262 };
inline size_t body_and_seal_bytes(const Frame& f) {
  return f.bytes == 0 ? 0 : f.bytes + sizeof(Seal);
}

class Connection;

// Callbacks of a connection. They run under the owner's lock, which on_body() may release.
class ConnectionOwner {
 public:
  enum class Decision { kBody, kStall, kRefuse };
  virtual ~ConnectionOwner() = default;
  // A header has arrived. kBody: the body goes to `body`, whose size is frame.bytes. kStall: ask
  // again after Connection::resume(). kRefuse: close the connection.
  virtual Decision on_frame(Connection& connection, const Frame& frame, Body* body) = 0;
  virtual void on_body(Connection& connection, const Frame& frame, LockHold& hold) = 0;
};

// A connection. Any thread may send, one at a time; a single thread receives. The owner's lock
// guards it.
class Connection {
 public:
  // If the peer opened the connection, its hello has been received and verified.
  Connection(Fd fd, int peer, bool opened_here, const Key& key)
      : fd_(std::move(fd)),
        peer_(peer),
        opened_here_(opened_here),
        key_(key),
        next_out_(opened_here ? 0 : 1),
        next_in_(opened_here ? 1 : 2) {}

  int fd() const { return fd_.get(); }
  int peer() const { return peer_; }
  bool opened_here() const { return opened_here_; }

  void queue(const Frame& frame, Body body = {});
  bool has_output() const { return !out_.empty(); }
  // A thread is sending. It also sends messages queued in the meantime.
  bool sending() const { return sending_; }
  bool stalled() const { return stalled_; }
  void resume() { stalled_ = false; }

  // Send and receive. Both return false once the connection is broken. Data that the kernel does
  // not take or have now, or that exceeds the budget (bytes), is left for the next call. Both
  // release the lock while they copy.
  bool flush(LockHold& hold, size_t budget);
  bool receive(ConnectionOwner& owner, LockHold& hold, size_t budget);

  // The group failed: fails the requests of queued frames and stops using their memory, in both
  // directions. A frame that is partly sent or received is completed with filler, and a hello is
  // kept, so that the peer can parse the frames that follow.
  void release_requests(const Error& error);
  // Calls f(request) for every request whose memory is queued.
  template <class F>
  void each_request(F&& f) const {
    for (const Output& o : out_) {
      if (o.body.request) f(*o.body.request);
    }
  }
  // Returns memory for a body that is discarded; valid as long as this connection.
  Body discard_buffer(size_t bytes);

  bool received_bye = false;                  // from the peer
  bool closed = false;                        // by the owner
  uint32_t polled_events = 0;                 // for the owner: the events it polls for
  std::string abort_text_in, abort_text_out;  // bodies of kAbort
  int error = 0;                              // errno that ended the connection
  std::string close_reason;                   // set if the owner closes the connection
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_heard = Clock::now();  // for the owner: see unheard_for()

 private:
  // A frame in the send queue.
  struct Output {
    Frame frame;
    Body body;
    size_t sent = 0;  // of header, body and seal together
    bool needed = true;
    Seal seal = Seal::kWhole;
  };
  ssize_t send_front(LockHold& hold);
  void count_sent(size_t bytes);
  ssize_t receive_some(LockHold& hold);
  bool advance(ConnectionOwner& owner, size_t bytes, LockHold& hold);

  Fd fd_;
  int peer_;
  bool opened_here_;
  Key key_;
  uint64_t next_out_, next_in_;  // frame numbers
  bool stalled_ = false, sending_ = false;
  std::deque<Output> out_;
  Frame in_;
  bool in_body_ = false, header_complete_ = false;
  size_t received_ = 0;
  Body body_;
  Seal seal_ = Seal::kBroken;
  std::vector<std::byte> discard_memory_;
};

}  // namespace fsccl
