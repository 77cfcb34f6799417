#include "connection.h"

#include <sys/uio.h>

#include <array>
#include <cerrno>

namespace fsccl {
namespace {

constexpr size_t kCopyBytes = 1 << 20;  // in one call of the kernel, which others may wait for
constexpr size_t kFillerBytes = 1 << 20;
constexpr uint64_t kMostBytes = uint64_t{1} << 40;  // of a message: no host has so much

class Vectors {
 public:
  void add(void* p, size_t n) {
    if (n == 0 || count_ == list_.size()) return;
    list_[count_++] = {p, n};
    bytes_ += n;
  }
  // Of a body and its seal what comes from `from` on.
  void add(const BufferList& body, Seal* seal, size_t from) {
    const size_t all = body.bytes(), before = bytes_;
    if (from < all) {
      const Interval now{from, std::min(all, from + kCopyBytes)};
      body.visit(now, [this](std::byte* p, size_t n, size_t) { add(p, n); });
    }
    if (all == 0 || from + bytes_ - before < all) return;
    const size_t sealed = std::max(from, all) - all;
    add(reinterpret_cast<char*>(seal) + sealed, sizeof *seal - sealed);
  }
  iovec* list() { return list_.data(); }
  size_t count() const { return count_; }
  size_t bytes() const { return bytes_; }

 private:
  std::array<iovec, 32> list_;
  size_t count_ = 0, bytes_ = 0;
};

// Not connected yet reads as EAGAIN (TCP) or ENOTCONN; the poll tells when it is.
bool later() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOTCONN;
}

Body repeat(const std::byte* some, size_t bytes) {
  Body out;
  for (size_t at = 0; at < bytes; at += kFillerBytes) {
    out.memory.add(buffer_of(some, std::min(kFillerBytes, bytes - at)));
  }
  return out;
}

Body zeros(size_t bytes) {
  static std::array<std::byte, kFillerBytes> some;  // zeros, which take no room in a file
  return repeat(some.data(), bytes);
}

}  // namespace

Key key_of_connection(const Key& group, const Frame& hello) {
  return derived(group,
                 std::array<uint64_t, 4>{hello.tag, hello.message, hello.offset, hello.total});
}

Body Connection::filler(size_t bytes) {
  trash_.resize(kFillerBytes);  // once: another frame may point into it
  return repeat(trash_.data(), bytes);
}

void Connection::let_go(const Error& why) {
  for (Output& o : out_) {
    if (o.body.request) o.body.request->fail(why);
  }
  const bool says_hello = !out_.empty() && out_.front().frame.kind == FrameKind::kHello;
  const bool half_sent = !out_.empty() && (sending_ || out_.front().sent > 0);
  out_.erase(out_.begin() + (says_hello || half_sent ? 1 : 0), out_.end());
  if (half_sent && !says_hello) {
    out_.front().body = zeros(out_.front().body.memory.bytes());
    out_.front().seal = Seal::kBroken;
    out_.front().wanted = false;
  }
  if (in_body_) into_ = filler(in_.bytes);
}

void Connection::queue(const Frame& frame, Body body) { out_.push_back({frame, std::move(body)}); }

bool Connection::flush(Hold& hold, size_t budget) {
  if (sending_) return true;
  sending_ = true;
  bool alive = true;
  for (size_t sent = 0; sent < budget && !out_.empty();) {
    const ssize_t n = send_front(hold);
    if (n < 0) {
      alive = later();
      if (!alive) error = errno;
      if (!out_.front().wanted && out_.front().sent == 0) out_.pop_front();  // let go meanwhile
      break;
    }
    sent_of_front(static_cast<size_t>(n));
    sent += static_cast<size_t>(n);
  }
  sending_ = false;
  return alive;
}

ssize_t Connection::send_front(Hold& hold) {
  Output& o = out_.front();  // stays where it is while others queue
  const bool failed_elsewhere = o.body.request && o.body.request->over();
  if (failed_elsewhere) {
    o.body = zeros(o.body.memory.bytes());
    o.seal = Seal::kBroken;
  }
  if (o.sent == 0) o.frame.mac = mac_of(key_, o.frame, next_out_);
  Seal seal = o.seal;  // which may change while the lock is let go
  Vectors v;
  const size_t header = sizeof o.frame, sent = std::min(o.sent, header);
  v.add(reinterpret_cast<char*>(&o.frame) + sent, header - sent);
  v.add(o.body.memory, &seal, o.sent - sent);
  msghdr message{};
  message.msg_iov = v.list();
  message.msg_iovlen = v.count();
  return hold.copy(o.body, v.bytes(), [this, &message] {
    return sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  });
}

void Connection::sent_of_front(size_t bytes) {
  Output& o = out_.front();
  o.sent += bytes;
  if (o.sent < sizeof o.frame + sealed_bytes(o.frame)) return;
  next_out_ += 2;
  if (o.body.request) o.body.request->part_done();
  out_.pop_front();
}

// Reads a header, asks the owner where its body goes, reads the body, and so on until the kernel
// has no more or the budget is spent: one busy peer must not starve the others.
bool Connection::receive(ConnectionOwner& owner, Hold& hold, size_t budget) {
  for (size_t read = 0; read < budget && !stalled_;) {
    if (header_complete_ && !in_body_) {  // was stalled: ask again
      if (!advance(owner, 0, hold)) return false;
      continue;
    }
    const ssize_t n = receive_some(hold);
    if (n == 0) return false;
    if (n < 0) {
      if (later()) return true;
      error = errno;
      return false;
    }
    read += static_cast<size_t>(n);
    if (!advance(owner, static_cast<size_t>(n), hold)) return false;
  }
  return true;
}

ssize_t Connection::receive_some(Hold& hold) {
  if (in_body_ && into_.request && into_.request->over()) into_ = filler(in_.bytes);
  Vectors v;
  if (in_body_) {
    v.add(into_.memory, &seal_, got_);
  } else {
    v.add(reinterpret_cast<char*>(&in_) + got_, sizeof in_ - got_);
  }
  const auto call = [this, &v] { return readv(fd(), v.list(), static_cast<int>(v.count())); };
  return hold.copy(into_, v.bytes(), call);
}

bool Connection::advance(ConnectionOwner& owner, size_t got, Hold& hold) {
  got_ += got;
  if (!in_body_) {
    if (got_ < sizeof in_) return true;
    if (!header_complete_ && in_.mac != mac_of(key_, in_, next_in_)) {
      cut_because = "a frame has come that nobody of this group has signed";
      return false;
    }
    if (in_.bytes > kMostBytes || in_.total > kMostBytes) {
      cut_because = "a message of " + std::to_string(std::max(in_.bytes, in_.total)) + " bytes";
      return false;
    }
    if (!std::exchange(header_complete_, true)) next_in_ += 2;
    into_ = Body();
    const ConnectionOwner::Answer answer = owner.on_frame(*this, in_, &into_);
    stalled_ = answer == ConnectionOwner::Answer::kStall;
    if (stalled_) return true;
    if (answer == ConnectionOwner::Answer::kRefuse) return false;
    if (into_.memory.bytes() != in_.bytes) return false;
    in_body_ = true;
    got_ = 0;
  }
  if (got_ < sealed_bytes(in_)) return true;
  in_body_ = header_complete_ = false;
  got_ = 0;
  into_ = Body();
  if (in_.bytes == 0 || seal_ == Seal::kWhole) owner.on_body(*this, in_, hold);
  return true;
}

}  // namespace fsccl
