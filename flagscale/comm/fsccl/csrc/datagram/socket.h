// UDP socket of a rank for the bounded all_reduce. It sends and receives many packets per system
// call (sendmmsg, recvmmsg), never longer than the path MTU, and counts the packets that the kernel
// dropped because they were not read in time. Consecutive packets of one length to one rank pass
// through the kernel as one large packet, which the network card, or the kernel just before it,
// divides (UDP_SEGMENT); received packets are likewise merged (UDP_GRO). One thread at a time
// calls.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "../core/socket.h"

namespace fsccl::datagram {

// UDP socket with batched, segmented sends and receives.
class Socket {
 public:
  static constexpr size_t kBatch = 16;  // runs per system call
  // Maximum bytes of a packet, and bytes and packets of a run.
  static constexpr size_t kMaxPacket = 8192 + 256, kMaxRunBytes = 65'000, kMaxRunPackets = 64;

  // Binds to the host of a TCP address of this process, "tcp:<port>:<numeric host>", with another
  // port. Throws Error.
  explicit Socket(const std::string& tcp_address);

  // Address that peers pass to set_peers(), at most 64 bytes.
  const std::string& address() const { return address_; }
  // Sets the addresses of all ranks of the rail. Returns the largest size of a packet to any of
  // them.
  size_t set_peers(const std::vector<std::string>& addresses);

  // reserve() returns memory for the next packet, of at most `max_bytes`; send() queues the packet
  // in that memory. Queued packets are sent when the queue is full, or by flush().
  std::byte* reserve(size_t max_bytes);
  void send(int to, size_t bytes);
  void flush();
  // Receives at most kBatch runs, and calls handle(from, packet, bytes) for each packet. `from` is
  // the sender's rank in the rail, -1 if it is unknown. Returns whether there may be more.
  template <class F>
  bool receive(F&& handle) {
    const size_t n = receive_batch();
    for (size_t i = 0; i < n; ++i) {
      const std::byte* const data = recv_buffer_.data() + i * kReceiveSlot;
      const size_t run_bytes = recv_headers_[i].msg_len, segment = segment_bytes(i);
      for (size_t at = 0; at < run_bytes; at += segment) {
        const size_t bytes = std::min(segment, run_bytes - at);
        handle(sender_of(i, data + at, bytes), data + at, bytes);
      }
    }
    return n == kBatch;
  }
  // Waits until `wake_fd` is readable or the timeout passes; with `until_readable`, also until a
  // packet can be read.
  void wait(int wake_fd, std::chrono::nanoseconds timeout, bool until_readable) const;

  // Number of received packets that the kernel dropped because the socket buffer was full.
  uint32_t kernel_drops() const { return kernel_drops_; }
  uint64_t refused_packets() const {
    return refused_packets_;
  }  // packets that the kernel refused to send

 private:
  static constexpr size_t kReceiveSlot = 65'536;
  // Address of a rank.
  struct Peer {
    sockaddr_storage address{};
    socklen_t length = 0;
  };
  // Queued packets to one rank of one length; the last packet may be shorter.
  struct Run {
    int to = -1;
    size_t offset = 0, bytes = 0;  // in send_buffer_
    size_t segment = 0;            // bytes of a packet
    size_t packets = 0;            // number of packets
    bool closed = false;           // no packet can be added
  };

  bool fits_run(const Run& run, int to, size_t bytes) const;
  void prepare_run(size_t i);
  void send_unsegmented(size_t first);
  void flush_runs();
  size_t receive_batch();
  size_t segment_bytes(size_t i);
  int sender_of(size_t i, const std::byte* packet, size_t bytes) const;

  Fd fd_;
  std::string address_;
  std::vector<Peer> peers_;
  std::vector<std::byte> recv_buffer_, send_buffer_;
  std::vector<mmsghdr> recv_headers_, send_headers_;
  std::vector<iovec> recv_iovecs_, send_iovecs_;
  std::vector<sockaddr_storage> senders_;
  std::vector<std::byte> recv_control_, send_control_;
  std::vector<Run> runs_;
  size_t queued_ = 0;               // bytes
  bool segmentation_works_ = true;  // the kernel accepts UDP_SEGMENT
  uint32_t kernel_drops_ = 0;
  uint64_t refused_packets_ = 0;
};

}  // namespace fsccl::datagram
