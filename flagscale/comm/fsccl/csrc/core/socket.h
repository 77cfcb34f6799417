// Stream sockets: Unix sockets between the processes of a host, TCP between hosts.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace fsccl {

// A file descriptor. A forked child would inherit copies of all descriptors, which would keep
// connections open that this process closes. They are therefore closed in the child at once, and no
// Fd of the parent closes any there.
class Fd {
 public:
  explicit Fd(int fd = -1);
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), owner_pid_(other.owner_pid_) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(owner_pid_, other.owner_pid_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }

 private:
  int fd_;
  pid_t owner_pid_;
};

// Settings of TCP connections, which all groups with the same values share a TcpDevice for.
struct TcpOptions {
  // FSCCL_SOCKET_IFNAME: "eth,ib" selects interfaces with these prefixes, "=eth0" exactly this one,
  // "^docker,lo" all but these. Empty: the first interface that is up and not the loopback, else
  // the loopback.
  std::string interface;
  // FSCCL_TCP_INTERFACES: number of interfaces that large messages are divided over
  int interfaces = 1;
  int connections = 2;  // FSCCL_TCP_CONNECTIONS: connections of a pair, for messages worth dividing
  int buffer_bytes = 0;  // FSCCL_TCP_BUFFER: socket buffers; 0: the kernel's autotuning
  // FSCCL_TCP_USER_TIMEOUT: how long a peer may acknowledge nothing. This is not the kernel's
  // TCP_USER_TIMEOUT, which also runs while the peer has no room for more data because its program
  // is busy elsewhere.
  std::chrono::milliseconds user_timeout{30000};
  // Limit on buffered messages of one peer that no receive matches. Above it, the peer is stalled
  // until a receive waits for one of its messages.
  size_t buffered_bytes = 256 << 20;
  // The same for all peers of all groups of the process, in addition to one message per peer.
  size_t total_buffered_bytes = size_t{1} << 30;
  // Time that a new connection may take until its hello has arrived.
  std::chrono::milliseconds hello_timeout{3000};

  std::string text() const;  // a key for these values
};

// Addresses are text: "unix:<name>" (abstract socket) or "tcp:<port>:<numeric host>".
Fd listen_unix(const std::string& name, std::string* address);
// Listens on one address of each selected interface, the best one first.
struct Listener {
  Fd fd;
  std::string address;
};
std::vector<Listener> listen_tcp(const TcpOptions& options);
// Starts a connection without blocking; it may not be established yet. Throws Error(kPeerLost), or
// kSystem if this process cannot make any connection.
Fd connect_to(const std::string& address, const TcpOptions& options);
Fd accept_from(int listener, const TcpOptions& options);  // -1 if no connection is pending
// Returns the errno of a broken connection, 0 if it is fine.
int pending_error(int fd);
// Returns whether data sent over TCP waits for an acknowledgement and none has arrived for
// `duration`. A peer that advertises a zero window is alive.
bool unheard_for(int fd, std::chrono::milliseconds duration);
// Returns whether the host of the peer has yet to acknowledge data sent over TCP.
bool has_unacknowledged_data(int fd);
// Raises the soft limit on descriptors (RLIMIT_NOFILE) to the hard limit.
void raise_descriptor_limit();
// Shuts down a connection or a listening socket, even if other processes have inherited it.
void shut_down_socket(int fd);

}  // namespace fsccl
