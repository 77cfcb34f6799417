// Stream sockets: unix ones between the processes of a host, TCP between hosts.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace fsccl {

// A descriptor. A child forked from this process has copies of all, which would keep connections
// open that this process ends: they are closed there at once, and no Fd of its parent's closes any.
class Fd {
 public:
  explicit Fd(int fd = -1);
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), owner_(other.owner_) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(owner_, other.owner_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }

 private:
  int fd_;
  pid_t owner_;
};

struct TcpOptions {
  // FSCCL_SOCKET_IFNAME: "eth,ib" take interfaces with these prefixes, "=eth0" exactly this one,
  // "^docker,lo" any but these. Empty: the first that is up and not the loopback, else that.
  std::string interface;
  int interfaces = 1;    // that large messages are divided over (FSCCL_TCP_INTERFACES)
  int connections = 2;   // a pair, for messages worth dividing (FSCCL_TCP_CONNECTIONS)
  int buffer_bytes = 0;  // of a socket, 0 leaves the kernel's tuning (FSCCL_TCP_BUFFER)
  // How long a peer may be unheard (FSCCL_TCP_USER_TIMEOUT). Not the kernel's TCP_USER_TIMEOUT,
  // which also runs while the peer has no room for more, because its program is elsewhere.
  std::chrono::milliseconds user_timeout{30000};
  // Of messages of a peer's that nobody waits for. Above, it waits until somebody waits for one.
  size_t kept_bytes = 256 << 20;
  // And of all peers of the process's groups together, but for one message of each peer.
  size_t all_kept_bytes = size_t{1} << 30;
  // How long who connects may take to say for whom it comes.
  std::chrono::milliseconds hello_time{3000};

  std::string text() const;  // the same for the same values
};

// Addresses are text: "unix:<name>" (abstract) or "tcp:<port>:<numeric host>".
Fd listen_unix(const std::string& name, std::string* address);
// On an address of each interface that the options ask for, the best first.
struct Listener {
  Fd fd;
  std::string address;
};
std::vector<Listener> listen_tcp(const TcpOptions& options);
// Never blocks; the connection may still be under way. Throws Error(kPeerLost), or kSystem where it
// is this process that can make none.
Fd connect_to(const std::string& address, const TcpOptions& options);
Fd accept_from(int listener, const TcpOptions& options);  // -1 when nobody is there
// The error that the connection met, 0 for none.
int pending_error(int fd);
// Whether something that was sent over TCP waits for an acknowledgement, and none of anything has
// come for so long. A peer that takes no more now, and says so, is heard.
bool unheard(int fd, std::chrono::milliseconds for_so_long);
// Whether the peer's host has not got all that was sent over TCP.
bool under_way(int fd);
// A process may have as many descriptors as its hard limit says (RLIMIT_NOFILE), from now on.
void raise_descriptor_limit();
// Ends the connection, or the listening, whatever other processes have inherited it.
void hang_up(int fd);

}  // namespace fsccl
