// Part of TcpTransport: sends, receives and their matching. Threads and connections are in
// tcp_io.cpp, shutdown and failure in tcp_shutdown.cpp.
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
  if (abort_error_) {
    request->fail(*abort_error_);
    return request;
  }
  PeerState& state = peer_state(peer);
  const size_t bytes = request->memory.bytes();
  if (state.loss_error || !ensure_connections(peer, bytes)) {
    request->fail(state.loss_error ? *state.loss_error : *state.deferred_loss_error);
    return request;
  }
  const bool needs_clear_to_send = bytes > kEagerBytes && (tag & kCollectiveTag) == 0;
  Frame frame;
  frame.tag = tag;
  frame.fingerprint = fingerprint;
  frame.message = state.next_message_number++;
  state.sent_bytes += bytes;
  frame.total = bytes;
  if (needs_clear_to_send || (bytes > kStripeBytes && state.out.size() > 1)) {
    frame.kind = FrameKind::kAnnounce;
    frame.flags = needs_clear_to_send ? kNeedsClearToSend : 0;
    queue(state.out[0], frame);
    if (needs_clear_to_send) {
      state.awaiting_clear_to_send.emplace(frame.message, request);
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
  for (const PeerState& p : peer_states_) out.push_back({p.next_message_number, p.sent_bytes});
  return out;
}

void TcpTransport::send_stripes(PeerState& to, uint64_t message_number, const RequestPtr& request) {
  const size_t bytes = request->memory.bytes();
  const size_t connection_count = std::min(to.out.size(), ceil_div(bytes, kStripeBytes));
  request->unsent_bodies = connection_count;
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
  const int first_rank = from == kAnySource ? 0 : from;
  const int last_rank = from == kAnySource ? static_cast<int>(peer_states_.size()) - 1 : from;
  for (int r = first_rank; r <= last_rank; ++r) {
    Inbox& inbox = peer_state(r).inbox;
    IncomingMessage* const message = inbox.first_unmatched(tag);
    if (message == nullptr) continue;
    request->peer = r;
    inbox.match(*message, request);
    check_matched_receive(*message);
    if (message->complete()) complete_message(peer_state(r), message->number, hold);
    resume_connections(r);
    flush_queued(hold);
    return request;
  }
  if (abort_error_) {
    request->fail(*abort_error_);
    return request;
  }
  start_threads();
  // A connection is needed to detect the loss of the sender.
  for (int r = first_rank; r <= last_rank; ++r) {
    if (r == peers_.rank) continue;
    if (!peer_state(r).loss_error) ensure_connections(r);
    const bool fails_receive =
        from != kAnySource || !peer_state(r).received_bye || !any_peer_alive();
    if (peer_state(r).loss_error && fails_receive) {
      request->fail(*peer_state(r).loss_error);
      note_transport_error(*request, *peer_state(r).loss_error);
      return request;
    }
  }
  (from == kAnySource ? any_source_receives_ : peer_state(from).receives)
      .add(next_receive_number_++, request);
  if (from != kAnySource && (tag & kCollectiveTag) != 0) {
    peer_state(from).inbox.each_first_unmatched(
        kCollectiveTag, [&](IncomingMessage& m) { check_collective_order(from, m); });
  }
  for (int r = first_rank; r <= last_rank; ++r) resume_connections(r);
  flush_queued(hold);
  return request;
}

// Removes and returns the first receive, in posting order, that matches a message; null if there is
// none.
RequestPtr TcpTransport::take_matching_receive(int from, uint64_t tag) {
  PendingReceives& from_peer = peer_state(from).receives;
  const PendingReceives::PendingReceive* const first_of_peer = from_peer.first(tag);
  const PendingReceives::PendingReceive* const first_of_any = any_source_receives_.first(tag);
  if (first_of_peer == nullptr && first_of_any == nullptr) return nullptr;
  const bool from_any_source =
      first_of_peer == nullptr ||
      (first_of_any != nullptr && first_of_any->number < first_of_peer->number);
  return (from_any_source ? any_source_receives_ : from_peer).take_first(tag);
}

// Compares a message with its receive, fails the receive if they differ, and sends kClearToSend if
// the sender waits for it.
void TcpTransport::check_matched_receive(IncomingMessage& message) {
  const RequestPtr& receive = message.request;
  const int rank = receive->peer;
  const bool both_are_messages =
      message.fingerprint.op == OpCode::kNone && receive->fingerprint.op == OpCode::kNone;
  if (both_are_messages && message.fingerprint.dtype != receive->fingerprint.dtype) {
    receive->fail(Error(Fault::kMismatch, rank,
                        type_mismatch_text(name(rank), message.fingerprint.dtype, name(peers_.rank),
                                           receive->fingerprint.dtype)));
  } else if (message.fingerprint != receive->fingerprint) {
    receive->fail(mismatch_error({rank, name(rank), message.fingerprint},
                                 {peers_.rank, name(peers_.rank), receive->fingerprint}, rank));
  } else if (receive->memory.bytes() != message.total) {
    receive->fail(Error(
        Fault::kMismatch, rank,
        size_mismatch_text(name(rank), message.total, name(peers_.rank), receive->memory.bytes())));
  }
  if (receive->error) note_transport_error(*receive, *receive->error);
  if (!message.needs_clear_to_send) return;
  Frame clear;
  clear.kind = FrameKind::kClearToSend;
  clear.message = message.number;
  if (message.connection != nullptr) queue(shared_pointer_to(*message.connection), clear);
}

// Fails a receive of a collective if a message of an earlier collective is still unmatched: this
// rank has called another collective at that point. Returns whether it failed.
bool TcpTransport::has_stale_message(int from, Request& r) {
  peer_state(from).inbox.each_first_unmatched(kCollectiveTag, [&](const IncomingMessage& message) {
    if (message.fingerprint.sequence >= r.fingerprint.sequence || r.error) return;
    r.fail(mismatch_error({from, name(from), message.fingerprint},
                          {peers_.rank, name(peers_.rank), r.fingerprint}, from));
    note_transport_error(r, *r.error);
  });
  return r.error != nullptr;
}

// Fails the pending receives of other collectives than that of an unmatched message. All messages
// of a collective arrive before those of the next one, and its receives take them, so the two ranks
// have called different collectives.
void TcpTransport::check_collective_order(int from, const IncomingMessage& message) {
  peer_state(from).receives.each_first(kCollectiveTag, [&](const RequestPtr& r) {
    if (r->fingerprint == message.fingerprint) return;  // another stream of the same operation
    const Error error = mismatch_error({from, name(from), message.fingerprint},
                                       {peers_.rank, name(peers_.rank), r->fingerprint}, from);
    r->fail(error);
    note_transport_error(*r, error);
  });
}

void TcpTransport::note_transport_error(const Request& request, const Error& error) {
  if ((request.tag & kCollectiveTag) != 0) note_transport_error(error, Connection::Clock::now());
}

// Records an error for raise_transport_error(), which throws the one with the earliest effective
// time.
void TcpTransport::note_transport_error(const Error& error,
                                        Connection::Clock::time_point effective_time) {
  if (abort_error_ || (transport_error_ && transport_error_time_ <= effective_time)) return;
  transport_error_ = std::make_unique<Error>(error);
  transport_error_time_ = effective_time;
  has_transport_error_ = true;
}

void TcpTransport::raise_transport_error() {
  if (!has_transport_error_) return;
  const LockHold hold(lock_);
  if (Connection::Clock::now() >= transport_error_time_) throw Error(*transport_error_);
}

// Returns the memory for a part of the body of a message: that of its receive, or a buffer.
Body TcpTransport::body_target(Connection& connection, IncomingMessage& message, Interval range) {
  if (message.request && message.request->is_closing())
    // Discard: the message does not match the receive.
    return connection.discard_buffer(range.size());
  if (message.request && !message.is_buffered)
    return {message.request->memory.slice(range), message.request, nullptr};
  if (!message.is_buffered) message.buffer.reset(new std::byte[message.total]);
  message.is_buffered = true;
  return {BufferList(message.buffer.get() + range.lo, range.size()), nullptr, message.buffer};
}

// Returns whether buffering one more message of a peer would exceed a limit. A peer is not stalled
// while a receive waits for one of its messages, because that message may come after others that
// must be buffered.
bool TcpTransport::buffer_is_full(const PeerState& from, const IncomingMessage& message) const {
  const bool awaited = !from.receives.empty() || !any_source_receives_.empty();
  const size_t buffered = from.inbox.buffered_bytes(), more = Inbox::buffered_size(message);
  if (awaited || buffered == 0) return false;
  const TcpOptions& options = device_->options();
  return buffered + more > options.max_buffered_bytes ||
         device_->buffered_bytes() + more > options.max_total_buffered_bytes;
}

// Resumes the stalled connections of a peer, because the reason for stalling them may be gone.
void TcpTransport::resume_connections(int rank) {
  if (!std::exchange(peer_state(rank).has_stalled, false)) return;
  for (auto& [fd, connection] : connections_) {
    if (connection->peer() != rank || !connection->stalled()) continue;
    connection->resume();
    update_polling(*connection);
  }
}

// Handles a kMessage or kAnnounce frame.
ConnectionOwner::Decision TcpTransport::on_new_message(Connection& connection, const Frame& frame,
                                                       Body* body) {
  PeerState& from = peer_state(connection.peer());
  IncomingMessage incoming;
  incoming.number = frame.message;
  incoming.tag = frame.tag;
  incoming.total = frame.total;
  incoming.fingerprint = frame.fingerprint;
  incoming.needs_clear_to_send = (frame.flags & kNeedsClearToSend) != 0;
  incoming.connection = &connection;
  // A valid message is announced once.
  if (from.inbox.find(incoming.number) != nullptr) return Decision::kRefuse;
  if (buffer_is_full(from, incoming)) return Decision::kStall;
  incoming.request = take_matching_receive(connection.peer(), frame.tag);
  if (incoming.request) incoming.request->peer = connection.peer();
  IncomingMessage& added = from.inbox.add(std::move(incoming));
  if (added.request) {
    check_matched_receive(added);
  } else if ((added.tag & kCollectiveTag) != 0) {
    check_collective_order(connection.peer(), added);
  }
  if (frame.kind == FrameKind::kMessage) *body = body_target(connection, added, {0, frame.total});
  resume_connections(connection.peer());  // a stripe may have overtaken this announcement
  return Decision::kReceiveBody;
}

void TcpTransport::count_received(PeerState& from, const Frame& frame, LockHold& hold) {
  IncomingMessage* const message = from.inbox.find(frame.message);
  if (message == nullptr) return;
  message->received += frame.bytes;
  if (message->complete() && message->request) complete_message(from, frame.message, hold);
}

void TcpTransport::complete_message(PeerState& from, uint64_t message_number, LockHold& hold) {
  const IncomingMessage message = from.inbox.remove_matched(message_number);
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
  if (abort_error_ || peer_state(rank).loss_error || !ensure_connections(rank)) return nullptr;
  Frame frame;
  frame.kind = FrameKind::kWaitQuery;
  frame.tag = next_receive_number_++;
  pending_wait_queries_[frame.tag] = request;
  queue(peer_state(rank).out[0], frame);
  flush_queued(hold);
  return request;
}

void TcpTransport::answer_wait_query(Connection& connection, const Frame& frame) {
  Frame reply;
  reply.kind = FrameKind::kWaitReply;
  reply.tag = frame.tag;
  reply.message =
      static_cast<uint64_t>(static_cast<int64_t>(wait_query_handler_ ? wait_query_handler_() : -1));
  queue(shared_pointer_to(connection), reply);
}

void TcpTransport::on_wait_reply(const Frame& frame) {
  const auto query = pending_wait_queries_.find(frame.tag);
  if (query == pending_wait_queries_.end()) return;
  query->second->peer = static_cast<int>(static_cast<int64_t>(frame.message));
  query->second->succeed();
  pending_wait_queries_.erase(query);
}

}  // namespace fsccl
