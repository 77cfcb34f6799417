#include "socket.h"

#include <netdb.h>
#include <netinet/udp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "../core/types.h"
#include "packet.h"

namespace fsccl::datagram {
namespace {

constexpr int kBuffer = 8 << 20;  // bytes
constexpr size_t kControl = CMSG_SPACE(sizeof(uint32_t)) + CMSG_SPACE(sizeof(int));
constexpr size_t kSegment = CMSG_SPACE(sizeof(uint16_t));

// Of "tcp:<port>:<numeric host>".
std::string host_of(const std::string& address) {
  const size_t colon = address.find(':', 4);
  if (address.rfind("tcp:", 0) != 0 || colon == std::string::npos) {
    fail_usage("not an address: " + address);
  }
  return address.substr(colon + 1);
}

socklen_t read_address(const std::string& host, const std::string& port, sockaddr_storage* out) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (const int code = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); code != 0) {
    fail_usage("not an address: " + host + " port " + port + ": " + gai_strerror(code));
  }
  const auto length = static_cast<socklen_t>(found->ai_addrlen);
  std::memcpy(out, found->ai_addr, length);
  freeaddrinfo(found);
  return length;
}

sockaddr* plain(sockaddr_storage* a) { return reinterpret_cast<sockaddr*>(a); }

// An administrator gets it; others at most net.core.rmem_max, or wmem_max.
void ask_for_buffer(int fd, int forced, int plainly) {
  if (setsockopt(fd, SOL_SOCKET, forced, &kBuffer, sizeof kBuffer) == 0) return;
  setsockopt(fd, SOL_SOCKET, plainly, &kBuffer, sizeof kBuffer);
}

// Packets that are too long for the path are refused, and not divided by routers.
void never_divide(int fd, int family) {
  const int v4 = IP_PMTUDISC_DO, v6 = IPV6_PMTUDISC_DO;
  if (family == AF_INET) setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &v4, sizeof v4);
  if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &v6, sizeof v6);
}

// Of the path, as far as this host knows.
size_t most_to(const sockaddr_storage& to, socklen_t length) {
  const int family = to.ss_family;
  const Fd fd(socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  int mtu = 0;
  socklen_t size = sizeof mtu;
  const bool known =
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), length) == 0 &&
      (family == AF_INET ? getsockopt(fd.get(), IPPROTO_IP, IP_MTU, &mtu, &size)
                         : getsockopt(fd.get(), IPPROTO_IPV6, IPV6_MTU, &mtu, &size)) == 0;
  if (!known) fail_system("cannot tell how long a packet may be");
  return static_cast<size_t>(mtu) - (family == AF_INET ? 28 : 48);  // heads of IP and UDP
}

}  // namespace

