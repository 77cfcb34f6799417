// Matching sends with receives. The threads and connections are in tcp_io.cpp, and how they
// end in tcp_ends.cpp.
#include "tcp_transport.h"

#include <algorithm>
#include <utility>

namespace fsccl {

RequestPtr TcpTransport::send(int to, uint64_t tag, BufferList memory, const OpCard& card) {
  auto request = std::make_shared<Request>();
  request->peer = to;
  request->tag = tag;
  request->memory = std::move(memory);
  Hold hold(guard_);
  if (failed_) {
    request->fail(*failed_);
    return request;
  }
  Pair& p = pair(to);
  const size_t bytes = request->memory.bytes();
  if (p.gone || !connect(to, bytes)) {
    request->fail(p.gone ? *p.gone : *p.ending);
    return request;
  }
  const bool asks = bytes > kEagerBytes && (tag & kCollectiveTag) == 0;
  Frame f;
  f.tag = tag;
  f.card = card;
  f.message = p.next_message++;
  p.sent_bytes += bytes;
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

std::vector<Transport::Traffic> TcpTransport::sent() {
  const Hold hold(guard_);
  std::vector<Traffic> out;
  for (const Pair& p : pairs_) out.push_back({p.next_message, p.sent_bytes});
  return out;
}

void TcpTransport::send_stripes(Pair& to, uint64_t message, const RequestPtr& request) {
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

RequestPtr TcpTransport::recv(int from, uint64_t tag, BufferList memory, const OpCard& card) {
  auto request = std::make_shared<Request>();
  request->peer = from;
  request->tag = tag;
  request->card = card;
  request->memory = std::move(memory);
  Hold hold(guard_);
  if ((tag & kCollectiveTag) != 0 && from != kAnySource && left_over(from, *request))
    return request;
  const int first = from == kAnySource ? 0 : from;
  const int last = from == kAnySource ? static_cast<int>(pairs_.size()) - 1 : from;
  for (int r = first; r <= last; ++r) {
    Inbox& inbox = pair(r).inbox;
    Incoming* const found = inbox.waiting(tag);
    if (found == nullptr) continue;
    request->peer = r;
    inbox.match(*found, request);
    compare(*found);
    if (found->complete()) finish(pair(r), found->message, hold);
    resume(r);
    push_queued(hold);
    return request;
  }
  if (failed_) {
    request->fail(*failed_);
    return request;
  }
  start_threads();
  // Being connected is how the loss of the sender is noticed.
  for (int r = first; r <= last; ++r) {
    if (r == peers_.rank) continue;
    if (!pair(r).gone) connect(r);
    const bool matters = from != kAnySource || !pair(r).said_bye || !anybody_left();
    if (pair(r).gone && matters) {
      request->fail(*pair(r).gone);
      note_trouble(*request, *pair(r).gone);
      return request;
    }
  }
  (from == kAnySource ? any_ : pair(from).calls).add(next_order_++, request);
  if (from != kAnySource && (tag & kCollectiveTag) != 0) {
    pair(from).inbox.each_waiting(kCollectiveTag, [&](Incoming& m) { compare_order(from, m); });
  }
  for (int r = first; r <= last; ++r) resume(r);
  push_queued(hold);
  return request;
}

// The receive that was called first among those that this message fits.
RequestPtr TcpTransport::take_call(int from, uint64_t tag) {
  Calls& own = pair(from).calls;
  const Calls::Call* const a = own.first(tag);
  const Calls::Call* const b = any_.first(tag);
  if (a == nullptr && b == nullptr) return nullptr;
  const bool any = a == nullptr || (b != nullptr && b->order < a->order);
  return (any ? any_ : own).take_first(tag);
}

// Of a message with the receive that it has met.
void TcpTransport::compare(Incoming& m) {
  const RequestPtr& r = m.request;
  const int who = r->peer;
  if (m.card != r->card) {
    r->fail(unlike({who, name(who), m.card}, {peers_.rank, name(peers_.rank), r->card}, who));
  } else if (r->memory.bytes() != m.total) {
    r->fail(Error(Fault::kMismatch, who,
                  other_size(name(who), m.total, name(peers_.rank), r->memory.bytes())));
  }
  if (r->error) note_trouble(*r, *r->error);
  if (!m.asks) return;
  Frame clear;
  clear.kind = FrameKind::kClear;
  clear.message = m.message;
  if (m.connection != nullptr) queue(pointer_to(*m.connection), clear);
}

// Whether a message of an earlier collective is still there, for which nobody has called: so this
// rank has called another then. Fails the receive.
bool TcpTransport::left_over(int from, Request& r) {
  pair(from).inbox.each_waiting(kCollectiveTag, [&](const Incoming& m) {
    if (m.card.sequence >= r.card.sequence || r.error) return;
    r.fail(unlike({from, name(from), m.card}, {peers_.rank, name(peers_.rank), r.card}, from));
    note_trouble(r, *r.error);
  });
  return r.error != nullptr;
}

// A message of a collective for which nobody has called, while another is awaited of its sender:
// all messages of an operation are announced before those of the next, and taken by it.
void TcpTransport::compare_order(int from, const Incoming& m) {
  pair(from).calls.each_first(kCollectiveTag, [&](const RequestPtr& r) {
    if (r->card == m.card) return;  // another stream of the same
    const Error why =
        unlike({from, name(from), m.card}, {peers_.rank, name(peers_.rank), r->card}, from);
    r->fail(why);
    note_trouble(*r, why);
  });
}

void TcpTransport::note_trouble(const Request& request, const Error& why) {
  if ((request.tag & kCollectiveTag) != 0) note_trouble(why, Connection::Clock::now());
}

// The one that counts from the earliest time on.
void TcpTransport::note_trouble(const Error& why, Connection::Clock::time_point from) {
  if (failed_ || (trouble_ && trouble_from_ <= from)) return;
  trouble_ = std::make_unique<Error>(why);
  trouble_from_ = from;
  troubled_ = true;
}

void TcpTransport::throw_trouble() {
  if (!troubled_) return;
  const Hold hold(guard_);
  if (Connection::Clock::now() >= trouble_from_) throw Error(*trouble_);
}

Body TcpTransport::target_of(Connection& connection, Incoming& m, Interval range) {
  if (m.request && m.request->over())
    return connection.filler(range.size());  // not what it expects
  if (m.request && !m.keeps) return {m.request->memory.slice(range), m.request, nullptr};
  if (!m.keeps) m.kept.reset(new std::byte[m.total]);
  m.keeps = true;
  return {BufferList(m.kept.get() + range.lo, range.size()), nullptr, m.kept};
}

// Somebody who waits for a message of this peer's may have to take in others before.
bool TcpTransport::keeps_enough(const Pair& from, const Incoming& m) const {
  const bool awaited = !from.calls.empty() || !any_.empty();
  const size_t kept = from.inbox.kept_bytes(), more = Inbox::kept_of(m);
  if (awaited || kept == 0) return false;
  const TcpOptions& options = device_->options();
  return kept + more > options.kept_bytes || device_->kept() + more > options.all_kept_bytes;
}

// Connections of a peer's that could not go on may be able to now.
void TcpTransport::resume(int rank) {
  if (!std::exchange(pair(rank).stalled, false)) return;
  for (auto& [fd, connection] : connections_) {
    if (connection->peer() != rank || !connection->stalled()) continue;
    connection->resume();
    poll_for(*connection);
  }
}

ConnectionOwner::Answer TcpTransport::on_announced(Connection& connection, const Frame& frame,
                                                   Body* into) {
  Pair& from = pair(connection.peer());
  Incoming m;
  m.message = frame.message;
  m.tag = frame.tag;
  m.total = frame.total;
  m.card = frame.card;
  m.asks = (frame.flags & kAsks) != 0;
  m.connection = &connection;
  if (from.inbox.find(m.message) != nullptr) return Answer::kRefuse;  // nobody sends one twice
  if (keeps_enough(from, m)) return Answer::kStall;
  m.request = take_call(connection.peer(), frame.tag);
  if (m.request) m.request->peer = connection.peer();
  Incoming& added = from.inbox.add(std::move(m));
  if (added.request) {
    compare(added);
  } else if ((added.tag & kCollectiveTag) != 0) {
    compare_order(connection.peer(), added);
  }
  if (frame.kind == FrameKind::kMessage) *into = target_of(connection, added, {0, frame.total});
  resume(connection.peer());  // a stripe may have overtaken this announcement
  return Answer::kBody;
}

void TcpTransport::received(Pair& from, const Frame& frame, Hold& hold) {
  Incoming* const m = from.inbox.find(frame.message);
  if (m == nullptr) return;
  m->received += frame.bytes;
  if (m->complete() && m->request) finish(from, frame.message, hold);
}

void TcpTransport::finish(Pair& from, uint64_t message, Hold& hold) {
  const Incoming done = from.inbox.take(message);
  Request& request = *done.request;
  if (request.over()) return;
  if (done.keeps) {
    const Body body{request.memory, done.request, done.kept};
    hold.copy(body, done.total, [&] { body.memory.copy_from(done.kept.get(), {0, done.total}); });
  }
  request.succeed();
}

RequestPtr TcpTransport::ask(int rank) {
  auto request = std::make_shared<Request>();
  Hold hold(guard_);
  if (failed_ || pair(rank).gone || !connect(rank)) return nullptr;
  Frame f;
  f.kind = FrameKind::kAsk;
  f.tag = next_order_++;
  asked_[f.tag] = request;
  queue(pair(rank).out[0], f);
  push_queued(hold);
  return request;
}

void TcpTransport::on_ask(Connection& connection, const Frame& frame) {
  Frame f;
  f.kind = FrameKind::kAnswer;
  f.tag = frame.tag;
  f.message = static_cast<uint64_t>(static_cast<int64_t>(answer_ ? answer_() : -1));
  queue(pointer_to(connection), f);
}

void TcpTransport::on_answer(const Frame& frame) {
  const auto asked = asked_.find(frame.tag);
  if (asked == asked_.end()) return;
  asked->second->peer = static_cast<int>(static_cast<int64_t>(frame.message));
  asked->second->succeed();
  asked_.erase(asked);
}

}  // namespace fsccl
