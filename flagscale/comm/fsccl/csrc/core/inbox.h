// Matching of messages with receives in a TcpTransport. An Inbox contains the incoming messages of
// one peer, PendingReceives the receives that wait for messages. Messages and receives of a tag
// match in order. The time of a look-up does not depend on the number of entries with that tag. The
// lock of the transport guards all of it.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "request.h"

namespace fsccl {

class Connection;

// A message whose kMessage or kAnnounce frame has arrived (connection.h). Its body may be
// incomplete.
struct IncomingMessage {
  uint64_t number = 0;  // among the messages of its sender to this rank
  uint64_t tag = 0;
  uint64_t total = 0, received = 0;  // bytes of the body
  CollectiveFingerprint fingerprint;
  // The sender waits for kClearToSend before it sends the body.
  bool needs_clear_to_send = false;
  Connection* connection = nullptr;  // connection on which that frame arrived
  RequestPtr request;                // the receive that matches; null until there is one
  // Memory of the body, if no receive matches when the body begins to arrive.
  std::shared_ptr<std::byte[]> buffer;
  bool is_buffered = false;  // the body goes to `buffer`

  bool complete() const { return received == total; }
};

// Receives that wait for messages, by tag.
class PendingReceives {
 public:
  // A receive that waits for a message.
  struct PendingReceive {
    uint64_t number;  // position in posting order among all receives of the transport
    RequestPtr request;
  };

  bool empty() const { return by_tag_.empty(); }
  void add(uint64_t number, RequestPtr request) {
    by_tag_[request->tag].push_back({number, std::move(request)});
  }
  // Returns the first receive of a tag, null if there is none.
  const PendingReceive* first(uint64_t tag) const {
    const auto entry = by_tag_.find(tag);
    return entry == by_tag_.end() ? nullptr : &entry->second.front();
  }
  RequestPtr take_first(uint64_t tag) {
    const auto entry = by_tag_.find(tag);
    RequestPtr out = std::move(entry->second.front().request);
    entry->second.pop_front();
    if (entry->second.empty()) by_tag_.erase(entry);
    return out;
  }
  // Calls f(request) for the first receive of every tag from `min_tag` on.
  template <class F>
  void each_first(uint64_t min_tag, F&& f) const {
    for (auto at = by_tag_.lower_bound(min_tag); at != by_tag_.end(); ++at) {
      f(at->second.front().request);
    }
  }
  void fail_all(const Error& error) {
    for (auto& [tag, receives] : by_tag_) {
      for (const PendingReceive& c : receives) c.request->fail(error);
    }
    by_tag_.clear();
  }

 private:
  std::map<uint64_t, std::deque<PendingReceive>> by_tag_;
};

// The incoming messages of one peer, in the order of their numbers.
class Inbox {
 public:
  // Approximate memory of a message in addition to its body.
  static constexpr size_t kOverheadBytes = 256;

  Inbox() = default;
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  ~Inbox() { set_buffered_bytes(0); }

  // Sets the counter of bytes that all inboxes of the process buffer. Called once, before any
  // message arrives.
  void set_process_counter(std::atomic<size_t>* total) { process_buffered_bytes_ = total; }
  // Bytes of messages that no receive has matched.
  size_t buffered_bytes() const { return buffered_bytes_; }
  static size_t buffered_size(const IncomingMessage& m) {
    return kOverheadBytes + (m.needs_clear_to_send ? 0 : m.total);
  }

  // Adds a message. Its `request` is set if a receive has matched it already.
  IncomingMessage& add(IncomingMessage m) {
    IncomingMessage& added = *messages_.insert(messages_.end(), std::move(m));
    by_number_[added.number] = std::prev(messages_.end());
    if (!added.request) {
      unmatched_[added.tag].push_back(&added);
      set_buffered_bytes(buffered_bytes_ + buffered_size(added));
    }
    return added;
  }
  IncomingMessage* find(uint64_t number) {
    const auto entry = by_number_.find(number);
    return entry == by_number_.end() ? nullptr : &*entry->second;
  }
  // Returns the first unmatched message of a tag, null if there is none.
  IncomingMessage* first_unmatched(uint64_t tag) const {
    const auto entry = unmatched_.find(tag);
    return entry == unmatched_.end() ? nullptr : entry->second.front();
  }
  // Calls f(message) for the first unmatched message of every tag from `min_tag` on.
  template <class F>
  void each_first_unmatched(uint64_t min_tag, F&& f) const {
    for (auto at = unmatched_.lower_bound(min_tag); at != unmatched_.end(); ++at)
      f(*at->second.front());
  }
  // Matches the first unmatched message of its tag with a receive.
  void match(IncomingMessage& m, RequestPtr request) {
    const auto entry = unmatched_.find(m.tag);
    entry->second.pop_front();
    if (entry->second.empty()) unmatched_.erase(entry);
    set_buffered_bytes(buffered_bytes_ - buffered_size(m));
    m.request = std::move(request);
  }
  // Removes a message that has been matched.
  IncomingMessage remove_matched(uint64_t number) {
    const auto entry = by_number_.find(number);
    IncomingMessage out = std::move(*entry->second);
    messages_.erase(entry->second);
    by_number_.erase(entry);
    return out;
  }
  // Called when the peer is lost, so that missing data will not arrive. Fails the matching receives
  // and drops all messages except those that are complete and unmatched.
  void fail_unfinished(const Error& error) {
    for (IncomingMessage& m : messages_) {
      if (m.request) m.request->fail(error);
      m.connection = nullptr;
    }
    std::list<IncomingMessage> previous_messages;
    previous_messages.swap(messages_);
    by_number_.clear();
    unmatched_.clear();
    set_buffered_bytes(0);
    for (IncomingMessage& m : previous_messages) {
      if (m.complete() && !m.needs_clear_to_send && !m.request) add(std::move(m));
    }
  }
  void forget_connection(const Connection* connection) {
    for (IncomingMessage& m : messages_) {
      if (m.connection == connection) m.connection = nullptr;
    }
  }

 private:
  void set_buffered_bytes(size_t bytes) {
    if (process_buffered_bytes_ != nullptr) *process_buffered_bytes_ += bytes - buffered_bytes_;
    buffered_bytes_ = bytes;
  }

  std::list<IncomingMessage> messages_;
  std::unordered_map<uint64_t, std::list<IncomingMessage>::iterator> by_number_;
  std::map<uint64_t, std::deque<IncomingMessage*>> unmatched_;
  size_t buffered_bytes_ = 0;
  std::atomic<size_t>* process_buffered_bytes_ = nullptr;
};

}  // namespace fsccl
