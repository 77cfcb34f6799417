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

constexpr int kSocketBufferBytes = 8 << 20;
constexpr size_t kControlBytes = CMSG_SPACE(sizeof(uint32_t)) + CMSG_SPACE(sizeof(int));
constexpr size_t kSegmentControlBytes = CMSG_SPACE(sizeof(uint16_t));

// Returns the host of "tcp:<port>:<numeric host>".
std::string host_of(const std::string& address) {
  const size_t colon = address.find(':', 4);
  if (address.rfind("tcp:", 0) != 0 || colon == std::string::npos) {
    fail_usage("not an address: " + address);
  }
  return address.substr(colon + 1);
}

socklen_t parse_address(const std::string& host, const std::string& port, sockaddr_storage* out) {
  addrinfo hints{}, *result = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (const int code = getaddrinfo(host.c_str(), port.c_str(), &hints, &result); code != 0) {
    fail_usage("not an address: " + host + " port " + port + ": " + gai_strerror(code));
  }
  const auto length = static_cast<socklen_t>(result->ai_addrlen);
  std::memcpy(out, result->ai_addr, length);
  freeaddrinfo(result);
  return length;
}

sockaddr* as_sockaddr(sockaddr_storage* a) { return reinterpret_cast<sockaddr*>(a); }

// The force option needs CAP_NET_ADMIN; without it the limit is net.core.rmem_max or wmem_max.
void set_buffer_size(int fd, int force_option, int option) {
  if (setsockopt(fd, SOL_SOCKET, force_option, &kSocketBufferBytes, sizeof kSocketBufferBytes) == 0)
    return;
  setsockopt(fd, SOL_SOCKET, option, &kSocketBufferBytes, sizeof kSocketBufferBytes);
}

// Makes the kernel refuse packets that exceed the path MTU, instead of fragmenting them.
void forbid_fragmentation(int fd, int family) {
  const int v4 = IP_PMTUDISC_DO, v6 = IPV6_PMTUDISC_DO;
  if (family == AF_INET) setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &v4, sizeof v4);
  if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &v6, sizeof v6);
}

// Returns the largest UDP payload to an address, according to the path MTU that the kernel knows.
size_t max_payload_to(const sockaddr_storage& to, socklen_t length) {
  const int family = to.ss_family;
  const Fd fd(socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  int mtu = 0;
  socklen_t size = sizeof mtu;
  const bool is_known =
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), length) == 0 &&
      (family == AF_INET ? getsockopt(fd.get(), IPPROTO_IP, IP_MTU, &mtu, &size)
                         : getsockopt(fd.get(), IPPROTO_IPV6, IPV6_MTU, &mtu, &size)) == 0;
  if (!is_known) fail_system("cannot read the path MTU");
  return static_cast<size_t>(mtu) - (family == AF_INET ? 28 : 48);  // headers of IP and UDP
}

}  // namespace

