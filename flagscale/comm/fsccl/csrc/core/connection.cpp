#include "connection.h"

#include <sys/uio.h>

#include <array>
#include <cerrno>

namespace fsccl {
namespace {

// Per system call, because other threads may wait for the copy.
constexpr size_t kCopyBytes = 1 << 20;
constexpr size_t kFillerBytes = 1 << 20;
constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 40;  // larger than the memory of any host

// The iovec array of one system call. Ignores what exceeds its capacity, which the next call
// handles.
class IoVectors {
 public:
  void add(void* p, size_t n) {
    if (n == 0 || count_ == list_.size()) return;
    list_[count_++] = {p, n};
    bytes_ += n;
  }
  // Adds what remains of a body and its seal from byte `from` on.
  void add(const BufferList& body, Seal* seal, size_t from) {
    const size_t total = body.bytes(), start = bytes_;
    if (from < total) {
      const Interval range{from, std::min(total, from + kCopyBytes)};
      body.visit(range, [this](std::byte* p, size_t n, size_t) { add(p, n); });
    }
    if (total == 0 || from + bytes_ - start < total) return;
    const size_t seal_offset = std::max(from, total) - total;
    add(reinterpret_cast<char*>(seal) + seal_offset, sizeof *seal - seal_offset);
  }
  iovec* list() { return list_.data(); }
  size_t count() const { return count_; }
  size_t bytes() const { return bytes_; }

 private:
  std::array<iovec, 32> list_;
  size_t count_ = 0, bytes_ = 0;
};

// A connection that is still being established reports EAGAIN (TCP) or ENOTCONN; the poll set
// signals when it is ready.
bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOTCONN;
}

Body repeat(const std::byte* memory, size_t bytes) {
  Body out;
  for (size_t at = 0; at < bytes; at += kFillerBytes) {
    out.memory.add(buffer_of(memory, std::min(kFillerBytes, bytes - at)));
  }
  return out;
}

Body zeros(size_t bytes) {
  // Zero-initialised, so that it takes no space in the binary.
  static std::array<std::byte, kFillerBytes> memory;
  return repeat(memory.data(), bytes);
}

}  // namespace

Key key_of_connection(const Key& group, const Frame& hello) {
  return derived(group,
                 std::array<uint64_t, 4>{hello.tag, hello.message, hello.offset, hello.total});
}

Body Connection::discard_buffer(size_t bytes) {
  discard_memory_.resize(kFillerBytes);  // resized once, because another frame may point into it
  return repeat(discard_memory_.data(), bytes);
}

void Connection::release_requests(const Error& error) {
  for (Output& o : out_) {
    if (o.body.request) o.body.request->fail(error);
  }
  const bool hello_is_first = !out_.empty() && out_.front().frame.kind == FrameKind::kHello;
  const bool first_is_partly_sent = !out_.empty() && (sending_ || out_.front().sent > 0);
  out_.erase(out_.begin() + (hello_is_first || first_is_partly_sent ? 1 : 0), out_.end());
  if (first_is_partly_sent && !hello_is_first) {
    out_.front().body = zeros(out_.front().body.memory.bytes());
    out_.front().seal = Seal::kBroken;
    out_.front().needed = false;
  }
  if (in_body_) body_ = discard_buffer(in_.bytes);
}

void Connection::queue(const Frame& frame, Body body) { out_.push_back({frame, std::move(body)}); }

bool Connection::flush(LockHold& hold, size_t budget) {
  if (sending_) return true;
  sending_ = true;
  bool is_open = true;
  for (size_t sent = 0; sent < budget && !out_.empty();) {
    const ssize_t n = send_front(hold);
    if (n < 0) {
      is_open = would_block();
      if (!is_open) error = errno;
      // Dropped by release_requests() in the meantime.
      if (!out_.front().needed && out_.front().sent == 0) out_.pop_front();
      break;
    }
    count_sent(static_cast<size_t>(n));
    sent += static_cast<size_t>(n);
  }
  sending_ = false;
  return is_open;
}

ssize_t Connection::send_front(LockHold& hold) {
  Output& o = out_.front();  // its address stays the same while others append to the queue
  const bool request_failed = o.body.request && o.body.request->is_closing();
  if (request_failed) {
    o.body = zeros(o.body.memory.bytes());
    o.seal = Seal::kBroken;
  }
  if (o.sent == 0) o.frame.mac = mac_of(key_, o.frame, next_out_);
  Seal seal = o.seal;  // a copy, because the original may change while the lock is released
  IoVectors v;
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

void Connection::count_sent(size_t bytes) {
  Output& o = out_.front();
  o.sent += bytes;
  if (o.sent < sizeof o.frame + body_and_seal_bytes(o.frame)) return;
  next_out_ += 2;
  if (o.body.request) o.body.request->complete_part();
  out_.pop_front();
}

// Reads a header, asks the owner where its body goes, reads the body, and so on, until the kernel
// has no more data or the budget is spent. The budget keeps one busy peer from starving the others.
bool Connection::receive(ConnectionOwner& owner, LockHold& hold, size_t budget) {
  for (size_t read = 0; read < budget && !stalled_;) {
    if (header_complete_ && !in_body_) {  // it was stalled: ask again
      if (!advance(owner, 0, hold)) return false;
      continue;
    }
    const ssize_t n = receive_some(hold);
    if (n == 0) return false;
    if (n < 0) {
      if (would_block()) return true;
      error = errno;
      return false;
    }
    read += static_cast<size_t>(n);
    if (!advance(owner, static_cast<size_t>(n), hold)) return false;
  }
  return true;
}

ssize_t Connection::receive_some(LockHold& hold) {
  if (in_body_ && body_.request && body_.request->is_closing()) body_ = discard_buffer(in_.bytes);
  IoVectors v;
  if (in_body_) {
    v.add(body_.memory, &seal_, received_);
  } else {
    v.add(reinterpret_cast<char*>(&in_) + received_, sizeof in_ - received_);
  }
  const auto call = [this, &v] { return readv(fd(), v.list(), static_cast<int>(v.count())); };
  return hold.copy(body_, v.bytes(), call);
}

bool Connection::advance(ConnectionOwner& owner, size_t bytes, LockHold& hold) {
  received_ += bytes;
  if (!in_body_) {
    if (received_ < sizeof in_) return true;
    if (!header_complete_ && in_.mac != mac_of(key_, in_, next_in_)) {
      close_reason = "received a frame that no rank of this group has signed";
      return false;
    }
    if (in_.bytes > kMaxMessageBytes || in_.total > kMaxMessageBytes) {
      close_reason = "a message of " + std::to_string(std::max(in_.bytes, in_.total)) + " bytes";
      return false;
    }
    if (!std::exchange(header_complete_, true)) next_in_ += 2;
    body_ = Body();
    const ConnectionOwner::Decision decision = owner.on_frame(*this, in_, &body_);
    stalled_ = decision == ConnectionOwner::Decision::kStall;
    if (stalled_) return true;
    if (decision == ConnectionOwner::Decision::kRefuse) return false;
    if (body_.memory.bytes() != in_.bytes) return false;
    in_body_ = true;
    received_ = 0;
  }
  if (received_ < body_and_seal_bytes(in_)) return true;
  in_body_ = header_complete_ = false;
  received_ = 0;
  body_ = Body();
  if (in_.bytes == 0 || seal_ == Seal::kWhole) owner.on_body(*this, in_, hold);
  return true;
}

}  // namespace fsccl
