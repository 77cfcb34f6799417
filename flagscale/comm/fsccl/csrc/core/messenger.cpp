// Matching sends with receives. The threads and connections are in messenger_io.cpp, and how they
// end in messenger_ends.cpp.
#include "messenger.h"

#include <algorithm>
#include <utility>

namespace fsccl {

RequestPtr Messenger::send(int to, uint64_t tag, Pieces memory, uint32_t digest) {
  auto request = std::make_shared<Request>();
  request->peer = to;
  request->tag = tag;
  request->memory = std::move(memory);
  Hold hold(guard_);
  if (failed_) {
    request->fail(*failed_);
    return request;
  }
  Peer& p = peer(to);
  if (p.gone || !connect(to)) {
    request->fail(p.gone ? *p.gone : *p.ending);
    return request;
  }
  const size_t bytes = request->memory.bytes();
  const bool asks = bytes > kEagerBytes && (tag & kCollectiveTag) == 0;
  Frame f;
  f.tag = tag;
  f.digest = digest;
  f.message = p.next_message++;
  f.total = bytes;
  if (asks || (bytes > kStripeBytes && p.out.size() > 1)) {
    f.kind = FrameKind::kAnnounce;
    f.flags = asks ? kAsks : 0;
    queue(p.out[0], f);
    if (asks) {
      p.held.emplace(f.message, request);
    } else {
      send_stripes(p, f.message, request);
    }
  } else {
    f.kind = FrameKind::kMessage;
    f.bytes = bytes;
    queue(p.out[0], f, {request->memory, request, nullptr});
  }
  push_queued(hold);
  return request;
}

void Messenger::send_stripes(Peer& to, uint64_t message, const RequestPtr& request) {
  const size_t bytes = request->memory.bytes();
  const size_t ways = std::min(to.out.size(), ceil_div(bytes, kStripeBytes));
  request->parts = ways;
  for (size_t i = 0; i < ways; ++i) {
    const Interval part = cut(bytes, ways, i, 4096);
    Frame f;
    f.kind = FrameKind::kStripe;
    f.message = message;
    f.bytes = part.size();
    f.offset = part.lo;
    f.total = bytes;
    queue(to.out[i], f, {request->memory.slice(part), request, nullptr});
  }
}

RequestPtr Messenger::recv(int from, uint64_t tag, Pieces memory, uint32_t digest) {
  auto request = std::make_shared<Request>();
  request->peer = from;
  request->tag = tag;
  request->digest = digest;
  request->memory = std::move(memory);
  Hold hold(guard_);
  const int first = from == kAnySource ? 0 : from;
  const int last = from == kAnySource ? static_cast<int>(peers_.size()) - 1 : from;
  for (int r = first; r <= last; ++r) {
    Peer& p = peer(r);
    const auto waiting = [tag](const Incoming& m) { return !m.request && m.tag == tag; };
    const auto found = std::find_if(p.incoming.begin(), p.incoming.end(), waiting);
    if (found == p.incoming.end()) continue;
    request->peer = r;
    match(*found, request);
    if (found->received == found->total) finish(p, found, hold);
    resume(r);
    push_queued(hold);
    return request;
  }
  if (failed_) {
    request->fail(*failed_);
    return request;
  }
  ensure_started(opened_by_peers_, kReceiverName);
  // Being connected is how the loss of the sender is noticed.
  for (int r = first; r <= last; ++r) {
    if (r == config_.rank) continue;
    if (!peer(r).gone) connect(r);
    if (peer(r).gone && (from != kAnySource || !anybody_left())) {
      request->fail(*peer(r).gone);
      return request;
    }
  }
  (from == kAnySource ? any_ : peer(from).posted).push_back({next_order_++, request});
  for (int r = first; r <= last; ++r) resume(r);
  push_queued(hold);
  return request;
}

// The receive that was called first among those that this message fits.
RequestPtr Messenger::take_posted(int from, uint64_t tag) {
  const auto fits = [tag](const Posted& p) { return p.request->tag == tag; };
  auto& own = peer(from).posted;
  const auto a = std::find_if(own.begin(), own.end(), fits);
  const auto b = std::find_if(any_.begin(), any_.end(), fits);
  const bool any = b != any_.end() && (a == own.end() || b->order < a->order);
  if (!any && a == own.end()) return nullptr;
  RequestPtr request = any ? b->request : a->request;
  if (any) {
    any_.erase(b);
  } else {
    own.erase(a);
  }
  return request;
}

void Messenger::match(Incoming& m, RequestPtr request) {
  m.request = std::move(request);
  const size_t expected = m.request->memory.bytes();
  const int who = m.request->peer;
  if (expected != m.total) {
    m.request->fail(Error(Fault::kMismatch, who,
                          name(who) + " sent " + std::to_string(m.total) +
                              " bytes where this rank expects " + std::to_string(expected)));
  } else if (m.digest != m.request->digest) {
    m.request->fail(
        Error(Fault::kMismatch, who,
              name(who) + " called another operation, or the sizes of the ranks' parts differ"));
  }
  if (!m.asks) return;
  Frame clear;
  clear.kind = FrameKind::kClear;
  clear.message = m.message;
  if (m.link != nullptr) queue(pointer_to(*m.link), clear);
}

Body Messenger::target_of(Link& link, Incoming& m, Interval range) {
  if (m.request && m.request->over()) return link.filler(range.size());  // not what it expects
  if (m.request && !m.keeps) return {m.request->memory.slice(range), m.request, nullptr};
  if (!m.keeps) m.kept.reset(new std::byte[m.total]);
  m.keeps = true;
  return {Pieces(m.kept.get() + range.lo, range.size()), nullptr, m.kept};
}

// Somebody who waits for a message of this peer's may have to take in others before.
bool Messenger::keeps_enough(const Peer& from, const Frame& frame) const {
  const bool awaited = !from.posted.empty() || !any_.empty();
  if (awaited || frame.total == 0 || (frame.flags & kAsks) != 0) return false;
  size_t kept = 0;
  for (const Incoming& m : from.incoming) kept += m.request || m.asks ? 0 : m.total;
  return kept > 0 && kept + frame.total > config_.kept_bytes;
}

// Connections of a peer's that could not go on may be able to now.
void Messenger::resume(int rank) {
  if (!std::exchange(peer(rank).stalled, false)) return;
  for (auto& [fd, link] : links_) {
    if (link->peer() != rank || !link->stalled()) continue;
    link->resume();
    poll_for(*link);
  }
}

LinkOwner::Answer Messenger::on_announced(Link& link, const Frame& frame, Body* into) {
  Peer& from = peer(link.peer());
  if (keeps_enough(from, frame)) return Answer::kStall;
  Incoming& m = from.incoming.emplace_back();
  m.message = frame.message;
  m.tag = frame.tag;
  m.total = frame.total;
  m.digest = frame.digest;
  m.asks = (frame.flags & kAsks) != 0;
  m.link = &link;
  if (RequestPtr request = take_posted(link.peer(), frame.tag)) {
    request->peer = link.peer();
    match(m, request);
  }
  if (frame.kind == FrameKind::kMessage) *into = target_of(link, m, {0, frame.total});
  resume(link.peer());  // a stripe may have overtaken this announcement
  return Answer::kBody;
}

void Messenger::received(Peer& from, const Frame& frame, Hold& hold) {
  const auto m = std::find_if(from.incoming.begin(), from.incoming.end(),
                              [&frame](const Incoming& i) { return i.message == frame.message; });
  if (m == from.incoming.end()) return;
  m->received += frame.bytes;
  if (m->received == m->total && m->request) finish(from, m, hold);
}

void Messenger::finish(Peer& from, std::list<Incoming>::iterator m, Hold& hold) {
  const Incoming done = std::move(*m);
  from.incoming.erase(m);
  Request& request = *done.request;
  if (request.over()) return;
  if (done.keeps) {
    const Body body{request.memory, done.request, done.kept};
    hold.copy(body, done.total, [&] { body.memory.copy_from(done.kept.get(), {0, done.total}); });
  }
  request.succeed();
}

RequestPtr Messenger::ask(int rank) {
  auto request = std::make_shared<Request>();
  Hold hold(guard_);
  if (failed_ || peer(rank).gone || !connect(rank)) return nullptr;
  Frame f;
  f.kind = FrameKind::kAsk;
  f.tag = next_order_++;
  asked_[f.tag] = request;
  queue(peer(rank).out[0], f);
  push_queued(hold);
  return request;
}

void Messenger::on_ask(Link& link, const Frame& frame) {
  Frame f;
  f.kind = FrameKind::kAnswer;
  f.tag = frame.tag;
  f.message = static_cast<uint64_t>(static_cast<int64_t>(answer_ ? answer_() : -1));
  queue(pointer_to(link), f);
}

void Messenger::on_answer(const Frame& frame) {
  const auto asked = asked_.find(frame.tag);
  if (asked == asked_.end()) return;
  asked->second->peer = static_cast<int>(static_cast<int64_t>(frame.message));
  asked->second->succeed();
  asked_.erase(asked);
}

int Messenger::trace(int rank, const Deadline& deadline, const std::function<void()>& watch) {
  const int ranks = static_cast<int>(config_.addresses.size());
  for (int hops = 0; hops < ranks && rank != config_.rank; ++hops) {
    const RequestPtr asked = ask(rank);
    if (!asked) return rank;
    while (!asked->finished() && !deadline.passed()) {
      asked->sleep(std::min(Deadline::Ms(20), deadline.remaining()));
      watch();
    }
    const int next = asked->finished() ? asked->peer.load() : -1;
    if (next < 0 || next >= ranks || next == config_.rank) return rank;
    rank = next;
  }
  return rank;
}

}  // namespace fsccl
