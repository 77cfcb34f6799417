#include "socket.h"

#include <netdb.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "../core/types.h"
#include "packet.h"

namespace fsccl::datagram {
namespace {

constexpr int kBuffer = 8 << 20;  // asked for; the kernel gives at most its net.core.rmem_max
constexpr size_t kControl = CMSG_SPACE(sizeof(uint32_t));

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
    : in_(kBatch * kLongest),
      out_(kBatch * kLongest),
      in_heads_(kBatch),
      out_heads_(kBatch),
      in_places_(kBatch),
      out_places_(kBatch),
      from_(kBatch),
      controls_(kBatch * kControl) {
  const std::string host = host_of(beside);
  sockaddr_storage at{};
  socklen_t length = read_address(host, "0", &at);
  fd_ = Fd(socket(at.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd_.get() < 0 || bind(fd_.get(), plain(&at), length) != 0) {
    fail_system("cannot make a datagram socket at " + host);
  }
  const int on = 1;
  int buffer = kBuffer;
  setsockopt(fd_.get(), SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
  setsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
  setsockopt(fd_.get(), SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
  socklen_t size = sizeof buffer;
  getsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &buffer, &size);
  receive_buffer_ = static_cast<size_t>(buffer);
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

void Socket::send(int to, const std::byte* packet, size_t bytes) {
  std::byte* const place = out_.data() + queued_ * kLongest;
  std::copy(packet, packet + bytes, place);
  Peer& peer = peers_[static_cast<size_t>(to)];
  out_places_[queued_] = {place, bytes};
  msghdr& head = out_heads_[queued_].msg_hdr;
  head = {};
  head.msg_name = &peer.address;
  head.msg_namelen = peer.length;
  head.msg_iov = &out_places_[queued_];
  head.msg_iovlen = 1;
  if (++queued_ == kBatch) flush();
}

// What the kernel does not take in a moment is lost, as on the way.
void Socket::flush() {
  int patience = 2;  // ms
  for (size_t sent = 0; sent < queued_;) {
    const int n = sendmmsg(fd_.get(), &out_heads_[sent], static_cast<unsigned>(queued_ - sent), 0);
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
    ++refused_;
    ++sent;  // this one; the kernel may take the next, or say again what a peer's host has answered
  }
  queued_ = 0;
}

size_t Socket::receive_batch() {
  for (size_t i = 0; i < kBatch; ++i) {
    in_places_[i] = {in_.data() + i * kLongest, kLongest};
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

// By the address that it came from; the header only says where to look.
int Socket::sender_of(size_t i) const {
  Header h;
  if (in_heads_[i].msg_len < sizeof h) return -1;
  std::memcpy(&h, in_.data() + i * kLongest, sizeof h);
  if (h.sender >= peers_.size()) return -1;
  const sockaddr_storage& its = peers_[h.sender].address;
  if (from_[i].ss_family != its.ss_family) return -1;
  if (its.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(its);
    const auto& b = reinterpret_cast<const sockaddr_in&>(from_[i]);
    return a.sin_port == b.sin_port && a.sin_addr.s_addr == b.sin_addr.s_addr ? h.sender : -1;
  }
  const auto& a = reinterpret_cast<const sockaddr_in6&>(its);
  const auto& b = reinterpret_cast<const sockaddr_in6&>(from_[i]);
  const bool same = a.sin6_port == b.sin6_port &&
                    std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof a.sin6_addr) == 0;
  return same ? h.sender : -1;
}

void Socket::wait(int wake, std::chrono::nanoseconds limit) const {
  pollfd both[] = {{fd_.get(), POLLIN, 0}, {wake, POLLIN, 0}};
  const auto ns = std::max<int64_t>(0, limit.count());
  const timespec time{ns / 1000000000, ns % 1000000000};
  ppoll(both, 2, &time, nullptr);
}

}  // namespace fsccl::datagram
