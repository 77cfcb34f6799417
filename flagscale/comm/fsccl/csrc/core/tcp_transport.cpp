// Matching of sends with receives. Threads and connections are in tcp_io.cpp, shutdown and failure
// in tcp_shutdown.cpp.
#include "tcp_transport.h"

#include <algorithm>
#include <utility>

namespace fsccl {

RequestPtr TcpTransport::send(int peer, uint64_t tag, BufferList memory,
                              const CollectiveFingerprint& fingerprint) {
  auto request = std::make_shared<Request>();
  request->peer = peer;
  request->tag = tag;
  request->memory = std::move(memory);
  LockHold hold(lock_);
  if (failure_) {
    request->fail(*failure_);
    return request;
  }
  PeerState& state = peer_state(peer);
  const size_t bytes = request->memory.bytes();
  if (state.loss || !ensure_connections(peer, bytes)) {
    request->fail(state.loss ? *state.loss : *state.pending_loss);
    return request;
  }
  const bool needs_clear = bytes > kEagerBytes && (tag & kCollectiveTag) == 0;
  Frame frame;
  frame.tag = tag;
  frame.fingerprint = fingerprint;
  frame.message = state.next_message++;
  state.sent_bytes += bytes;
  frame.total = bytes;
  if (needs_clear || (bytes > kStripeBytes && state.out.size() > 1)) {
    frame.kind = FrameKind::kAnnounce;
    frame.flags = needs_clear ? kNeedsClear : 0;
    queue(state.out[0], frame);
    if (needs_clear) {
      state.waiting_for_clear.emplace(frame.message, request);
    } else {
      send_stripes(state, frame.message, request);
    }
  } else {
    frame.kind = FrameKind::kMessage;
    frame.bytes = bytes;
    queue(state.out[0], frame, {request->memory, request, nullptr});
  }
  flush_queued(hold);
  return request;
}

std::vector<Transport::Traffic> TcpTransport::sent_traffic() {
  const LockHold hold(lock_);
  std::vector<Traffic> out;
  for (const PeerState& p : peer_states_) out.push_back({p.next_message, p.sent_bytes});
  return out;
}

void TcpTransport::send_stripes(PeerState& to, uint64_t message_number, const RequestPtr& request) {
  const size_t bytes = request->memory.bytes();
  const size_t connection_count = std::min(to.out.size(), ceil_div(bytes, kStripeBytes));
  request->parts_left = connection_count;
  for (size_t i = 0; i < connection_count; ++i) {
    const Interval stripe = cut(bytes, connection_count, i, 4096);
    Frame frame;
    frame.kind = FrameKind::kStripe;
    frame.message = message_number;
    frame.bytes = stripe.size();
    frame.offset = stripe.lo;
    frame.total = bytes;
    queue(to.out[i], frame, {request->memory.slice(stripe), request, nullptr});
  }
}

RequestPtr TcpTransport::recv(int from, uint64_t tag, BufferList memory,
                              const CollectiveFingerprint& fingerprint) {
  auto request = std::make_shared<Request>();
  request->peer = from;
  request->tag = tag;
  request->fingerprint = fingerprint;
  request->memory = std::move(memory);
  LockHold hold(lock_);
  if ((tag & kCollectiveTag) != 0 && from != kAnySource && has_stale_message(from, *request))
    return request;
  const int first = from == kAnySource ? 0 : from;
  const int last = from == kAnySource ? static_cast<int>(peer_states_.size()) - 1 : from;
  for (int r = first; r <= last; ++r) {
    Inbox& inbox = peer_state(r).inbox;
    Incoming* const message = inbox.first_unmatched(tag);
    if (message == nullptr) continue;
    request->peer = r;
    inbox.match(*message, request);
    check_match(*message);
    if (message->complete()) complete_message(peer_state(r), message->message, hold);
    resume(r);
    flush_queued(hold);
    return request;
  }
  if (failure_) {
    request->fail(*failure_);
    return request;
  }
  start_threads();
  // A connection is needed to detect the loss of the sender.
  for (int r = first; r <= last; ++r) {
    if (r == peers_.rank) continue;
    if (!peer_state(r).loss) ensure_connections(r);
    const bool matters = from != kAnySource || !peer_state(r).received_bye || !any_peer_alive();
    if (peer_state(r).loss && matters) {
      request->fail(*peer_state(r).loss);
      note_error(*request, *peer_state(r).loss);
      return request;
    }
  }
  (from == kAnySource ? any_source_receives_ : peer_state(from).receives)
      .add(next_order_++, request);
  if (from != kAnySource && (tag & kCollectiveTag) != 0) {
    peer_state(from).inbox.each_first_unmatched(
        kCollectiveTag, [&](Incoming& m) { check_collective_order(from, m); });
  }
  for (int r = first; r <= last; ++r) resume(r);
  flush_queued(hold);
  return request;
}

// Takes the receive that was posted first among those that a message matches.
RequestPtr TcpTransport::take_receive(int from, uint64_t tag) {
  PendingReceives& from_peer = peer_state(from).receives;
  const PendingReceives::PendingReceive* const first_of_peer = from_peer.first(tag);
  const PendingReceives::PendingReceive* const first_of_any = any_source_receives_.first(tag);
  if (first_of_peer == nullptr && first_of_any == nullptr) return nullptr;
  const bool from_any_source =
      first_of_peer == nullptr ||
      (first_of_any != nullptr && first_of_any->order < first_of_peer->order);
  return (from_any_source ? any_source_receives_ : from_peer).take_first(tag);
}

// Compares a message with the receive that it has matched.
void TcpTransport::check_match(Incoming& message) {
  const RequestPtr& receive = message.request;
  const int rank = receive->peer;
  if (message.fingerprint != receive->fingerprint) {
    receive->fail(mismatch_error({rank, name(rank), message.fingerprint},
                                 {peers_.rank, name(peers_.rank), receive->fingerprint}, rank));
  } else if (receive->memory.bytes() != message.total) {
    receive->fail(Error(
        Fault::kMismatch, rank,
        size_mismatch_text(name(rank), message.total, name(peers_.rank), receive->memory.bytes())));
  }
  if (receive->error) note_error(*receive, *receive->error);
  if (!message.needs_clear) return;
  Frame clear;
  clear.kind = FrameKind::kClear;
  clear.message = message.message;
  if (message.connection != nullptr) queue(shared_pointer_to(*message.connection), clear);
}

// Checks whether a message of an earlier collective is still unmatched, which means that this rank
// called another collective at that point. If so, fails the receive.
bool TcpTransport::has_stale_message(int from, Request& r) {
  peer_state(from).inbox.each_first_unmatched(kCollectiveTag, [&](const Incoming& message) {
    if (message.fingerprint.sequence >= r.fingerprint.sequence || r.error) return;
    r.fail(mismatch_error({from, name(from), message.fingerprint},
                          {peers_.rank, name(peers_.rank), r.fingerprint}, from));
    note_error(r, *r.error);
  });
  return r.error != nullptr;
}

// Checks a message of a collective that no receive matches while a message of another collective is
// awaited from its sender: all messages of an operation are announced before those of the next one,
// and received by that operation.
void TcpTransport::check_collective_order(int from, const Incoming& message) {
  peer_state(from).receives.each_first(kCollectiveTag, [&](const RequestPtr& r) {
    if (r->fingerprint == message.fingerprint) return;  // another stream of the same operation
    const Error error = mismatch_error({from, name(from), message.fingerprint},
                                       {peers_.rank, name(peers_.rank), r->fingerprint}, from);
    r->fail(error);
    note_error(*r, error);
  });
}

void TcpTransport::note_error(const Request& request, const Error& error) {
  if ((request.tag & kCollectiveTag) != 0) note_error(error, Connection::Clock::now());
}

// Keeps the error that takes effect first.
void TcpTransport::note_error(const Error& error, Connection::Clock::time_point from) {
  if (failure_ || (error_ && error_from_ <= from)) return;
  error_ = std::make_unique<Error>(error);
  error_from_ = from;
  has_error_ = true;
}

void TcpTransport::raise_transport_error() {
  if (!has_error_) return;
  const LockHold hold(lock_);
  if (Connection::Clock::now() >= error_from_) throw Error(*error_);
}

Body TcpTransport::body_target(Connection& connection, Incoming& message, Interval range) {
  if (message.request && message.request->is_closing())
    // Discard: the message does not match the receive.
    return connection.discard_buffer(range.size());
  if (message.request && !message.is_buffered)
    return {message.request->memory.slice(range), message.request, nullptr};
  if (!message.is_buffered) message.buffer.reset(new std::byte[message.total]);
  message.is_buffered = true;
  return {BufferList(message.buffer.get() + range.lo, range.size()), nullptr, message.buffer};
}

// A receive that waits for a message of this peer may need others to be taken in first, so its peer
// is never stalled.
bool TcpTransport::buffer_is_full(const PeerState& from, const Incoming& message) const {
  const bool awaited = !from.receives.empty() || !any_source_receives_.empty();
  const size_t buffered = from.inbox.buffered_bytes(), more = Inbox::buffered_size(message);
  if (awaited || buffered == 0) return false;
  const TcpOptions& options = device_->options();
  return buffered + more > options.buffered_bytes ||
         device_->buffered_bytes() + more > options.total_buffered_bytes;
}

// Resumes connections of a peer that were stalled, because they may be able to go on.
void TcpTransport::resume(int rank) {
  if (!std::exchange(peer_state(rank).has_stalled, false)) return;
  for (auto& [fd, connection] : connections_) {
    if (connection->peer() != rank || !connection->stalled()) continue;
    connection->resume();
    update_polling(*connection);
  }
}

ConnectionOwner::Decision TcpTransport::on_announced(Connection& connection, const Frame& frame,
                                                     Body* body) {
  PeerState& from = peer_state(connection.peer());
  Incoming incoming;
  incoming.message = frame.message;
  incoming.tag = frame.tag;
  incoming.total = frame.total;
  incoming.fingerprint = frame.fingerprint;
  incoming.needs_clear = (frame.flags & kNeedsClear) != 0;
  incoming.connection = &connection;
  // A message is announced once.
  if (from.inbox.find(incoming.message) != nullptr) return Decision::kRefuse;
  if (buffer_is_full(from, incoming)) return Decision::kStall;
  incoming.request = take_receive(connection.peer(), frame.tag);
  if (incoming.request) incoming.request->peer = connection.peer();
  Incoming& added = from.inbox.add(std::move(incoming));
  if (added.request) {
    check_match(added);
  } else if ((added.tag & kCollectiveTag) != 0) {
    check_collective_order(connection.peer(), added);
  }
  if (frame.kind == FrameKind::kMessage) *body = body_target(connection, added, {0, frame.total});
  resume(connection.peer());  // a stripe may have overtaken this announcement
  return Decision::kBody;
}

void TcpTransport::count_received(PeerState& from, const Frame& frame, LockHold& hold) {
  Incoming* const message = from.inbox.find(frame.message);
  if (message == nullptr) return;
  message->received += frame.bytes;
  if (message->complete() && message->request) complete_message(from, frame.message, hold);
}

void TcpTransport::complete_message(PeerState& from, uint64_t message_number, LockHold& hold) {
  const Incoming message = from.inbox.remove_matched(message_number);
  Request& request = *message.request;
  if (request.is_closing()) return;
  if (message.is_buffered) {
    const Body body{request.memory, message.request, message.buffer};
    hold.copy(body, message.total,
              [&] { body.memory.copy_from(message.buffer.get(), {0, message.total}); });
  }
  request.succeed();
}

RequestPtr TcpTransport::query_awaited_rank(int rank) {
  auto request = std::make_shared<Request>();
  LockHold hold(lock_);
  if (failure_ || peer_state(rank).loss || !ensure_connections(rank)) return nullptr;
  Frame frame;
  frame.kind = FrameKind::kAsk;
  frame.tag = next_order_++;
  questions_[frame.tag] = request;
  queue(peer_state(rank).out[0], frame);
  flush_queued(hold);
  return request;
}

void TcpTransport::on_question(Connection& connection, const Frame& frame) {
  Frame answer;
  answer.kind = FrameKind::kAnswer;
  answer.tag = frame.tag;
  answer.message =
      static_cast<uint64_t>(static_cast<int64_t>(wait_query_handler_ ? wait_query_handler_() : -1));
  queue(shared_pointer_to(connection), answer);
}

void TcpTransport::on_answer(const Frame& frame) {
  const auto question = questions_.find(frame.tag);
  if (question == questions_.end()) return;
  question->second->peer = static_cast<int>(static_cast<int64_t>(frame.message));
  question->second->succeed();
  questions_.erase(question);
}

}  // namespace fsccl