Socket::Socket(const std::string& beside)
    : in_(kBatch * kPlace),
      out_(kBatch * kPlace),
      in_heads_(kBatch),
      out_heads_(kBatch),
      in_places_(kBatch),
      out_places_(kBatch),
      from_(kBatch),
      controls_(kBatch * kControl),
      out_controls_(kBatch * kSegment) {
  const std::string host = host_of(beside);
  sockaddr_storage at{};
  socklen_t length = read_address(host, "0", &at);
  fd_ = Fd(socket(at.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd_.get() < 0 || bind(fd_.get(), plain(&at), length) != 0) {
    fail_system("cannot make a datagram socket at " + host);
  }
  const int on = 1;
  setsockopt(fd_.get(), SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
  setsockopt(fd_.get(), SOL_UDP, UDP_GRO, &on, sizeof on);
  ask_for_buffer(fd_.get(), SO_RCVBUFFORCE, SO_RCVBUF);
  ask_for_buffer(fd_.get(), SO_SNDBUFFORCE, SO_SNDBUF);
  never_divide(fd_.get(), at.ss_family);
  length = sizeof at;
  getsockname(fd_.get(), plain(&at), &length);
  char port[NI_MAXSERV] = "";
  getnameinfo(plain(&at), length, nullptr, 0, port, sizeof port, NI_NUMERICSERV);
  address_ = std::string("tcp:") + port + ":" + host;
}

size_t Socket::meet(const std::vector<std::string>& addresses) {
  size_t most = kLongest;
  for (const std::string& address : addresses) {
    Peer peer;
    const std::string port = address.substr(4, address.find(':', 4) - 4);
    peer.length = read_address(host_of(address), port, &peer.address);
    if (address != address_) most = std::min(most, most_to(peer.address, peer.length));
    peers_.push_back(peer);
  }
  return most;
}

bool Socket::joins(const Run& run, int to, size_t bytes) const {
  return divides_ && run.to == to && !run.closed && bytes <= run.each &&
         run.packets < kRunPackets && run.bytes + bytes <= kRun;
}

std::byte* Socket::place(size_t most) {
  if (queued_ + most > out_.size() || runs_.size() == kBatch) flush();
  return out_.data() + queued_;
}

void Socket::send(int to, size_t bytes) {
  if (runs_.empty() || !joins(runs_.back(), to, bytes)) {
    runs_.push_back({to, queued_, 0, bytes, 0, false});
  }
  Run& run = runs_.back();
  queued_ += bytes;
  run.bytes += bytes;
  ++run.packets;
  run.closed = bytes < run.each;
}

void Socket::address_run(size_t i) {
  const Run& run = runs_[i];
  Peer& peer = peers_[static_cast<size_t>(run.to)];
  out_places_[i] = {out_.data() + run.at, run.bytes};
  msghdr& head = out_heads_[i].msg_hdr;
  head = {};
  head.msg_name = &peer.address;
  head.msg_namelen = peer.length;
  head.msg_iov = &out_places_[i];
  head.msg_iovlen = 1;
  if (run.packets < 2) return;
  head.msg_control = out_controls_.data() + i * kSegment;
  head.msg_controllen = kSegment;
  cmsghdr* const c = CMSG_FIRSTHDR(&head);
  c->cmsg_level = SOL_UDP;
  c->cmsg_type = UDP_SEGMENT;
  c->cmsg_len = CMSG_LEN(sizeof(uint16_t));
  const auto each = static_cast<uint16_t>(run.each);
  std::memcpy(CMSG_DATA(c), &each, sizeof each);
}

// From now on packets go one by one, those of the runs from `first` on too.
void Socket::divide(size_t first) {
  divides_ = false;
  const std::vector<Run> whole(runs_.begin() + static_cast<std::ptrdiff_t>(first), runs_.end());
  for (const Run& run : whole) {
    runs_.clear();
    for (size_t at = 0; at < run.bytes; at += run.each) {
      if (runs_.size() == kBatch) flush_runs();
      runs_.push_back({run.to, run.at + at, std::min(run.each, run.bytes - at), run.each, 1, true});
    }
    flush_runs();
  }
}

void Socket::flush() {
  flush_runs();
  queued_ = 0;
}

// What the kernel does not take in a moment is lost, as on the way.
void Socket::flush_runs() {
  int patience = 2;  // ms
  for (size_t i = 0; i < runs_.size(); ++i) address_run(i);
  for (size_t sent = 0; sent < runs_.size();) {
    const auto left = static_cast<unsigned>(runs_.size() - sent);
    const int n = sendmmsg(fd_.get(), &out_heads_[sent], left, 0);
    if (n > 0) {
      sent += static_cast<size_t>(n);
      continue;
    }
    if (errno == EINTR) continue;
    if ((errno == EAGAIN || errno == ENOBUFS) && patience-- > 0) {
      pollfd room{fd_.get(), POLLOUT, 0};
      poll(&room, 1, 1);
      continue;
    }
    // No kernel or card that divides.
    if ((errno == EIO || errno == EINVAL || errno == EOPNOTSUPP) && runs_[sent].packets > 1) {
      return divide(sent);
    }
    refused_ += runs_[sent].packets;
    ++sent;  // this one; the kernel may take the next, or say again what a peer's host has answered
  }
  runs_.clear();
}

size_t Socket::receive_batch() {
  for (size_t i = 0; i < kBatch; ++i) {
    in_places_[i] = {in_.data() + i * kPlace, kPlace};
    msghdr& head = in_heads_[i].msg_hdr;
    head = {};
    head.msg_name = &from_[i];
    head.msg_namelen = sizeof from_[i];
    head.msg_iov = &in_places_[i];
    head.msg_iovlen = 1;
    head.msg_control = controls_.data() + i * kControl;
    head.msg_controllen = kControl;
  }
  const int n = recvmmsg(fd_.get(), in_heads_.data(), kBatch, MSG_DONTWAIT, nullptr);
  if (n <= 0) return 0;
  msghdr& last = in_heads_[static_cast<size_t>(n) - 1].msg_hdr;
  for (cmsghdr* c = CMSG_FIRSTHDR(&last); c != nullptr; c = CMSG_NXTHDR(&last, c)) {
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL) {
      std::memcpy(&drops_, CMSG_DATA(c), sizeof drops_);
    }
  }
  return static_cast<size_t>(n);
}

// Of the packets of a run that came as one.
size_t Socket::length_of_each(size_t i) {
  msghdr& head = in_heads_[i].msg_hdr;
  int each = 0;
  for (cmsghdr* c = CMSG_FIRSTHDR(&head); c != nullptr; c = CMSG_NXTHDR(&head, c)) {
    if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO) {
      std::memcpy(&each, CMSG_DATA(c), sizeof each);
    }
  }
  return each > 0 ? static_cast<size_t>(each) : kPlace;
}

// By the address that it came from; the packet only says where to look.
int Socket::sender_of(size_t i, const std::byte* packet, size_t bytes) const {
  Wire w;
  if (bytes < sizeof w) return -1;
  std::memcpy(&w, packet, sizeof w);
  if (w.sender >= peers_.size()) return -1;
  const sockaddr_storage& its = peers_[w.sender].address;
  if (from_[i].ss_family != its.ss_family) return -1;
  if (its.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(its);
    const auto& b = reinterpret_cast<const sockaddr_in&>(from_[i]);
    return a.sin_port == b.sin_port && a.sin_addr.s_addr == b.sin_addr.s_addr ? w.sender : -1;
  }
  const auto& a = reinterpret_cast<const sockaddr_in6&>(its);
  const auto& b = reinterpret_cast<const sockaddr_in6&>(from_[i]);
  const bool same = a.sin6_port == b.sin6_port &&
                    std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof a.sin6_addr) == 0;
  return same ? w.sender : -1;
}

void Socket::wait(int wake, std::chrono::nanoseconds limit, bool reading) const {
  pollfd both[] = {{wake, POLLIN, 0}, {fd_.get(), POLLIN, 0}};
  const auto ns = std::max<int64_t>(0, limit.count());
  const timespec time{ns / 1000000000, ns % 1000000000};
  ppoll(both, reading ? 2 : 1, &time, nullptr);
}

}  // namespace fsccl::datagram
