// The datagram socket of a rank: many packets a system call, never longer than the path takes, with
// the kernel's count of what it dropped here because nobody read it in time. Packets of one length
// to one rank go through the kernel as one, which a network card divides, or the kernel just before
// it (UDP_SEGMENT); and packets that follow each other come out of it as one (UDP_GRO).
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "../core/socket.h"

namespace fsccl::datagram {

class Socket {
 public:
  static constexpr size_t kBatch = 16;  // runs of packets
  static constexpr size_t kLongest = 8192 + 256, kRun = 65'000, kRunPackets = 64;

  // At an address of this host's, "tcp:<any port>:<numeric host>" in the words of core/socket.h.
  // Throws Error.
  explicit Socket(const std::string& beside);

  // As peers find it: 64 bytes at most.
  const std::string& address() const { return address_; }
  // The most that a packet to any of `addresses`, which become known here, can hold.
  size_t meet(const std::vector<std::string>& addresses);

  // Where the next packet is to be made, of so many bytes at most; and sends what is there. Packets
  // wait until there are many, or flush().
  std::byte* place(size_t most);
  void send(int to, size_t bytes);
  void flush();
  // What there is, a batch at most; whether there may be more. Calls take(from, packet, bytes): from
  // -1 for a stranger.
  template <class F>
  bool receive(F&& take) {
    const size_t n = receive_batch();
    for (size_t i = 0; i < n; ++i) {
      const std::byte* const run = in_.data() + i * kPlace;
      const size_t all = in_heads_[i].msg_len, each = length_of_each(i);
      for (size_t at = 0; at < all; at += each) {
        const size_t bytes = std::min(each, all - at);
        take(sender_of(i, run + at, bytes), run + at, bytes);
      }
    }
    return n == kBatch;
  }
  // Until `wake` can be read, or the time is over; or until there is something to read, `reading`.
  void wait(int wake, std::chrono::nanoseconds limit, bool reading) const;

  uint32_t kernel_drops() const { return drops_; }  // of packets for this socket
  uint64_t refused() const { return refused_; }     // by the kernel, of those sent

 private:
  static constexpr size_t kPlace = 65'536;
  struct Peer {
    sockaddr_storage address{};
    socklen_t length = 0;
  };
  struct Run {  // of packets of one length, of which the last may be shorter
    int to = -1;
    size_t at = 0, bytes = 0, each = 0, packets = 0;
    bool closed = false;
  };

  bool joins(const Run& run, int to, size_t bytes) const;
  void address_run(size_t i);
  void divide(size_t first);
  void flush_runs();
  size_t receive_batch();
  size_t length_of_each(size_t i);
  int sender_of(size_t i, const std::byte* packet, size_t bytes) const;

  Fd fd_;
  std::string address_;
  std::vector<Peer> peers_;
  std::vector<std::byte> in_, out_;
  std::vector<mmsghdr> in_heads_, out_heads_;
  std::vector<iovec> in_places_, out_places_;
  std::vector<sockaddr_storage> from_;
  std::vector<std::byte> controls_, out_controls_;
  std::vector<Run> runs_;
  size_t queued_ = 0;  // bytes
  bool divides_ = true;                     // the kernel divides runs
  uint32_t drops_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace fsccl::datagram
