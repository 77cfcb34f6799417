// A process's way into TCP networks, and to the other processes of its host by unix sockets: one
// listener of each kind and two threads, for all of its groups.
//
// Whoever connects says first, in a frame of its own (connection.h), for which group it comes: by
// the token of the end that it wants to reach, 64 random bits that the end's address() tells. Until
// it has said that it is a stranger, of which no more than kMostStrangers are let in at a time, for
// TcpOptions::hello_time each; when others wait at the door, for kHurry. What comes for a group
// that has not met yet waits until it has; the group looks whether the hello is well signed.
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
  static constexpr size_t kMostStrangers = 256, kMostEarly = 4096, kMostLeft = 1024;
  static constexpr std::chrono::milliseconds kHurry{300};

  // The one of this process with such options, for as long as somebody has it.
  static std::shared_ptr<TcpDevice> of_this_process(const TcpOptions& options);
  explicit TcpDevice(TcpOptions options);
  ~TcpDevice() override;

  std::unique_ptr<Transport> open() override;

  // What follows is for transports. A connection that somebody has opened, and its first frame:
  struct Arrival {
    Fd fd;
    Frame hello;
  };
  // Makes a place for what comes with a token, which it returns; `handler`, of receiving(), is
  // poked when something has come. Then takes what has come, and what is at the door; then closes
  // it. Who comes later of a group that is left in good order, whose key it is, hears a kBye.
  uint64_t enter(EventLoop::Id handler);
  std::vector<Arrival> arrivals(uint64_t token);
  void leave(uint64_t token, const std::optional<Key>& left);
  // Whether somebody is here who has yet to say for whom; the handler is poked when that changes.
  bool has_strangers(uint64_t token);

  const std::string& unix_address() const { return unix_address_; }
  // Each after a space, the best last.
  const std::string& tcp_addresses() const { return tcp_addresses_; }
  const TcpOptions& options() const { return options_; }
  // Bytes of messages that nobody has called for, of all transports.
  std::atomic<size_t>& kept() { return kept_; }
  EventLoop& receiving() { return receiving_; }  // the loop of connections that peers have opened
  EventLoop& sending() { return sending_; }      // and of those opened here

 private:
  using Clock = Connection::Clock;
  struct Stranger {
    Fd fd;
    Frame hello;
    size_t got = 0;
    Clock::time_point made = Clock::now();
  };
  struct Port {
    EventLoop::Id handler;
    std::vector<Arrival> arrived;
    bool waits = false;  // for strangers to become somebody
  };

  void on_events(int fd, uint32_t events) override;
  void on_tick() override;
  void accept_all();
  void listen(bool on);
  void read_all();
  enum class Said { kNothingYet, kHello, kNonsense };
  static Said read(Stranger* s);
  void drop_late();
  void settle(std::map<int, Stranger>::iterator at, Said said);
  void say_bye(Arrival late);

  const TcpOptions options_;
  std::atomic<size_t> kept_{0};
  std::string unix_address_, tcp_addresses_;
  std::vector<Fd> listeners_;
  EventLoop receiving_{"fsccl-messages", true}, sending_{"fsccl-sends", false};
  std::mutex mutex_;  // of all below; who holds a transport's lock may take it, not the other way
  std::map<int, Stranger> strangers_;
  std::map<uint64_t, Port> ports_;
  std::map<uint64_t, Key> left_;  // of groups, by token
  std::deque<uint64_t> left_in_order_;
  std::deque<std::pair<Clock::time_point, Fd>> told_bye_;  // until they have read it
  bool listens_ = false;  // false: there is no room, or no descriptor, for another one
  EventLoop::Id id_ = 0;
};

}  // namespace fsccl