Socket::Socket(const std::string& tcp_address)
    : recv_buffer_(kBatch * kReceiveSlot),
      send_buffer_(kBatch * kReceiveSlot),
      recv_headers_(kBatch),
      send_headers_(kBatch),
      recv_iovecs_(kBatch),
      send_iovecs_(kBatch),
      senders_(kBatch),
      recv_control_(kBatch * kControlBytes),
      send_control_(kBatch * kSegmentControlBytes) {
  const std::string host = host_of(tcp_address);
  sockaddr_storage at{};
  socklen_t length = parse_address(host, "0", &at);
  fd_ = Fd(socket(at.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd_.get() < 0 || bind(fd_.get(), as_sockaddr(&at), length) != 0) {
    fail_system("cannot make a datagram socket at " + host);
  }
  const int on = 1;
  setsockopt(fd_.get(), SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
  setsockopt(fd_.get(), SOL_UDP, UDP_GRO, &on, sizeof on);
  set_buffer_size(fd_.get(), SO_RCVBUFFORCE, SO_RCVBUF);
  set_buffer_size(fd_.get(), SO_SNDBUFFORCE, SO_SNDBUF);
  forbid_fragmentation(fd_.get(), at.ss_family);
  length = sizeof at;
  getsockname(fd_.get(), as_sockaddr(&at), &length);
  char port[NI_MAXSERV] = "";
  getnameinfo(as_sockaddr(&at), length, nullptr, 0, port, sizeof port, NI_NUMERICSERV);
  address_ = std::string("tcp:") + port + ":" + host;
}

size_t Socket::set_peers(const std::vector<std::string>& addresses) {
  size_t max_bytes = kMaxPacket;
  for (const std::string& address : addresses) {
    Peer peer;
    const std::string port = address.substr(4, address.find(':', 4) - 4);
    peer.length = parse_address(host_of(address), port, &peer.address);
    if (address != address_)
      max_bytes = std::min(max_bytes, max_payload_to(peer.address, peer.length));
    peers_.push_back(peer);
  }
  return max_bytes;
}

bool Socket::fits_run(const Run& run, int to, size_t bytes) const {
  return segmentation_works_ && run.to == to && !run.closed && bytes <= run.segment &&
         run.packets < kMaxRunPackets && run.bytes + bytes <= kMaxRunBytes;
}

std::byte* Socket::reserve(size_t max_bytes) {
  if (queued_ + max_bytes > send_buffer_.size() || runs_.size() == kBatch) flush();
  return send_buffer_.data() + queued_;
}

void Socket::send(int to, size_t bytes) {
  if (runs_.empty() || !fits_run(runs_.back(), to, bytes)) {
    runs_.push_back({to, queued_, 0, bytes, 0, false});
  }
  Run& run = runs_.back();
  queued_ += bytes;
  run.bytes += bytes;
  ++run.packets;
  run.closed = bytes < run.segment;
}

void Socket::prepare_run(size_t i) {
  const Run& run = runs_[i];
  Peer& peer = peers_[static_cast<size_t>(run.to)];
  send_iovecs_[i] = {send_buffer_.data() + run.offset, run.bytes};
  msghdr& header = send_headers_[i].msg_hdr;
  header = {};
  header.msg_name = &peer.address;
  header.msg_namelen = peer.length;
  header.msg_iov = &send_iovecs_[i];
  header.msg_iovlen = 1;
  if (run.packets < 2) return;
  header.msg_control = send_control_.data() + i * kSegmentControlBytes;
  header.msg_controllen = kSegmentControlBytes;
  cmsghdr* const c = CMSG_FIRSTHDR(&header);
  c->cmsg_level = SOL_UDP;
  c->cmsg_type = UDP_SEGMENT;
  c->cmsg_len = CMSG_LEN(sizeof(uint16_t));
  const auto segment = static_cast<uint16_t>(run.segment);
  std::memcpy(CMSG_DATA(c), &segment, sizeof segment);
}

// Disables segmentation, and sends the packets of the runs from index `first` on one by one.
void Socket::send_unsegmented(size_t first) {
  segmentation_works_ = false;
  const std::vector<Run> runs(runs_.begin() + static_cast<std::ptrdiff_t>(first), runs_.end());
  for (const Run& run : runs) {
    runs_.clear();
    for (size_t at = 0; at < run.bytes; at += run.segment) {
      if (runs_.size() == kBatch) flush_runs();
      runs_.push_back(
          {run.to, run.offset + at, std::min(run.segment, run.bytes - at), run.segment, 1, true});
    }
    flush_runs();
  }
}

void Socket::flush() {
  flush_runs();
  queued_ = 0;
}

// Sends the queued runs. Packets that the kernel does not accept within a few milliseconds are
// dropped, as if the network had lost them.
void Socket::flush_runs() {
  int retries = 2;  // after waiting 1 ms each
  for (size_t i = 0; i < runs_.size(); ++i) prepare_run(i);
  for (size_t sent = 0; sent < runs_.size();) {
    const auto remaining = static_cast<unsigned>(runs_.size() - sent);
    const int n = sendmmsg(fd_.get(), &send_headers_[sent], remaining, 0);
    if (n > 0) {
      sent += static_cast<size_t>(n);
      continue;
    }
    if (errno == EINTR) continue;
    if ((errno == EAGAIN || errno == ENOBUFS) && retries-- > 0) {
      pollfd poll_entry{fd_.get(), POLLOUT, 0};
      poll(&poll_entry, 1, 1);
      continue;
    }
    // Neither the kernel nor the card supports segmentation.
    if ((errno == EIO || errno == EINVAL || errno == EOPNOTSUPP) && runs_[sent].packets > 1) {
      return send_unsegmented(sent);
    }
    refused_packets_ += runs_[sent].packets;
    // Continue with the next run: this one alone may be refused, or the error may be an earlier
    // ICMP error of a peer.
    ++sent;
  }
  runs_.clear();
}

size_t Socket::receive_batch() {
  for (size_t i = 0; i < kBatch; ++i) {
    recv_iovecs_[i] = {recv_buffer_.data() + i * kReceiveSlot, kReceiveSlot};
    msghdr& header = recv_headers_[i].msg_hdr;
    header = {};
    header.msg_name = &senders_[i];
    header.msg_namelen = sizeof senders_[i];
    header.msg_iov = &recv_iovecs_[i];
    header.msg_iovlen = 1;
    header.msg_control = recv_control_.data() + i * kControlBytes;
    header.msg_controllen = kControlBytes;
  }
  const int n = recvmmsg(fd_.get(), recv_headers_.data(), kBatch, MSG_DONTWAIT, nullptr);
  if (n <= 0) return 0;
  msghdr& last = recv_headers_[static_cast<size_t>(n) - 1].msg_hdr;
  for (cmsghdr* c = CMSG_FIRSTHDR(&last); c != nullptr; c = CMSG_NXTHDR(&last, c)) {
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL) {
      std::memcpy(&kernel_drops_, CMSG_DATA(c), sizeof kernel_drops_);
    }
  }
  return static_cast<size_t>(n);
}

// Returns the length of the packets of a merged run.
size_t Socket::segment_bytes(size_t i) {
  msghdr& header = recv_headers_[i].msg_hdr;
  int segment = 0;
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO) {
      std::memcpy(&segment, CMSG_DATA(c), sizeof segment);
    }
  }
  return segment > 0 ? static_cast<size_t>(segment) : kReceiveSlot;
}

