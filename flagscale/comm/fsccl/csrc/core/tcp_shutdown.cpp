// Part of TcpTransport: failure and shutdown of connections, of peers, and of the transport itself.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tcp_transport.h"
#include "text.h"

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kFlushTimeout(2000);  // of close()
// Time from the loss of a peer to the failure of collectives that do not wait for that peer.
constexpr std::chrono::milliseconds kBrokenConnectionGrace(200);

}  // namespace

void TcpTransport::close_connection(Connection& connection) {
  const ConnectionPtr keep_alive = shared_pointer_to(connection);
  connection.closed = true;
  {
    const int rank = connection.peer();
    PeerState& state = peer_state(rank);
    if (connection.opened_here()) {
      state.out.erase(std::remove(state.out.begin(), state.out.end(), keep_alive), state.out.end());
    } else {
      ++state.closed_incoming_connections;
    }
    state.inbox.forget_connection(&connection);
    const Error error = describe_loss(connection);
    connection.each_request([&](const Request& r) { note_transport_error(r, error); });
    connection.release_requests(error);
    if (connection.opened_here()) {
      mark_lost_when_drained(rank, error);
    } else if (!connection.received_bye ||
               state.closed_incoming_connections >= state.expected_incoming_connections) {
      mark_lost(rank, error);
    }
  }
  update_polling(connection);
  connections_.erase(connection.fd());
  check_drained_peers();
}

Error TcpTransport::describe_loss(const Connection& connection) const {
  const std::string& peer_name = name(connection.peer());
  if (connection.received_bye) return {Fault::kPeerLost, connection.peer(), peer_name + kLeftGroup};
  const int error_code =
      connection.io_errno != 0 ? connection.io_errno : pending_error(connection.fd());
  std::string error = peer_name + kConnectionLost;
  if (!connection.close_reason.empty()) {
    error += ": " + connection.close_reason;
  } else if (error_code != 0) {
    error += std::string(": ") + std::strerror(error_code);
  }
  return {Fault::kPeerLost, connection.peer(), error};
}

void TcpTransport::mark_lost(int rank, const Error& error) {
  PeerState& state = peer_state(rank);
  if (!state.loss_error) state.loss_error = std::make_unique<Error>(error);
  state.receives.each_first(
      kCollectiveTag, [&](const RequestPtr& r) { note_transport_error(*r, *state.loss_error); });
  if (!state.received_bye && rank != peers_.rank)
    note_transport_error(*state.loss_error, Connection::Clock::now() + kBrokenConnectionGrace);
  state.receives.fail_all(*state.loss_error);
  for (auto& [message, request] : state.awaiting_clear_to_send) request->fail(*state.loss_error);
  state.awaiting_clear_to_send.clear();
  state.inbox.fail_unfinished(*state.loss_error);
  // A receive from any source also waits for this peer; but a peer that has sent kBye has nothing
  // more to send.
  if (!state.received_bye || !any_peer_alive()) any_source_receives_.fail_all(*state.loss_error);
}

bool TcpTransport::any_peer_alive() const {
  for (size_t r = 0; r < peer_states_.size(); ++r) {
    if (static_cast<int>(r) != peers_.rank && !peer_states_[r].loss_error) return true;
  }
  return false;
}

// Marks a peer as lost once no connections that it has opened are left. A broken connection that
// was opened here implies nothing about the data that the peer has sent: that arrives on other
// connections, which may wait to be accepted, or whose hello may not have arrived.
void TcpTransport::mark_lost_when_drained(int rank, const Error& error) {
  PeerState& state = peer_state(rank);
  if (!state.deferred_loss_error) state.deferred_loss_error = std::make_unique<Error>(error);
  check_drained_peers();
}

void TcpTransport::check_drained_peers() {
  bool accepted = false;
  for (size_t r = 0; r < peer_states_.size(); ++r) {
    if (!peer_states_[r].deferred_loss_error || peer_states_[r].loss_error) continue;
    if (!std::exchange(accepted, true)) accept_arrivals();
    const bool has_incoming =
        std::any_of(connections_.begin(), connections_.end(), [&](const auto& entry) {
          const Connection& connection = *entry.second;
          return !connection.closed && !connection.opened_here() &&
                 connection.peer() == static_cast<int>(r);
        });
    if (!has_incoming && !device_->has_unauthenticated(token_))
      mark_lost(static_cast<int>(r), *peer_states_[r].deferred_loss_error);
  }
}

// Closes connections whose peers have acknowledged nothing for too long. The receiving thread of
// the device calls it every `check_interval_`.
void TcpTransport::check_connections() {
  const Connection::Clock::time_point now = Connection::Clock::now();
  const std::chrono::milliseconds limit = device_->options().user_timeout;
  const std::string limit_text = std::to_string(limit.count() / 1000) + " s";
  std::vector<ConnectionPtr> timed_out;
  for (auto& [fd, connection] : connections_) {
    if (!has_been_unacknowledged_for(fd, check_interval_)) connection->last_acknowledged = now;
    if (now - connection->last_acknowledged < limit) continue;
    connection->close_reason = "it has acknowledged nothing for " + limit_text;
    shut_down_socket(fd);  // the other thread notices
    if (!connection->opened_here()) timed_out.push_back(connection);
  }
  for (const ConnectionPtr& connection : timed_out) close_connection(*connection);
  check_drained_peers();
}

