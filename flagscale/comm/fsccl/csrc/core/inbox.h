// Of one peer: the messages that it has announced, and the receives that wait for others. Messages
// and receives of a tag meet in order; every look-up takes the same time however many there are.
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

// A message that has been announced.
struct Incoming {
  uint64_t message = 0, tag = 0, total = 0;
  uint64_t received = 0;
  OpCard card;
  bool asks = false;
  Connection* connection = nullptr;  // where it was announced
  RequestPtr request;                // null until a receive matches
  std::shared_ptr<std::byte[]> kept;
  bool keeps = false;  // the body goes to `kept`

  bool complete() const { return received == total; }
};

// Receives that wait for a message, by tag.
class Calls {
 public:
  struct Call {
    uint64_t order;  // among all receives, also those from anyone
    RequestPtr request;
  };

  bool empty() const { return by_tag_.empty(); }
  void add(uint64_t order, RequestPtr request) {
    by_tag_[request->tag].push_back({order, std::move(request)});
  }
  // The first one of a tag; null when there is none.
  const Call* first(uint64_t tag) const {
    const auto found = by_tag_.find(tag);
    return found == by_tag_.end() ? nullptr : &found->second.front();
  }
  RequestPtr take_first(uint64_t tag) {
    const auto found = by_tag_.find(tag);
    RequestPtr out = std::move(found->second.front().request);
    found->second.pop_front();
    if (found->second.empty()) by_tag_.erase(found);
    return out;
  }
  // Calls f(request) of the first one of every tag from `lowest` on.
  template <class F>
  void each_first(uint64_t lowest, F&& f) const {
    for (auto at = by_tag_.lower_bound(lowest); at != by_tag_.end(); ++at) {
      f(at->second.front().request);
    }
  }
  void fail_all(const Error& why) {
    for (auto& [tag, calls] : by_tag_) {
      for (const Call& c : calls) c.request->fail(why);
    }
    by_tag_.clear();
  }

 private:
  std::map<uint64_t, std::deque<Call>> by_tag_;
};

class Inbox {
 public:
  // What a message costs beside its bytes, roughly.
  static constexpr size_t kEachBytes = 256;

  Inbox() = default;
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  ~Inbox() { keep(0); }

  // Counts in `all` too, with other inboxes, what is kept; called once, before anything is.
  void count_in(std::atomic<size_t>* all) { all_kept_ = all; }
  // Of messages that nobody has called for.
  size_t kept_bytes() const { return kept_; }
  static size_t kept_of(const Incoming& m) { return kEachBytes + (m.asks ? 0 : m.total); }

  // `m.request` is set when a receive has matched it already.
  Incoming& add(Incoming m) {
    Incoming& added = *all_.insert(all_.end(), std::move(m));
    by_message_[added.message] = std::prev(all_.end());
    if (!added.request) {
      waiting_[added.tag].push_back(&added);
      keep(kept_ + kept_of(added));
    }
    return added;
  }
  Incoming* find(uint64_t message) {
    const auto found = by_message_.find(message);
    return found == by_message_.end() ? nullptr : &*found->second;
  }
  // The first that nobody has called for; null when there is none.
  Incoming* waiting(uint64_t tag) const {
    const auto found = waiting_.find(tag);
    return found == waiting_.end() ? nullptr : found->second.front();
  }
  // Calls f(message) of the first of every tag from `lowest` on that nobody has called for.
  template <class F>
  void each_waiting(uint64_t lowest, F&& f) const {
    for (auto at = waiting_.lower_bound(lowest); at != waiting_.end(); ++at) f(*at->second.front());
  }
  // Of the first one that waits with its tag.
  void match(Incoming& m, RequestPtr request) {
    const auto found = waiting_.find(m.tag);
    found->second.pop_front();
    if (found->second.empty()) waiting_.erase(found);
    keep(kept_ - kept_of(m));
    m.request = std::move(request);
  }
  // One that has been matched.
  Incoming take(uint64_t message) {
    const auto found = by_message_.find(message);
    Incoming out = std::move(*found->second);
    all_.erase(found->second);
    by_message_.erase(found);
    return out;
  }
  // The peer has gone: what is not there will not come.
  void fail_unfinished(const Error& why) {
    for (Incoming& m : all_) {
      if (m.request) m.request->fail(why);
      m.connection = nullptr;
    }
    std::list<Incoming> before;
    before.swap(all_);
    by_message_.clear();
    waiting_.clear();
    keep(0);
    for (Incoming& m : before) {
      if (m.complete() && !m.asks && !m.request) add(std::move(m));
    }
  }
  void forget_connection(const Connection* connection) {
    for (Incoming& m : all_) {
      if (m.connection == connection) m.connection = nullptr;
    }
  }

 private:
  void keep(size_t bytes) {
    if (all_kept_ != nullptr) *all_kept_ += bytes - kept_;
    kept_ = bytes;
  }

  std::list<Incoming> all_;
  std::unordered_map<uint64_t, std::list<Incoming>::iterator> by_message_;
  std::map<uint64_t, std::deque<Incoming*>> waiting_;
  size_t kept_ = 0;
  std::atomic<size_t>* all_kept_ = nullptr;
};

}  // namespace fsccl
