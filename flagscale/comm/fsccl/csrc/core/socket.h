// Stream sockets: Unix sockets between the processes of a host, TCP between hosts.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "types.h"

namespace fsccl {

// Owner of a file descriptor. A forked child inherits copies of all descriptors, which would keep
// connections open that the parent closes. Therefore a fork handler closes the descriptors of all
// Fd objects in the child, where their destructors do nothing.
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

// Settings of TCP connections. Groups with equal values share a TcpDevice.
struct TcpOptions {
  // FSCCL_SOCKET_IFNAME: "eth,ib" selects interfaces with these prefixes, "=eth0" exactly this one,
  // "^docker,lo" all but these. Empty: the first interface that is up and not the loopback, else
  // the loopback.
  std::string interface;
  // FSCCL_TCP_INTERFACES: number of interfaces over which large messages are striped.
  int interfaces = 1;
  // FSCCL_TCP_CONNECTIONS: number of connections per pair of ranks, over which large messages are
  // striped.
  int connections = 2;
  int buffer_bytes = 0;  // FSCCL_TCP_BUFFER: size of socket buffers; 0: the kernel's autotuning
  // FSCCL_TCP_USER_TIMEOUT: time without an acknowledgement of sent data after which a peer is
  // lost. This is not the kernel's TCP_USER_TIMEOUT, which also runs while the receive buffer of
  // the peer is full because its program is busy.
  std::chrono::milliseconds user_timeout{30000};
  // Maximum bytes of unmatched messages of one peer. Above it, nothing is read from the peer until
  // a receive waits for one of its messages.
  size_t max_buffered_bytes = 256 << 20;
  // Maximum for all peers of all groups of the process together, in addition to one message per
  // peer.
  size_t max_total_buffered_bytes = size_t{1} << 30;
  // Maximum time from a new connection to its hello frame.
  std::chrono::milliseconds hello_timeout{3000};

  std::string text() const;  // equal for equal values
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
// Finds out by a connection whether a process listens at a TCP address. The host refuses the
// connection if the process has ended; kUnknown: nothing answered before the deadline.
ProcessState probe_listener(const std::string& address, const TcpOptions& options,
                            const Deadline& deadline);
Fd accept_from(int listener, const TcpOptions& options);  // -1 if no connection is pending
// Returns the errno of a broken connection, 0 if there is no error.
int pending_error(int fd);
// Returns whether data sent over TCP has not been acknowledged for `duration`. A peer whose receive
// buffer is full (zero window) still acknowledges.
bool has_been_unacknowledged_for(int fd, std::chrono::milliseconds duration);
// Returns whether the peer's host has yet to acknowledge data sent over TCP.
bool has_unacknowledged_data(int fd);
// Raises the soft limit on descriptors (RLIMIT_NOFILE) to the hard limit.
void raise_descriptor_limit();
// Shuts down a connection or a listening socket, even if other processes have inherited it.
void shut_down_socket(int fd);

}  // namespace fsccl
