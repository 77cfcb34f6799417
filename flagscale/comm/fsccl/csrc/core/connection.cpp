#include "connection.h"

#include <sys/uio.h>

#include <array>
#include <cerrno>

namespace fsccl {
namespace {

// Maximum per system call, because other threads may wait for the copy.
constexpr size_t kCopyBytes = 1 << 20;
constexpr size_t kFillerBytes = 1 << 20;
constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 40;  // larger than the memory of any host

// The iovec array of one system call. It ignores buffers beyond its capacity; the next system call
// handles them.
class IoVectors {
 public:
  void add(void* p, size_t n) {
    if (n == 0 || count_ == list_.size()) return;
    list_[count_++] = {p, n};
    bytes_ += n;
  }
  // Adds a body and its seal from byte `from` on.
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

// Returns whether errno means "try again later". A connection that is still being established
// reports EAGAIN (TCP) or ENOTCONN; epoll signals when it is ready.
bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOTCONN;
}

// Returns a body of `bytes` bytes whose parts are all in the same kFillerBytes of memory.
Body repeat_buffer(const std::byte* memory, size_t bytes) {
  Body out;
  for (size_t at = 0; at < bytes; at += kFillerBytes) {
    out.memory.add(buffer_of(memory, std::min(kFillerBytes, bytes - at)));
  }
  return out;
}

Body zeros(size_t bytes) {
  // Zero-initialised, so that it takes no space in the binary.
  static std::array<std::byte, kFillerBytes> memory;
  return repeat_buffer(memory.data(), bytes);
}

}  // namespace

Key key_of_connection(const Key& group, const Frame& hello) {
  return derive_key(group,
                    std::array<uint64_t, 4>{hello.tag, hello.message, hello.offset, hello.total});
}

Body Connection::discard_buffer(size_t bytes) {
  discard_memory_.resize(kFillerBytes);  // resized once, because another frame may point into it
  return repeat_buffer(discard_memory_.data(), bytes);
}

void Connection::release_requests(const Error& error) {
  for (QueuedFrame& o : send_queue_) {
    if (o.body.request) o.body.request->fail(error);
  }
  const bool hello_is_first =
      !send_queue_.empty() && send_queue_.front().frame.kind == FrameKind::kHello;
  const bool first_is_partly_sent =
      !send_queue_.empty() && (sending_ || send_queue_.front().sent > 0);
  send_queue_.erase(send_queue_.begin() + (hello_is_first || first_is_partly_sent ? 1 : 0),
                    send_queue_.end());
  if (first_is_partly_sent && !hello_is_first) {
    send_queue_.front().body = zeros(send_queue_.front().body.memory.bytes());
    send_queue_.front().seal = Seal::kBroken;
    send_queue_.front().still_needed = false;
  }
  if (receiving_body_) incoming_body_ = discard_buffer(incoming_frame_.bytes);
}

void Connection::queue(const Frame& frame, Body body) {
  send_queue_.push_back({frame, std::move(body)});
}

bool Connection::flush(LockHold& hold, size_t max_bytes) {
  if (sending_) return true;
  sending_ = true;
  bool is_open = true;
  for (size_t sent = 0; sent < max_bytes && !send_queue_.empty();) {
    const ssize_t n = send_front(hold);
    if (n < 0) {
      is_open = would_block();
      if (!is_open) io_errno = errno;
      // Another thread has called release_requests() in the meantime.
      if (!send_queue_.front().still_needed && send_queue_.front().sent == 0)
        send_queue_.pop_front();
      break;
    }
    count_sent(static_cast<size_t>(n));
    sent += static_cast<size_t>(n);
  }
  sending_ = false;
  return is_open;
}

ssize_t Connection::send_front(LockHold& hold) {
  QueuedFrame& o =
      send_queue_.front();  // its address stays the same while others append to the queue
  const bool request_failed = o.body.request && o.body.request->is_closing();
  if (request_failed) {
    o.body = zeros(o.body.memory.bytes());
    o.seal = Seal::kBroken;
  }
  if (o.sent == 0) o.frame.mac = mac_of(key_, o.frame, next_sent_number_);
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
  QueuedFrame& o = send_queue_.front();
  o.sent += bytes;
  if (o.sent < sizeof o.frame + body_and_seal_bytes(o.frame)) return;
  next_sent_number_ += 2;
  if (o.body.request) o.body.request->complete_body();
  send_queue_.pop_front();
}

// Reads a header, gets the memory for its body from the owner, reads the body, and so on, until the
// kernel has no more data or `max_bytes` are read. The limit keeps one busy peer from starving the
// others.
bool Connection::receive(ConnectionOwner& owner, LockHold& hold, size_t max_bytes) {
  for (size_t read = 0; read < max_bytes && !stalled_;) {
    if (header_complete_ && !receiving_body_) {  // it was stalled: call the owner again
      if (!process_received(owner, 0, hold)) return false;
      continue;
    }
    const ssize_t n = receive_some(hold);
    if (n == 0) return false;
    if (n < 0) {
      if (would_block()) return true;
      io_errno = errno;
      return false;
    }
    read += static_cast<size_t>(n);
    if (!process_received(owner, static_cast<size_t>(n), hold)) return false;
  }
  return true;
}

ssize_t Connection::receive_some(LockHold& hold) {
  if (receiving_body_ && incoming_body_.request && incoming_body_.request->is_closing())
    incoming_body_ = discard_buffer(incoming_frame_.bytes);
  IoVectors v;
  if (receiving_body_) {
    v.add(incoming_body_.memory, &incoming_seal_, received_bytes_);
  } else {
    v.add(reinterpret_cast<char*>(&incoming_frame_) + received_bytes_,
          sizeof incoming_frame_ - received_bytes_);
  }
  const auto call = [this, &v] { return readv(fd(), v.list(), static_cast<int>(v.count())); };
  return hold.copy(incoming_body_, v.bytes(), call);
}

bool Connection::is_signed(const Frame& frame) const {
  if (frame.mac == mac_of(key_, frame, next_received_number_)) return true;
  return farewell_key_ && (frame.kind == FrameKind::kBye || frame.kind == FrameKind::kAbort) &&
         frame.mac == mac_of(*farewell_key_, frame, next_received_number_);
}

bool Connection::process_received(ConnectionOwner& owner, size_t bytes, LockHold& hold) {
  received_bytes_ += bytes;
  if (!receiving_body_) {
    if (received_bytes_ < sizeof incoming_frame_) return true;
    if (!header_complete_ && !is_signed(incoming_frame_)) {
      close_reason = "received a frame that no rank of this group has signed";
      return false;
    }
    if (incoming_frame_.bytes > kMaxMessageBytes || incoming_frame_.total > kMaxMessageBytes) {
      close_reason = "a message of " +
                     std::to_string(std::max(incoming_frame_.bytes, incoming_frame_.total)) +
                     " bytes";
      return false;
    }
    if (!std::exchange(header_complete_, true)) next_received_number_ += 2;
    incoming_body_ = Body();
    const ConnectionOwner::Decision decision =
        owner.on_frame(*this, incoming_frame_, &incoming_body_);
    stalled_ = decision == ConnectionOwner::Decision::kStall;
    if (stalled_) return true;
    if (decision == ConnectionOwner::Decision::kRefuse) return false;
    if (incoming_body_.memory.bytes() != incoming_frame_.bytes) return false;
    receiving_body_ = true;
    received_bytes_ = 0;
  }
  if (received_bytes_ < body_and_seal_bytes(incoming_frame_)) return true;
  receiving_body_ = header_complete_ = false;
  received_bytes_ = 0;
  incoming_body_ = Body();
  if (incoming_frame_.bytes == 0 || incoming_seal_ == Seal::kWhole)
    owner.on_body(*this, incoming_frame_, hold);
  return true;
}

}  // namespace fsccl
