#include "link.h"

#include <sys/uio.h>

#include <cerrno>
#include <climits>

namespace fsccl {
namespace {

constexpr size_t kVectors = 32;

void add_vectors(const Pieces& body, size_t skip, std::vector<iovec>* out) {
  body.visit({skip, body.bytes()}, [out](std::byte* p, size_t n, size_t) {
    if (out->size() < kVectors) out->push_back({p, n});
  });
}

constexpr size_t kTrashBytes = 64 << 10;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

Pieces Link::filler(size_t bytes) {
  Pieces out;
  trash_.resize(kTrashBytes);  // once: another frame may point into it
  for (size_t at = 0; at < bytes; at += kTrashBytes) {
    out.add({trash_.data(), std::min(kTrashBytes, bytes - at)});
  }
  return out;
}

void Link::let_go(const Error& why) {
  const bool half_sent = !out_.empty() && out_.front().sent > 0;
  for (Output& o : out_) {
    if (o.request) o.request->fail(why);
  }
  out_.resize(half_sent ? 1 : 0);
  if (half_sent) {
    out_.front().body = filler(out_.front().body.bytes());
    out_.front().request = nullptr;
  }
  if (in_body_) into_ = filler(in_.bytes);
}

void Link::queue(const Frame& frame, Pieces body, RequestPtr request) {
  out_.push_back({frame, std::move(body), std::move(request), 0});
}

bool Link::flush() {
  std::vector<iovec> vectors;
  while (!out_.empty()) {
    Output& o = out_.front();
    vectors.clear();
    if (o.sent < sizeof o.frame) {
      vectors.push_back({reinterpret_cast<char*>(&o.frame) + o.sent, sizeof o.frame - o.sent});
    }
    add_vectors(o.body, o.sent < sizeof o.frame ? 0 : o.sent - sizeof o.frame, &vectors);
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = vectors.size();
    const ssize_t n = sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    // Not connected yet reads as EAGAIN (TCP) or ENOTCONN; the poll tells when it is.
    if (n < 0) return would_block() || errno == ENOTCONN;
    o.sent += static_cast<size_t>(n);
    if (o.sent < sizeof o.frame + o.body.bytes()) continue;
    if (o.request) o.request->succeed();
    out_.pop_front();
  }
  return true;
}

// Reads a header, asks the owner where its body goes, reads the body, and so on until the kernel
// has no more or the budget is spent: one busy peer must not starve the others.
bool Link::receive(LinkOwner& owner, size_t budget) {
  std::vector<iovec> vectors;
  for (size_t read = 0; read < budget && !stalled_;) {
    if (header_complete_ && !in_body_) {  // was stalled: ask again
      if (!advance(owner, 0)) return false;
      continue;
    }
    vectors.clear();
    if (in_body_) {
      add_vectors(into_, got_, &vectors);
    } else {
      vectors.push_back({reinterpret_cast<char*>(&in_) + got_, sizeof in_ - got_});
    }
    const ssize_t n = readv(fd(), vectors.data(), static_cast<int>(vectors.size()));
    if (n == 0) return false;
    if (n < 0) return would_block() || errno == ENOTCONN;
    read += static_cast<size_t>(n);
    if (!advance(owner, static_cast<size_t>(n))) return false;
  }
  return true;
}

bool Link::advance(LinkOwner& owner, size_t got) {
  got_ += got;
  if (!in_body_) {
    if (got_ < sizeof in_) return true;
    if (in_.magic != Frame::kMagic) return false;  // not one of us
    header_complete_ = true;
    into_ = Pieces();
    if (owner.on_frame(*this, in_, &into_) == LinkOwner::Answer::kStall) {
      stalled_ = true;
      return true;
    }
    if (into_.bytes() != in_.bytes) return false;
    in_body_ = true;
    got_ = 0;
  }
  if (got_ < in_.bytes) return true;
  in_body_ = header_complete_ = false;
  got_ = 0;
  owner.on_body(*this, in_);
  return true;
}

}  // namespace fsccl
