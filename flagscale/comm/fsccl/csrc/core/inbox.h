// Messages that one peer has announced, and receives that wait for messages. Messages and receives
// of a tag match in order. Every look-up takes the same time, however many entries there are. The
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

// An announced message.
struct Incoming {
  uint64_t message = 0, tag = 0, total = 0;
  uint64_t received = 0;
  CollectiveFingerprint fingerprint;
  // The sender waits for kClear before it sends the body.
  bool needs_clear = false;
  Connection* connection = nullptr;  // connection on which it was announced
  RequestPtr request;                // null until a receive matches
  // Memory of the body, if no receive has matched when it starts.
  std::shared_ptr<std::byte[]> buffer;
  bool is_buffered = false;  // the body goes to `buffer`

  bool complete() const { return received == total; }
};

// Receives that wait for a message, by tag.
class PendingReceives {
 public:
  // A receive and its position among all receives.
  struct PendingReceive {
    uint64_t order;  // among all receives of the transport, including those from any source
    RequestPtr request;
  };

  bool empty() const { return by_tag_.empty(); }
  void add(uint64_t order, RequestPtr request) {
    by_tag_[request->tag].push_back({order, std::move(request)});
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
  // Calls f(request) for the first receive of every tag from `lowest` on.
  template <class F>
  void each_first(uint64_t lowest, F&& f) const {
    for (auto at = by_tag_.lower_bound(lowest); at != by_tag_.end(); ++at) {
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

// The messages of one peer, in the order of their announcements.
class Inbox {
 public:
  // Approximate memory of a message in addition to its body.
  static constexpr size_t kOverheadBytes = 256;

  Inbox() = default;
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  ~Inbox() { set_buffered_bytes(0); }

  // Sets a counter to which this inbox adds the bytes that it buffers, as other inboxes do. Called
  // once, before any message arrives.
  void set_total_counter(std::atomic<size_t>* total) { total_buffered_ = total; }
  // Bytes of messages that no receive has matched.
  size_t buffered_bytes() const { return buffered_; }
  static size_t buffered_size(const Incoming& m) {
    return kOverheadBytes + (m.needs_clear ? 0 : m.total);
  }

  // Adds a message. Its `request` is set if a receive has matched it already.
  Incoming& add(Incoming m) {
    Incoming& added = *all_.insert(all_.end(), std::move(m));
    by_message_[added.message] = std::prev(all_.end());
    if (!added.request) {
      unmatched_[added.tag].push_back(&added);
      set_buffered_bytes(buffered_ + buffered_size(added));
    }
    return added;
  }
  Incoming* find(uint64_t message) {
    const auto entry = by_message_.find(message);
    return entry == by_message_.end() ? nullptr : &*entry->second;
  }
  // Returns the first unmatched message of a tag, null if there is none.
  Incoming* first_unmatched(uint64_t tag) const {
    const auto entry = unmatched_.find(tag);
    return entry == unmatched_.end() ? nullptr : entry->second.front();
  }
  // Calls f(message) for the first unmatched message of every tag from `lowest` on.
  template <class F>
  void each_first_unmatched(uint64_t lowest, F&& f) const {
    for (auto at = unmatched_.lower_bound(lowest); at != unmatched_.end(); ++at)
      f(*at->second.front());
  }
  // Matches the first unmatched message of its tag with a receive.
  void match(Incoming& m, RequestPtr request) {
    const auto entry = unmatched_.find(m.tag);
    entry->second.pop_front();
    if (entry->second.empty()) unmatched_.erase(entry);
    set_buffered_bytes(buffered_ - buffered_size(m));
    m.request = std::move(request);
  }
  // Removes a message that has been matched.
  Incoming remove_matched(uint64_t message) {
    const auto entry = by_message_.find(message);
    Incoming out = std::move(*entry->second);
    all_.erase(entry->second);
    by_message_.erase(entry);
    return out;
  }
  // The peer is gone, so that missing data will not arrive: fails the requests and drops all
  // messages but complete unmatched ones.
  void fail_unfinished(const Error& error) {
    for (Incoming& m : all_) {
      if (m.request) m.request->fail(error);
      m.connection = nullptr;
    }
    std::list<Incoming> previous;
    previous.swap(all_);
    by_message_.clear();
    unmatched_.clear();
    set_buffered_bytes(0);
    for (Incoming& m : previous) {
      if (m.complete() && !m.needs_clear && !m.request) add(std::move(m));
    }
  }
  void forget_connection(const Connection* connection) {
    for (Incoming& m : all_) {
      if (m.connection == connection) m.connection = nullptr;
    }
  }

 private:
  void set_buffered_bytes(size_t bytes) {
    if (total_buffered_ != nullptr) *total_buffered_ += bytes - buffered_;
    buffered_ = bytes;
  }

  std::list<Incoming> all_;
  std::unordered_map<uint64_t, std::list<Incoming>::iterator> by_message_;
  std::map<uint64_t, std::deque<Incoming*>> unmatched_;
  size_t buffered_ = 0;
  std::atomic<size_t>* total_buffered_ = nullptr;
};

}  // namespace fsccl
