// Interface between networks and the algorithms of collectives: tagged messages between any two
// ranks of a group. TcpTransport and TcpDevice implement it for TCP. A network of another kind
// implements a Transport, one per group, and a Device that its groups share.
//
//   Device      access of a process to a network: its addresses, its event loop. One per process.
//   Transport   endpoint of one group on a device. It keeps the state of each peer: connections,
//               sends and receives in progress. It reports peers that cannot be reached.
//   BufferList  memory of a message (buffer_list.h), not accessed once the request has finished
//   Request     a send or a receive in progress (request.h)
//
// Messages of one pair of ranks with one tag match receives in the order in which both were called.
// Ranks that share memory also exchange data in steps (shm_steps.h), which is faster than messages.
//
// The first failure of a group reaches all ranks: abort() on one rank aborts every connected rank
// with the same error message, and calls the abort handler there.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mac.h"
#include "request.h"
#include "settings.h"

namespace fsccl {

class Transport;

// Access of a process to a network. Any thread may call.
class Device {
 public:
  virtual ~Device() = default;
  // Returns the device for these settings. The only function that knows all implementations.
  static std::shared_ptr<Device> of_this_process(const Settings& settings);
  // Creates an endpoint for one more group. From now on, peers that have its address() may connect.
  virtual std::unique_ptr<Transport> open() = 0;
};

// The ranks of a group, indexed by group rank.
struct Peers {
  int rank = 0;                        // of this process
  std::vector<std::string> addresses;  // address() of the transport of every rank
  std::vector<std::string> names;      // of every rank, for messages
  std::vector<bool> same_host;         // whether a rank runs on this host
  Key key;                             // secret of the group, which authenticates its ranks
  std::vector<Key> farewell_keys;      // of every rank, see Transport::set_farewell_key()
};

// Endpoint of one group. Any thread may call.
class Transport {
 public:
  static constexpr int kAnySource = -1;
  // Bit that marks the tags of messages of collectives. All other tags are the user's.
  static constexpr uint64_t kCollectiveTag = uint64_t{1} << 63;

  virtual ~Transport() = default;

  // Returns the address under which peers reach this endpoint, one line of text. It does not
  // change.
  virtual std::string address() const = 0;
  // Sets the peers, once all are known. Before that, only set_farewell_key(), abort() and close()
  // may be called.
  virtual void set_peers(Peers peers) = 0;
  // Sets the key that proves to peers, which know it from the rendezvous, that this rank has left
  // the group, if it leaves before set_peers() and so without the key of the group.
  void set_farewell_key(const Key& key) { farewell_key_ = key; }

  // Starts a send or a receive. The memory must stay valid until the request has finished. A
  // receive fails if the fingerprint of the message differs from its own. A receive of a collective
  // also fails if a message of another collective arrives from the same rank, because collectives
  // arrive in order.
  virtual RequestPtr send(int peer, uint64_t tag, BufferList memory,
                          const CollectiveFingerprint& fingerprint = {}) = 0;
  virtual RequestPtr recv(int peer, uint64_t tag, BufferList memory,
                          const CollectiveFingerprint& fingerprint = {}) = 0;
  // Calls `callback` once the request has finished: now, or later from a thread of the device.
  virtual void notify(const RequestPtr& request, std::function<void()> callback) = 0;
  // Waits until the request has finished. Throws the error of the request, or kTimeout naming the
  // peer. `poll` is called ten times a second and may throw.
  void wait(const RequestPtr& request, const Deadline& deadline, const std::function<void()>& poll);

  // For waits inside a collective: throws if a message of a collective can no longer be sent or
  // received. If a peer ended without closing its transport, it throws only after a grace period,
  // because the peer may have sent everything before. Without this check, a rank that waits for
  // another message would detect the failure too late.
  virtual void raise_transport_error() = 0;

  // Returns the error with which messages of this peer fail from now on, if there is one.
  virtual std::optional<Error> loss_of(int rank) = 0;
  // Returns whether a receive waits for a peer that has never connected. Such a peer may be unable to
  // report its failure through the transport.
  virtual bool awaits_silent_peer() { return false; }
  // Finds out whether the process of a peer runs, by a second connection to it. Waits at most until
  // the deadline.
  virtual ProcessState probe_process(int rank, const Deadline& deadline) = 0;

  // Accepts connections from now on, also before this rank sends or receives anything.
  virtual void listen() = 0;
  // As listen(), and connects to a rank, so that each of the two detects a failure of the other.
  virtual void ensure_connection(int rank) = 0;
  // Queries which rank `rank` waits for, then which rank that one waits for, and so on. Returns the
  // first rank that waits for no other or does not reply before the deadline. `poll` may throw to
  // end the search.
  int find_straggler(int rank, const Deadline& deadline, const std::function<void()>& poll);
  // Sets the handler of these wait queries, which returns the rank that this rank waits for, or -1.
  // A thread of the device calls it.
  void set_wait_query_handler(std::function<int()> handler) {
    wait_query_handler_ = std::move(handler);
  }

  // Fails all requests, in progress or later, and sends `error` to every peer that is connected or
  // connects later. After it returns, the memory of requests is no longer accessed.
  virtual void abort(const Error& error) = 0;
  // Sets the handler of a failure that a peer reports. A thread of the device calls it, once.
  void set_abort_handler(std::function<void(const Error&)> handler) {
    abort_handler_ = std::move(handler);
  }
  // Messages and bytes that this rank has passed to send() so far, by peer. Any thread may call.
  struct Traffic {
    uint64_t messages = 0, bytes = 0;
  };
  virtual std::vector<Traffic> sent_traffic() = 0;
  // Returns a count that grows with every message event. Any thread may call.
  virtual uint64_t progress_count() const = 0;
  // Leaves the group in an orderly way: sends all queued data, and notifies all peers.
  virtual void close() = 0;

 protected:
  // Sends the wait query of find_straggler() to a peer. When its reply has arrived, the request has
  // finished and `peer` of the request is the rank in the reply. Returns null if the peer is lost.
  virtual RequestPtr query_awaited_rank(int rank) = 0;
  const std::string& name(int rank) const { return peers_.names[static_cast<size_t>(rank)]; }
  int ranks() const { return static_cast<int>(peers_.names.size()); }

  Peers peers_;
  Key farewell_key_;
  std::function<int()> wait_query_handler_;
  std::function<void(const Error&)> abort_handler_;
};

}  // namespace fsccl