// Returns the rank that the packet names as its sender if the packet comes from the address of that
// rank, else -1.
int Socket::sender_of(size_t i, const std::byte* packet, size_t bytes) const {
  WireHeader wire_header;
  if (bytes < sizeof wire_header) return -1;
  std::memcpy(&wire_header, packet, sizeof wire_header);
  if (wire_header.sender >= peers_.size()) return -1;
  const sockaddr_storage& expected = peers_[wire_header.sender].address;
  if (senders_[i].ss_family != expected.ss_family) return -1;
  if (expected.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(expected);
    const auto& b = reinterpret_cast<const sockaddr_in&>(senders_[i]);
    return a.sin_port == b.sin_port && a.sin_addr.s_addr == b.sin_addr.s_addr ? wire_header.sender
                                                                              : -1;
  }
  const auto& a = reinterpret_cast<const sockaddr_in6&>(expected);
  const auto& b = reinterpret_cast<const sockaddr_in6&>(senders_[i]);
  const bool is_same_address = a.sin6_port == b.sin6_port &&
                               std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof a.sin6_addr) == 0;
  return is_same_address ? wire_header.sender : -1;
}

void Socket::wait(int wake_fd, std::chrono::nanoseconds timeout, bool until_readable) const {
  pollfd entries[] = {{wake_fd, POLLIN, 0}, {fd_.get(), POLLIN, 0}};
  const auto ns = std::max<int64_t>(0, timeout.count());
  const timespec time{ns / 1000000000, ns % 1000000000};
  ppoll(entries, until_readable ? 2 : 1, &time, nullptr);
}

}  // namespace fsccl::datagram
