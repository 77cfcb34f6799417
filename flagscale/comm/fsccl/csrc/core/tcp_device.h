// Access of a process to TCP networks, and to the other processes of its host through Unix sockets:
// one listener per interface, one Unix listener, and two threads, for all of its groups.
//
// A peer that connects first sends a hello frame (connection.h) with the token of the endpoint that
// it wants to reach: 64 random bits, part of the endpoint's address(). Until the hello has arrived,
// the peer is unauthenticated. At most kMaxUnauthenticated such connections are open at a time,
// each for TcpOptions::hello_timeout; for kHelloTimeoutWhenFull if others are waiting to be
// accepted. A connection for a group that does not know its peers yet waits until it does; the
// group verifies the hello.
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

class TcpDevice final : public Device,
                        public std::enable_shared_from_this<TcpDevice>,
                        private EventLoop::Handler {
 public:
  static constexpr size_t kMaxUnauthenticated = 256, kMaxEarlyArrivals = 4096,
                          kMaxClosedGroups = 1024;
  static constexpr std::chrono::milliseconds kHelloTimeoutWhenFull{300};

  // Returns the device of this process for these options; it lives as long as somebody uses it.
  static std::shared_ptr<TcpDevice> of_this_process(const TcpOptions& options);
  explicit TcpDevice(TcpOptions options);
  ~TcpDevice() override;

  std::unique_ptr<Transport> open() override;

  // The rest is for transports. A connection that a peer has opened, and its hello:
  struct Arrival {
    Fd fd;
    Frame hello;
  };
  // register_transport() returns the token of a new endpoint; `handler`, in the loop receiving(),
  // is woken when a connection has arrived for it. take_arrivals() returns these connections.
  // unregister_transport() closes the endpoint; with the key of a group that is left in good order,
  // peers that connect later get a kBye frame.
  uint64_t register_transport(EventLoop::Id handler);
  std::vector<Arrival> take_arrivals(uint64_t token);
  void unregister_transport(uint64_t token, const std::optional<Key>& closed_key);
  // Returns whether a connection is open whose hello has not arrived. The handler is woken when
  // that changes.
  bool has_unauthenticated(uint64_t token);

  const std::string& unix_address() const { return unix_address_; }
  // Each after a space, the best one last.
  const std::string& tcp_addresses() const { return tcp_addresses_; }
  const TcpOptions& options() const { return options_; }
  // Bytes of messages that no receive has matched, of all transports.
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
  // A transport that accepts connections.
  struct Registration {
    EventLoop::Id handler;
    std::vector<Arrival> arrivals;
    bool awaits_unauthenticated = false;  // for has_unauthenticated() to change
  };

  void on_events(int fd, uint32_t events) override;
  void on_tick() override;
  void accept_all();
  void set_accepting(bool on);
  void read_hellos();
  enum class HelloState { kIncomplete, kValid, kInvalid };
  static HelloState read_hello(UnauthenticatedPeer* peer);
  void drop_expired();
  void resolve(std::map<int, UnauthenticatedPeer>::iterator at, HelloState state);
  void send_bye(Arrival arrival);

  const TcpOptions options_;
  std::atomic<size_t> buffered_bytes_{0};
  std::string unix_address_, tcp_addresses_;
  std::vector<Fd> listeners_;
  EventLoop receiving_{"fsccl-messages", true}, sending_{"fsccl-sends", false};
  // Guards all below. May be taken while holding the lock of a transport, but not the other way
  // round.
  std::mutex mutex_;
  std::map<int, UnauthenticatedPeer> unauthenticated_;
  std::map<uint64_t, Registration> registrations_;
  std::map<uint64_t, Key> closed_groups_;  // keys of groups, by token
  std::deque<uint64_t> closed_group_order_;
  std::deque<std::pair<Clock::time_point, Fd>> bye_sent_;  // kept open until the peers have read it
  // False while there is no room, or no descriptor, for another connection.
  bool accepting_ = false;
  EventLoop::Id id_ = 0;
};

}  // namespace fsccl
