// One connection of a transport, and the frames on it.
//
// A rank opens connections to a peer when it first has something to send to it, or waits for
// something from it; whoever opened a connection sends messages on it, the other side only answers
// (kClear, kAnswer, kAbort, kBye). A frame is a header and, unless `bytes` is 0, a body of so many
// bytes and its seal. A body whose sender failed in its middle is filled up and not sealed kWhole:
// what follows is understood, and nobody takes it for a message.
//
// Every header is signed with a key of its connection, made of the group's and of what its hello
// says, a random number among it; and so is the header's place on its connection and way. A hello
// counts once: nobody can say again what another has said. Bodies are not signed.
//
//   kHello     first on every connection: tag = token of the end that is called, message = rank of
//              who calls, offset = index, flags = protocol version, total = random. The device
//              takes it
//   kMessage   a whole message in one frame, at once
//   kAnnounce  a message whose body follows in stripes; with kAsks in `flags` only after kClear
//   kClear     the receiver is ready for a message that asked
//   kStripe    bytes [offset, offset + bytes) of a message, on any connection
//   kAsk       whom does the receiver wait for? tag = number of the question
//   kAnswer    message = that rank, or -1
//   kAbort     the group failed: tag = rank at fault, body = why
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
constexpr uint32_t kAsks = 1;

struct Frame {
  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kHello;
  uint32_t flags = 0;
  uint32_t none = 0;
  uint64_t tag = 0;
  uint64_t message = 0;  // numbers a sender's messages to one receiver
  uint64_t bytes = 0;    // of the body that follows
  uint64_t offset = 0;
  uint64_t total = 0;  // size of the whole message
  uint64_t mac = 0;
  OpCard card;  // of the operation of which a message is part: the same on both sides
  static constexpr uint32_t kMagic = 0x6c636366;  // "fccl" in little-endian order
};
static_assert(sizeof(Frame) == 96, "the layout on the wire");

// Who has opened a connection counts its frames 0, 2, 4 and so on, the other side 1, 3, 5.
inline uint64_t mac_of(const Key& key, Frame f, uint64_t number) {
  f.mac = number;
  return mac_of(key, &f, sizeof f);
}
Key key_of_connection(const Key& group, const Frame& hello);

enum class Seal : uint32_t { kWhole = 0x656c6f77, kBroken = 0x6e6b7262 };
inline size_t sealed_bytes(const Frame& f) { return f.bytes == 0 ? 0 : f.bytes + sizeof(Seal); }

class Connection;

// What a connection tells its owner; all under the owner's lock, which on_body() may let go.
class ConnectionOwner {
 public:
  enum class Answer { kBody, kStall, kRefuse };
  virtual ~ConnectionOwner() = default;
  // A header has come. kBody: `into` is where the body goes (its size is frame.bytes).
  // kStall: ask again later, after Connection::resume(). kRefuse: ends the connection.
  virtual Answer on_frame(Connection& connection, const Frame& frame, Body* into) = 0;
  virtual void on_body(Connection& connection, const Frame& frame, Hold& hold) = 0;
};

// One thread at a time sends on a connection, any thread; always the same one receives.
class Connection {
 public:
  // Of a connection that the peer has opened the hello has come, and was well signed.
  Connection(Fd fd, int peer, bool opened_here, const Key& key)
      : fd_(std::move(fd)),
        peer_(peer),
        ours_(opened_here),
        key_(key),
        next_out_(opened_here ? 0 : 1),
        next_in_(opened_here ? 1 : 2) {}

  int fd() const { return fd_.get(); }
  int peer() const { return peer_; }
  bool opened_here() const { return ours_; }

  void queue(const Frame& frame, Body body = {});
  bool has_output() const { return !out_.empty(); }
  // Somebody does; what is queued meanwhile goes too.
  bool sending() const { return sending_; }
  bool stalled() const { return stalled_; }
  void resume() { stalled_ = false; }

  // Both return false once the connection is over; what the kernel would not take or give now, or
  // the budget does not allow, stays for the next call. Both let the lock go while they copy.
  bool flush(Hold& hold, size_t budget);
  bool receive(ConnectionOwner& owner, Hold& hold, size_t budget);

  // The group failed: forgets the memory of all requests, on both ways. A frame that is half sent
  // or half received is filled up, and a hello stays, so that what follows is understood.
  void let_go(const Error& why);
  // Calls f(request) of those whose memory is to be sent.
  template <class F>
  void each_request(F&& f) const {
    for (const Output& o : out_) {
      if (o.body.request) f(*o.body.request);
    }
  }
  // For a frame that nobody wants; as long as this connection lives.
  Body filler(size_t bytes);

  bool said_bye = false;          // the peer did
  bool closed = false;            // the owner did
  uint32_t polled = 0;            // the owner's note: the events it waits for
  std::string text_in, text_out;  // bodies of kAbort
  int error = 0;                  // errno of what ended it
  std::string cut_because;        // the owner ended it
  using Clock = std::chrono::steady_clock;
  Clock::time_point heard = Clock::now();  // the owner's note: see unheard()

 private:
  struct Output {
    Frame frame;
    Body body;
    size_t sent = 0;  // of header, body and seal together
    bool wanted = true;
    Seal seal = Seal::kWhole;
  };
  ssize_t send_front(Hold& hold);
  void sent_of_front(size_t bytes);
  ssize_t receive_some(Hold& hold);
  bool advance(ConnectionOwner& owner, size_t got, Hold& hold);

  Fd fd_;
  int peer_;
  bool ours_;
  Key key_;
  uint64_t next_out_, next_in_;  // numbers of frames
  bool stalled_ = false, sending_ = false;
  std::deque<Output> out_;
  Frame in_;
  bool in_body_ = false, header_complete_ = false;
  size_t got_ = 0;
  Body into_;
  Seal seal_ = Seal::kBroken;
  std::vector<std::byte> trash_;
};

}  // namespace fsccl
