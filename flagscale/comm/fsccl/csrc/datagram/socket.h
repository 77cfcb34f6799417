// The datagram socket of a rank: many packets a system call, never longer than the path takes, with
// the kernel's count of what it dropped here because nobody read it in time.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "../core/socket.h"

namespace fsccl::datagram {

class Socket {
 public:
  static constexpr size_t kBatch = 64, kLongest = 8192 + 256;

  // At an address of this host's, "tcp:<any port>:<numeric host>" in the words of core/socket.h.
  // Throws Error.
  explicit Socket(const std::string& beside);

  // As peers find it: 64 bytes at most.
  const std::string& address() const { return address_; }
  // The most that a packet to any of `addresses`, which become known here, can hold.
  size_t meet(const std::vector<std::string>& addresses);

  // Packets wait until there is a batch, or flush().
  void send(int to, const std::byte* packet, size_t bytes);
  void flush();
  // What there is, a batch at most. Calls take(from, packet, bytes): from -1 for a stranger.
  template <class F>
  size_t receive(F&& take) {
    const size_t n = receive_batch();
    for (size_t i = 0; i < n; ++i) {
      take(sender_of(i), in_.data() + i * kLongest, in_heads_[i].msg_len);
    }
    return n;
  }
  // Until there is something to read, or `wake` can be read, or the time is over.
  void wait(int wake, std::chrono::nanoseconds limit) const;

  uint32_t kernel_drops() const { return drops_; }  // of packets for this socket
  uint64_t refused() const { return refused_; }     // by the kernel, of those sent
  size_t receive_buffer() const { return receive_buffer_; }

 private:
  struct Peer {
    sockaddr_storage address{};
    socklen_t length = 0;
  };

  size_t receive_batch();
  int sender_of(size_t i) const;

  Fd fd_;
  std::string address_;
  std::vector<Peer> peers_;
  std::vector<std::byte> in_, out_;
  std::vector<mmsghdr> in_heads_, out_heads_;
  std::vector<iovec> in_places_, out_places_;
  std::vector<sockaddr_storage> from_;
  std::vector<std::byte> controls_;
  size_t queued_ = 0, receive_buffer_ = 0;
  uint32_t drops_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace fsccl::datagram
