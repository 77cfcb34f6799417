// One connection of a messenger, and the frames on it.
//
// A rank opens connections to a peer when it first has something to send to it, or waits for
// something from it; whoever opened a connection sends messages on it, the other side only answers
// (kClear, kAnswer, kAbort, kBye). A frame is a header and, unless `bytes` is 0, a body of so many
// bytes and its seal. A body whose sender failed in its middle is filled up and not sealed kWhole:
// what follows is understood, and nobody takes it for a message.
//
//
//   kHello     first on every connection: tag = group token, message = rank, offset = index,
//              total = protocol version
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
  OpCard card;         // of the operation of which a message is part: the same on both sides
  static constexpr uint32_t kMagic = 0x6c636366;  // "fccl" in little-endian order
};
static_assert(sizeof(Frame) == 88, "the layout on the wire");

enum class Seal : uint32_t { kWhole = 0x656c6f77, kBroken = 0x6e6b7262 };
inline size_t sealed_bytes(const Frame& f) { return f.bytes == 0 ? 0 : f.bytes + sizeof(Seal); }

class Link;

// What a link tells its owner; all under the owner's lock, which on_body() may let go.
class LinkOwner {
 public:
  enum class Answer { kBody, kStall, kRefuse };
  virtual ~LinkOwner() = default;
  // A header has come. kBody: `into` is where the body goes (its size is frame.bytes).
  // kStall: ask again later, after Link::resume(). kRefuse: ends the connection.
  virtual Answer on_frame(Link& link, const Frame& frame, Body* into) = 0;
  virtual void on_body(Link& link, const Frame& frame, Hold& hold) = 0;
};

// One thread at a time sends on a link, any thread; always the same one receives.
class Link {
 public:
  Link(Fd fd, int peer, bool opened_here) : fd_(std::move(fd)), peer_(peer), ours_(opened_here) {}

  int fd() const { return fd_.get(); }
  int peer() const { return peer_; }
  bool opened_here() const { return ours_; }
  void set_peer(int peer) { peer_ = peer; }

  void queue(const Frame& frame, Body body = {});
  bool has_output() const { return !out_.empty(); }
  // Somebody does; what is queued meanwhile goes too.
  bool sending() const { return sending_; }
  bool stalled() const { return stalled_; }
  void resume() { stalled_ = false; }

  // Both return false once the connection is over; what the kernel would not take or give now, or
  // the budget does not allow, stays for the next call. Both let the lock go while they copy.
  bool flush(Hold& hold, size_t budget);
  bool receive(LinkOwner& owner, Hold& hold, size_t budget);

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
  // For a frame that nobody wants; as long as this link lives.
  Body filler(size_t bytes);

  bool said_bye = false;          // the peer did
  bool closed = false;            // the owner did
  uint32_t polled = 0;            // the owner's note: the events it waits for
  std::string text_in, text_out;  // bodies of kAbort
  int error = 0;                  // errno of what ended it
  std::string cut_because;        // the owner ended it
  using Clock = std::chrono::steady_clock;
  Clock::time_point made = Clock::now(), heard = made;  // the owner's notes: see unheard()

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
  bool advance(LinkOwner& owner, size_t got, Hold& hold);

  Fd fd_;
  int peer_;
  bool ours_;
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