std::optional<Error> TcpTransport::loss_of(int rank) {
  const LockHold hold(lock_);
  const auto& error = peer_state(rank).loss_error;
  return error ? std::optional<Error>(*error) : std::nullopt;
}

bool TcpTransport::awaits_silent_peer() {
  const LockHold hold(lock_);
  return std::any_of(peer_states_.begin(), peer_states_.end(), [](const PeerState& p) {
    return p.accepted_mask == 0 && !p.receives.empty();
  });
}

ProcessState TcpTransport::probe_process(int rank, const Deadline& deadline) {
  const std::vector<std::string> addresses =
      split(peers_.addresses[static_cast<size_t>(rank)], ' ');
  if (addresses.size() < 3) return ProcessState::kUnknown;
  return probe_listener(addresses.back(), device_->options(), deadline);
}

void TcpTransport::abort(const Error& error) {
  bool peers_are_known = true;
  {
    LockHold hold(lock_);
    peers_are_known = !peer_states_.empty();
    abort_locked(error, nullptr);
    flush_queued(hold);
    hold.wait_for_copies();
  }
  if (getpid() != owner_pid_) return;  // a forked child does not act for the group
  // Connections of unknown peers are never taken, so the device answers them.
  if (!peers_are_known) return detach_from_device();
  // Threads are needed to notify peers that connect later, even if nothing has been sent or
  // received before.
  try {
    start_threads();
  } catch (const Error&) {
    // Lack of memory for a thread may be the reason of the abort, which is the error to report.
  }
}

void TcpTransport::send_abort(const ConnectionPtr& connection) {
  Frame frame;
  frame.kind = FrameKind::kAbort;
  frame.tag = static_cast<uint64_t>(static_cast<int64_t>(abort_error_->rank));
  connection->abort_text_out = std::string(abort_error_->what()).substr(0, kMaxReasonBytes);
  frame.bytes = connection->abort_text_out.size();
  queue(connection, frame,
        {BufferList(connection->abort_text_out.data(), connection->abort_text_out.size()), nullptr,
         nullptr});
}

void TcpTransport::send_bye(const ConnectionPtr& connection) {
  Frame bye;
  bye.kind = FrameKind::kBye;
  bye.offset = peer_state(connection->peer()).out.size();
  queue(connection, bye);
}

// Returns memory for the text of a kAbort frame. If the text is longer than any rank sends, the
// memory is empty, so that the connection is closed.
Body TcpTransport::abort_text_body(Connection& connection, size_t bytes) {
  connection.abort_text_in.resize(bytes <= kMaxReasonBytes ? bytes : 0);
  return {BufferList(connection.abort_text_in.data(), connection.abort_text_in.size()), nullptr,
          nullptr};
}

void TcpTransport::abort_locked(const Error& error, const Connection* source) {
  if (abort_error_) return;
  abort_error_ = std::make_unique<Error>(Fault::kAborted, error.rank, error.what());
  for (auto& [fd, connection] : connections_) {
    connection->release_requests(*abort_error_);
    if (connection.get() != source) send_abort(connection);
  }
  for (size_t r = 0; r < peer_states_.size(); ++r) mark_lost(static_cast<int>(r), *abort_error_);
}

void TcpTransport::close() {
  if (getpid() != owner_pid_) return;  // a forked child does not act for the group
  {
    LockHold hold(lock_);
    if (closed_) return;
    accept_arrivals();
    closed_ = true;
    for (auto& [fd, connection] : connections_) {
      if (!abort_error_) send_bye(connection);
    }
    flush_queued(hold);
  }
  // Wait until the peers' hosts have acknowledged all data. Closing a connection may discard the
  // rest.
  const Deadline deadline = Deadline::after(kFlushTimeout);
  for (bool unsent = true; unsent && threads_started_ && !deadline.passed();) {
    {
      LockHold hold(lock_);
      unsent = std::any_of(connections_.begin(), connections_.end(), [](const auto& l) {
        return l.second->has_output() || has_unacknowledged_data(l.first);
      });
    }
    if (unsent) usleep(500);
  }
  detach_from_device();
  drop_everything();
  run_callbacks();
}

void TcpTransport::drop_everything() {
  LockHold hold(lock_);
  const Error closing(Fault::kAborted, peers_.rank, kShutDown);
  if (!abort_error_) abort_error_ = std::make_unique<Error>(closing);
  for (auto& [fd, connection] : connections_) connection->release_requests(closing);
  for (size_t r = 0; r < peer_states_.size(); ++r) mark_lost(static_cast<int>(r), closing);
  hold.wait_for_copies();
  for (PeerState& p : peer_states_) p.out.clear();
  // A child forked in the meantime has these descriptors, too, and peers would wait for it.
  for (auto& [fd, connection] : connections_) shut_down_socket(fd);
  connections_.clear();
}

// Unregisters from the device. Afterwards no thread of the device calls this object.
void TcpTransport::detach_from_device() {
  if (getpid() != owner_pid_) return;
  TcpDevice::Farewell farewell;
  {
    const LockHold hold(lock_);
    farewell.is_group_key = !peer_states_.empty();
    farewell.key = farewell.is_group_key ? peers_.key : farewell_key_;
    if (abort_error_) farewell.failure = *abort_error_;
  }
  device_->unregister_transport(token_, std::move(farewell));
  device_->receiving().remove(receiving_id_);
  device_->sending().remove(sending_id_);
}

}  // namespace fsccl
