// Part of TcpTransport: its connections, and the callbacks of the device's threads. Failure and
// shutdown of connections are in tcp_shutdown.cpp.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tcp_transport.h"
#include "text.h"
#include "topology.h"

namespace fsccl {
namespace {

// Maximum number of bytes that an event on a connection sends or receives, so that other
// connections are served, too; and that the thread that queues a frame sends itself.
constexpr size_t kBytesPerTurn = 4 << 20, kInlineSendBytes = 1 << 20;
constexpr std::chrono::milliseconds kMaxCheckInterval(1000);
constexpr uint64_t kMaxConnectionsPerPeer = 64;  // opened by a peer

}  // namespace

TcpTransport::TcpTransport(std::shared_ptr<TcpDevice> device)
    : device_(std::move(device)),
      owner_pid_(getpid()),
      check_interval_(std::min(kMaxCheckInterval, device_->options().user_timeout / 4)) {
  receiving_id_ = device_->receiving().add(this);
  sending_id_ = device_->sending().add(this);
  token_ = device_->register_transport(receiving_id_);
}

TcpTransport::~TcpTransport() { detach_from_device(); }

std::string TcpTransport::address() const {
  return std::to_string(token_) + " " + device_->unix_address() + device_->tcp_addresses();
}

void TcpTransport::set_peers(Peers peers) {
  LockHold hold(lock_);
  peers_ = std::move(peers);
  peer_states_ = std::vector<PeerState>(peers_.names.size());
  for (PeerState& p : peer_states_) p.inbox.set_process_counter(&device_->buffered_bytes());
  accept_arrivals();
}

void TcpTransport::start_threads() {
  if (threads_started_ || closed_) return;
  device_->receiving().start();
  device_->sending().start();
  threads_started_ = true;
}

void TcpTransport::listen() {
  const LockHold hold(lock_);
  start_threads();
}

void TcpTransport::ensure_connection(int rank) {
  listen();
  LockHold hold(lock_);
  // An error is not reported here: the requests that need that rank fail with it.
  if (abort_error_ || peer_state(rank).loss_error || !ensure_connections(rank)) return;
  connections_to_flush_.push_back(peer_state(rank).out[0]);
  flush_queued(hold);
}

bool TcpTransport::ensure_connections(int rank, size_t bytes) {
  PeerState& state = peer_state(rank);
  const bool same_host = peers_.same_host[static_cast<size_t>(rank)];
  const size_t max_connections =
      same_host || bytes <= kStripeBytes ? 1 : ceil_div(bytes, kStripeBytes);
  const TcpOptions& options = device_->options();
  const auto interfaces = static_cast<size_t>(options.interfaces);
  const auto configured =
      ceil_div(static_cast<size_t>(options.connections), interfaces) * interfaces;
  const size_t connection_count = std::min(max_connections, configured);
  try {
    while (state.out.size() < connection_count) open_connection(rank, same_host);
  } catch (const Error& e) {
    if (!state.out.empty()) return true;  // use fewer connections
    const bool is_local_fault = e.fault != Fault::kPeerLost;
    mark_lost_when_drained(rank,
                           Error(e.fault, is_local_fault ? peers_.rank : rank,
                                 (is_local_fault ? name(peers_.rank) + " cannot reach " + name(rank)
                                                 : name(rank) + " cannot be reached") +
                                     ": " + e.what()));
    return false;
  }
  return true;
}

void TcpTransport::open_connection(int rank, bool same_host) {
  PeerState& state = peer_state(rank);
  const std::vector<std::string> addresses =
      split(peers_.addresses[static_cast<size_t>(rank)], ' ');
  Frame hello;
  if (addresses.size() < 3 || !parse_decimal(addresses[0], &hello.tag))
    fail_usage("it has no such address");
  const std::string& tcp_address =
      addresses[addresses.size() - 1 - state.out.size() % (addresses.size() - 2)];
  hello.message = static_cast<uint64_t>(peers_.rank);
  hello.flags = kProtocolVersion;
  hello.offset = state.connections_opened++;
  hello.total = random_number();
  Fd fd = connect_to(same_host ? addresses[1] : tcp_address, device_->options());
  const Key key = key_of_connection(peers_.key, hello);
  const Key farewell_key =
      key_of_connection(peers_.farewell_keys[static_cast<size_t>(rank)], hello);
  const auto connection =
      std::make_shared<Connection>(std::move(fd), rank, true, key, farewell_key);
  connections_[connection->fd()] = connection;
  connection->queue(hello);
  state.out.push_back(connection);
  update_polling(*connection);
  start_threads();
}

void TcpTransport::queue(const ConnectionPtr& connection, const Frame& frame, Body body) {
  connection->queue(frame, std::move(body));
  connections_to_flush_.push_back(connection);
}

// Sends as much as the sockets accept; the device's threads send the rest. A connection that turns
// out to be broken is closed by its thread, which detects that by epoll.
void TcpTransport::flush_queued(LockHold& hold) {
  for (std::vector<ConnectionPtr> connections; !connections_to_flush_.empty();) {
    connections.clear();
    connections.swap(connections_to_flush_);
    for (const ConnectionPtr& connection : connections) {
      const bool waits_for_room = (connection->polled_events & EPOLLOUT) != 0;
      if (!waits_for_room) connection->flush(hold, kInlineSendBytes);
      update_polling(*connection);
    }
  }
}

// Updates the epoll events of a connection. A stalled connection is removed from epoll, because a
// hang-up cannot be masked and would wake the thread in a busy loop. While a thread is sending on a
// connection, there is no need for EPOLLOUT: that thread requests it once the socket is full.
void TcpTransport::update_polling(Connection& connection) {
  uint32_t events = 0;
  if (!connection.closed && !connection.stalled()) {
    const bool wants_to_send = connection.has_output() && !connection.sending();
    events = EPOLLIN | (wants_to_send ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  }
  if (events == connection.polled_events) return;
  const bool opened_here = connection.opened_here();
  EventLoop& loop = opened_here ? device_->sending() : device_->receiving();
  loop.set(opened_here ? sending_id_ : receiving_id_, connection.fd(), connection.polled_events,
           events);
  connection.polled_events = events;
}

// Accepts the connections that peers have opened, once the peers are known.
void TcpTransport::accept_arrivals() {
  if (peer_states_.empty()) return;
  for (TcpDevice::Arrival& arrival : device_->take_arrivals(token_)) {
    const Frame& hello = arrival.hello;
    const Key key = key_of_connection(peers_.key, hello);
    if (hello.message >= peer_states_.size() || hello.offset >= kMaxConnectionsPerPeer ||
        hello.mac != mac_of(key, hello, 0)) {
      continue;  // not a rank of this group
    }
    const int rank = static_cast<int>(hello.message);
    const uint64_t bit = uint64_t{1} << hello.offset;
    if ((peer_state(rank).accepted_mask & bit) != 0) continue;  // a replayed hello
    peer_state(rank).accepted_mask |= bit;
    const int fd = arrival.fd.get();
    const auto connection = std::make_shared<Connection>(std::move(arrival.fd), rank, false, key);
    connections_[fd] = connection;
    update_polling(*connection);
    // It was not connected when the others were informed.
    if (abort_error_) {
      send_abort(connection);
    } else if (closed_) {
      send_bye(connection);
    }
  }
}

// Called when a peer has connected, an unauthenticated connection has ended, or a request with a
// callback has finished.
void TcpTransport::on_wake() {
  {
    LockHold hold(lock_);
    accept_arrivals();
    check_drained_peers();
    check_accepting();
    flush_queued(hold);
  }
  run_callbacks();
}

// Fails the group if this rank waits for messages and peers cannot connect to it.
void TcpTransport::check_accepting() {
  const std::string failure = device_->accept_failure();
  if (failure.empty() || abort_error_) return;
  const bool is_waiting =
      !any_source_receives_.empty() ||
      std::any_of(peer_states_.begin(), peer_states_.end(), [](const PeerState& p) {
        return !p.receives.empty() || !p.awaiting_clear_to_send.empty();
      });
  if (!is_waiting) return;
  abort_locked(Error(Fault::kSystem, peers_.rank, name(peers_.rank) + ": " + failure), nullptr);
  unreported_abort_error_ = std::make_unique<Error>(*abort_error_);
}

void TcpTransport::on_tick() {
  const LockHold hold(lock_);
  if (closed_ || Connection::Clock::now() - last_check_ < check_interval_) return;
  last_check_ = Connection::Clock::now();
  check_connections();
}

// Runs pending callbacks without the lock.
void TcpTransport::run_callbacks() {
  std::vector<std::function<void()>> callbacks;
  std::unique_ptr<Error> failure;
  {
    const LockHold hold(lock_);
    callbacks.swap(callbacks_);
    failure = std::move(unreported_abort_error_);
  }
  if (failure && abort_handler_) abort_handler_(*failure);
  for (const auto& callback : callbacks) callback();
}

void TcpTransport::notify(const RequestPtr& request, std::function<void()> callback) {
  {
    LockHold hold(lock_);
    if (!request->finished()) {
      auto previous = std::move(request->on_finished);
      request->on_finished = [this, previous = std::move(previous),
                              callback = std::move(callback)](Request& r) mutable {
        if (previous) previous(r);
        callbacks_.push_back(std::move(callback));
        device_->receiving().wake(receiving_id_);
      };
      return;
    }
  }
  callback();
}

void TcpTransport::on_events(int fd, uint32_t events) {
  {
    LockHold hold(lock_);
    const auto entry = connections_.find(fd);
    if (entry != connections_.end())
      handle_connection_events(ConnectionPtr(entry->second), events, hold);
    if (!unreported_abort_error_) return;
  }
  run_callbacks();
}

void TcpTransport::handle_connection_events(const ConnectionPtr& connection, uint32_t events,
                                            LockHold& hold) {
  bool is_open = true;
  event_count_.fetch_add(1, std::memory_order_relaxed);
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) is_open = receive_from(connection, hold);
  if (is_open && connection->has_output() && !connection->flush(hold, kBytesPerTurn)) {
    // The peer reads nothing more. It may have said why since the call above.
    receive_from(connection, hold);
    is_open = false;
  }
  if (is_open && (events & EPOLLERR) != 0) is_open = false;
  if (is_open) return update_polling(*connection);
  // Another thread may have sent the last data, so that the peer received it and left, before that
  // thread could mark its request as done.
  hold.unlock_until([&] { return !connection->sending(); });
  close_connection(*connection);
}

// Returns whether the connection is open.
bool TcpTransport::receive_from(const ConnectionPtr& connection, LockHold& hold) {
  bool is_open = true;
  try {
    is_open = connection->receive(*this, hold, kBytesPerTurn);
  } catch (const std::bad_alloc&) {
    is_open = false;
    abort_locked(
        Error(Fault::kSystem, peers_.rank,
              name(peers_.rank) + " has no memory for a message of " + name(connection->peer())),
        nullptr);
    unreported_abort_error_ = std::make_unique<Error>(*abort_error_);
  }
  flush_queued(hold);
  return is_open;
}

ConnectionOwner::Decision TcpTransport::on_frame(Connection& connection, const Frame& frame,
                                                 Body* body) {
  if (frame.kind == FrameKind::kAbort) {
    *body = abort_text_body(connection, frame.bytes);
    return Decision::kReceiveBody;
  }
  if (abort_error_) {
    *body = connection.discard_buffer(frame.bytes);
    return Decision::kReceiveBody;
  }
  Decision decision = Decision::kReceiveBody;
  if (frame.kind == FrameKind::kMessage || frame.kind == FrameKind::kAnnounce) {
    decision = on_new_message(connection, frame, body);
  } else if (frame.kind == FrameKind::kStripe) {
    decision = on_stripe(connection, frame, body);
  }
  if (decision == Decision::kStall) peer_state(connection.peer()).has_stalled = true;
  return decision;
}

ConnectionOwner::Decision TcpTransport::on_stripe(Connection& connection, const Frame& frame,
                                                  Body* body) {
  IncomingMessage* const message = peer_state(connection.peer()).inbox.find(frame.message);
  if (message == nullptr) return Decision::kStall;
  if (frame.bytes > message->total || frame.offset > message->total - frame.bytes)
    return Decision::kRefuse;
  *body = body_target(connection, *message, {frame.offset, frame.offset + frame.bytes});
  return Decision::kReceiveBody;
}

void TcpTransport::on_body(Connection& connection, const Frame& frame, LockHold& hold) {
  switch (frame.kind) {
    case FrameKind::kHello:  // handled by the device
      return;
    case FrameKind::kClearToSend:
      return on_clear_to_send(connection, frame);
    case FrameKind::kWaitQuery:
      return answer_wait_query(connection, frame);
    case FrameKind::kWaitReply:
      return on_wait_reply(frame);
    case FrameKind::kMessage:
    case FrameKind::kStripe:
      if (!abort_error_) count_received(peer_state(connection.peer()), frame, hold);
      return;
    case FrameKind::kAbort:
      if (!abort_error_) {
        const int rank_at_fault = static_cast<int>(static_cast<int64_t>(frame.tag));
        abort_locked(Error(Fault::kAborted, rank_at_fault, connection.abort_text_in), &connection);
        unreported_abort_error_ = std::make_unique<Error>(*abort_error_);
      }
      return;
    case FrameKind::kBye:
      return on_bye(connection, frame);
    case FrameKind::kAnnounce:
      return;
  }
}

// The peer reads nothing more from this rank. What it has sent may still arrive, on connections that
// it has opened.
void TcpTransport::on_bye(Connection& connection, const Frame& frame) {
  PeerState& state = peer_state(connection.peer());
  connection.received_bye = state.received_bye = true;
  // An answer to a late hello does not count the connections.
  state.expected_incoming_connections =
      std::max(state.expected_incoming_connections, frame.offset);
  // If it has opened connections, its data may still be on the way: their end marks it as lost.
  if (connection.opened_here() && state.expected_incoming_connections == 0 &&
      state.accepted_mask == 0) {
    mark_lost_when_drained(connection.peer(), describe_loss(connection));
  }
}

void TcpTransport::on_clear_to_send(Connection& connection, const Frame& frame) {
  PeerState& state = peer_state(connection.peer());
  const auto waiting = state.awaiting_clear_to_send.find(frame.message);
  if (waiting == state.awaiting_clear_to_send.end()) return;
  const RequestPtr request = waiting->second;
  state.awaiting_clear_to_send.erase(waiting);
  send_stripes(state, frame.message, request);
}

}  // namespace fsccl
