// What algorithms ask of what carries their data between any two ranks: tagged messages. Whoever
// brings another network brings a Transport, for a group, and what its groups share: a Device.
//
//   Device      a process's way into a network: its address, its event loop. One a process.
//   Transport   of one group on a device. It has a pair a peer: what connects the two, and what
//               waits on either side. A rank that it does not reach is its business to name.
//   BufferList  the memory of a message (buffer_list.h), left alone once the request has finished
//   Request     a send or a receive under way (request.h)
//
// Messages of one pair with one tag match receives in the order in which both were called. Ranks
// that share memory have steps beside messages (shm_steps.h), for what these are too slow.
//
// The first failure of a group is told to all: abort() here is abort() everywhere that is
// connected, with the same words, and on_abort() there.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "mac.h"
#include "request.h"
#include "settings.h"

namespace fsccl {

class Transport;

class Device {
 public:
  virtual ~Device() = default;
  // The one that the settings ask for. The only place that knows which there are.
  static std::shared_ptr<Device> of_this_process(const Settings& settings);
  // An end for one more group. Peers may connect from now on that know what addresses() says.
  virtual std::unique_ptr<Transport> open() = 0;
};

// What a group has learned of its ranks.
struct Peers {
  int rank = 0;                        // of this process
  std::vector<std::string> addresses;  // of every rank, as its transport calls itself
  std::vector<std::string> names;      // of every rank, for messages
  std::vector<bool> near;              // those of this host
  Key key;                             // that they share, and nobody else has
};

class Transport {
 public:
  static constexpr int kAnySource = -1;
  static constexpr uint64_t kCollectiveTag = uint64_t{1} << 63;

  virtual ~Transport() = default;

  // How peers find this end, in one line of text; the same for as long as it lives.
  virtual std::string address() const = 0;
  // Who they are, once all are known. Before it nothing below but abort() and close().
  virtual void meet(Peers peers) = 0;

  // The memory must stay valid until the request has finished. A message whose card is not the
  // receiver's fails it; so does one of another collective, where one of a collective is awaited:
  // they come in order.
  virtual RequestPtr send(int peer, uint64_t tag, BufferList memory, const OpCard& card = {}) = 0;
  virtual RequestPtr recv(int peer, uint64_t tag, BufferList memory, const OpCard& card = {}) = 0;
  // Calls `then` once the request has finished: now, or later from a thread of the device's.
  virtual void notify(const RequestPtr& request, std::function<void()> then) = 0;
  // Throws the request's error; kTimeout names the peer. `watch` is called ten times a second.
  void wait(const RequestPtr& request, const Deadline& deadline,
            const std::function<void()>& watch);

  // For who waits in a collective: throws why a message of a collective's cannot go or come any
  // more, if one cannot, or, a moment later, that a peer has ended without a word, which may have
  // done its part. Whoever waits for another message would learn it too late.
  virtual void throw_trouble() = 0;

  // Answers from now on, also before this rank sends or receives anything.
  virtual void listen() = 0;
  // As listen(), and connects to a rank, which then hears of a failure here, as this one of its.
  virtual void touch(int rank) = 0;
  // Asks a rank whom it waits for, and that one, and so on: the first of them that waits for nobody
  // or does not answer before the deadline. Throws what `watch` throws.
  int trace(int rank, const Deadline& deadline, const std::function<void()>& watch);
  // How this rank answers; called by a thread of the device's.
  void on_ask(std::function<int()> answer) { answer_ = std::move(answer); }

  // Fails everything under way and all that comes later, and tells every peer that is connected or
  // connects later. Afterwards no memory of any request is touched any more.
  virtual void abort(const Error& why) = 0;
  // Called, once, from a thread of the device's when a peer reports that the group failed.
  void on_abort(std::function<void(const Error&)> handler) { aborted_ = std::move(handler); }
  // What this rank has called send() for so far, by peer. Any thread may call.
  struct Traffic {
    uint64_t messages = 0, bytes = 0;
  };
  virtual std::vector<Traffic> sent() = 0;
  // How often something has gone or come. Any thread may call.
  virtual uint64_t moved() const = 0;
  // Leaves in good order: flushes, says bye.
  virtual void close() = 0;

 protected:
  // A question to a peer whom it waits for; the answer becomes the request's peer. Null where the
  // peer is gone.
  virtual RequestPtr ask(int rank) = 0;
  const std::string& name(int rank) const { return peers_.names[static_cast<size_t>(rank)]; }
  int ranks() const { return static_cast<int>(peers_.names.size()); }

  Peers peers_;
  std::function<int()> answer_;
  std::function<void(const Error&)> aborted_;
};

}  // namespace fsccl
