// Access of a process to TCP networks, and to the other processes of its host through Unix sockets:
// one listener per interface, one Unix listener, and two threads, for all of its groups.
//
// A peer that connects first sends a hello frame (connection.h) with the token of the TcpTransport
// that it connects to: 64 random bits, part of the transport's address(). Until the hello has
// arrived, the peer is unauthenticated. At most kMaxUnauthenticated such connections are open at a
// time, each for at most TcpOptions::hello_timeout, or kHelloTimeoutWhenFull if others are waiting
// to be accepted. Connections whose hello has arrived (arrivals) are queued until the transport
// takes them, which it does once it knows its peers. The transport verifies the hello.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "connection.h"
#include "event_loop.h"
#include "socket.h"
#include "transport.h"

namespace fsccl {

// TCP and Unix sockets of one process. Any thread may call.
class TcpDevice final : public Device,
                        public std::enable_shared_from_this<TcpDevice>,
                        private EventLoop::Handler {
 public:
  // Maximum numbers: unauthenticated connections, arrivals that a transport has not taken, and
  // closed groups whose farewells are kept.
  static constexpr size_t kMaxUnauthenticated = 256, kMaxEarlyArrivals = 4096,
                          kMaxClosedGroups = 1024;
  static constexpr std::chrono::milliseconds kHelloTimeoutWhenFull{300}, kMaxAcceptDelay{500};

  // Returns the device of this process for these options, which is created on first use and
  // destroyed with the last pointer to it.
  static std::shared_ptr<TcpDevice> of_this_process(const TcpOptions& options);
  explicit TcpDevice(TcpOptions options);
  ~TcpDevice() override;

  std::unique_ptr<Transport> open() override;

  // All functions below are for TcpTransport.

  // A connection that a peer has opened, and its hello.
  struct Arrival {
    Fd fd;
    Frame hello;
  };
  // What peers are told that connect after a transport has been closed.
  struct Farewell {
    Key key;  // signs the frame
    // The key is that of the group, so that the peer's hello can be verified. False: the key is the
    // farewell key of this rank, which did not know the peers.
    bool is_group_key = true;
    std::optional<Error> failure;  // sent as kAbort; without a failure kBye is sent
  };
  // register_transport() returns the token of a new transport; `handler`, in the loop receiving(),
  // is woken when a connection with this token has arrived. take_arrivals() returns these
  // connections. From unregister_transport() on, peers that connect get the farewell.
  uint64_t register_transport(EventLoop::Id handler);
  std::vector<Arrival> take_arrivals(uint64_t token);
  void unregister_transport(uint64_t token, Farewell farewell);
  // Returns whether there are unauthenticated connections, any of which may be for this transport.
  // If so, its handler is woken when one of them is authenticated or closed.
  bool has_unauthenticated(uint64_t token);

  // Returns why this process could not accept connections for kMaxAcceptDelay, such as a lack of
  // descriptors; empty if it can. Handlers are woken when that begins.
  std::string accept_failure();

  const std::string& unix_address() const { return unix_address_; }
  // One address per interface, each after a space, the preferred one last.
  const std::string& tcp_addresses() const { return tcp_addresses_; }
  const TcpOptions& options() const { return options_; }
  // Counter of the bytes of unmatched messages in the inboxes of all transports.
  std::atomic<size_t>& buffered_bytes() { return buffered_bytes_; }
  EventLoop& receiving() { return receiving_; }  // loop of connections that peers have opened
  EventLoop& sending() { return sending_; }      // loop of connections opened here

 private:
  using Clock = Connection::Clock;
  // A connection whose hello has not arrived completely.
  struct UnauthenticatedPeer {
    Fd fd;
    Frame hello;
    size_t received_bytes = 0;
    Clock::time_point connected_at = Clock::now();
  };
  // A registered transport.
  struct Registration {
    EventLoop::Id handler;
    std::vector<Arrival> arrivals;
    bool wakes_on_unauthenticated_change = false;  // has_unauthenticated() has returned true
  };

  void on_events(int fd, uint32_t events) override;
  void on_tick() override;
  void accept_all();
  void set_accepting(bool on);
  void restore_reserve();
  void read_hellos();
  enum class HelloState { kIncomplete, kValid, kInvalid };
  static HelloState read_hello(UnauthenticatedPeer* peer);
  void drop_expired();
  void resolve_hello(std::map<int, UnauthenticatedPeer>::iterator at, HelloState state);
  void send_farewell(Arrival arrival);

  const TcpOptions options_;
  std::atomic<size_t> buffered_bytes_{0};
  std::string unix_address_, tcp_addresses_;
  std::vector<Fd> listeners_;
  EventLoop receiving_{"fsccl-messages", true}, sending_{"fsccl-sends", false};
  // Guards all below. Lock order: the lock of a transport before this one.
  std::mutex mutex_;
  std::map<int, UnauthenticatedPeer> unauthenticated_;
  std::map<uint64_t, Registration> registrations_;  // by token
  std::map<uint64_t, Farewell> farewells_;          // by token
  std::deque<uint64_t> farewell_order_;             // their tokens, the oldest first
  // Connections on which a farewell was sent at this time; kept open until the peers have read it.
  std::deque<std::pair<Clock::time_point, Fd>> farewell_sent_;
  // New connections are accepted. False while kMaxUnauthenticated is reached or the process is out
  // of descriptors.
  bool accepting_ = false;
  // A descriptor that is given up for a connection if no other is left: on it, a rank whose group
  // has failed for want of descriptors can report that.
  Fd reserve_;
  // Error of accept4() since `accept_failed_at_`; empty while connections are accepted.
  std::string accept_error_;
  Clock::time_point accept_failed_at_;
  EventLoop::Id id_ = 0;
};

}  // namespace fsccl
