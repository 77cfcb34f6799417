// How a transport's connections, peers and the transport itself end.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tcp_transport.h"

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kFarewell(2000);
constexpr std::chrono::milliseconds kDoubt(200);
constexpr size_t kMostWords = 4000;  // of why a group failed

}  // namespace

void TcpTransport::close_connection(Connection& connection) {
  const ConnectionPtr alive = pointer_to(connection);
  connection.closed = true;
  {
    const int rank = connection.peer();
    Pair& p = pair(rank);
    if (connection.opened_here()) {
      p.out.erase(std::remove(p.out.begin(), p.out.end(), alive), p.out.end());
    } else {
      ++p.closed_in;
    }
    p.inbox.forget_connection(&connection);
    const Error why = why_it_ended(connection);
    connection.each_request([&](const Request& r) { note_trouble(r, why); });
    connection.let_go(why);
    if (connection.opened_here()) {
      lost_soon(rank, why);
    } else if (!connection.said_bye || p.closed_in >= p.byes_expected) {
      lost(rank, why);
    }
  }
  poll_for(connection);
  connections_.erase(connection.fd());
  look_for_ends();
}

Error TcpTransport::why_it_ended(const Connection& connection) const {
  const std::string& who = name(connection.peer());
  if (connection.said_bye)
    return {Fault::kPeerLost, connection.peer(), who + kLeft};
  const int code = connection.error != 0 ? connection.error : pending_error(connection.fd());
  std::string why = who + kBroke;
  if (!connection.cut_because.empty()) {
    why += ": " + connection.cut_because;
  } else if (code != 0) {
    why += std::string(": ") + std::strerror(code);
  }
  return {Fault::kPeerLost, connection.peer(), why};
}

void TcpTransport::lost(int rank, const Error& why) {
  Pair& p = pair(rank);
  if (!p.gone) p.gone = std::make_unique<Error>(why);
  p.calls.each_first(kCollectiveTag, [&](const RequestPtr& r) { note_trouble(*r, *p.gone); });
  if (!p.said_bye && rank != peers_.rank) note_trouble(*p.gone, Connection::Clock::now() + kDoubt);
  p.calls.fail_all(*p.gone);
  for (auto& [message, request] : p.held) request->fail(*p.gone);
  p.held.clear();
  p.inbox.fail_unfinished(*p.gone);
  // From anyone is from this one, too; but who has said that it goes has nothing more to send.
  if (!p.said_bye || !anybody_left()) any_.fail_all(*p.gone);
}

bool TcpTransport::anybody_left() const {
  for (size_t r = 0; r < pairs_.size(); ++r) {
    if (static_cast<int>(r) != peers_.rank && !pairs_[r].gone) return true;
  }
  return false;
}

// A connection opened here tells nothing of what the peer has sent: that comes on others, which may
// wait to be accepted, or have not said yet whose they are.
void TcpTransport::lost_soon(int rank, const Error& why) {
  Pair& p = pair(rank);
  if (!p.ending) p.ending = std::make_unique<Error>(why);
  look_for_ends();
}

void TcpTransport::look_for_ends() {
  bool taken = false;
  for (size_t r = 0; r < pairs_.size(); ++r) {
    if (!pairs_[r].ending || pairs_[r].gone) continue;
    if (!std::exchange(taken, true)) take_arrivals();
    const bool more = std::any_of(connections_.begin(), connections_.end(), [&](const auto& entry) {
      const Connection& l = *entry.second;
      return !l.closed && !l.opened_here() && l.peer() == static_cast<int>(r);
    });
    if (!more && !device_->has_strangers(token_)) lost(static_cast<int>(r), *pairs_[r].ending);
  }
}

// From time to time, by the thread of the connections that peers have opened.
void TcpTransport::look_around() {
  const Connection::Clock::time_point now = Connection::Clock::now();
  const std::chrono::milliseconds limit = device_->options().user_timeout;
  const std::string seconds = std::to_string(limit.count() / 1000) + " s";
  std::vector<ConnectionPtr> over;
  for (auto& [fd, connection] : connections_) {
    if (!unheard(fd, look_every_)) connection->heard = now;
    if (now - connection->heard < limit) continue;
    connection->cut_because = "it has acknowledged nothing for " + seconds;
    hang_up(fd);  // which the other thread sees
    if (!connection->opened_here()) over.push_back(connection);
  }
  for (const ConnectionPtr& connection : over) close_connection(*connection);
  look_for_ends();
}

void TcpTransport::abort(const Error& why) {
  Hold hold(guard_);
  abort_locked(why, nullptr);
  push_queued(hold);
  hold.wait_for_copies();
  if (getpid() != process_) return;  // a forked child has neither the threads nor a say
  try {  // who connects later is told then, also where nothing has been sent or received before
    start_threads();
  } catch (const Error&) {
    // No memory for a thread, which may be why the group fails: that is what is to be told.
  }
}

void TcpTransport::tell_failure(const ConnectionPtr& connection) {
  Frame f;
  f.kind = FrameKind::kAbort;
  f.tag = static_cast<uint64_t>(static_cast<int64_t>(failed_->rank));
  connection->text_out = std::string(failed_->what()).substr(0, kMostWords);
  f.bytes = connection->text_out.size();
  queue(connection, f,
        {BufferList(connection->text_out.data(), connection->text_out.size()), nullptr, nullptr});
}

// Room for the words of a kAbort; none for more than anybody sends, which ends the connection.
Body TcpTransport::room_for_words(Connection& connection, size_t bytes) {
  connection.text_in.resize(bytes <= kMostWords ? bytes : 0);
  return {BufferList(connection.text_in.data(), connection.text_in.size()), nullptr, nullptr};
}

void TcpTransport::abort_locked(const Error& why, const Connection* told_by) {
  if (failed_) return;
  failed_ = std::make_unique<Error>(Fault::kAborted, why.rank, why.what());
  for (auto& [fd, connection] : connections_) {
    connection->let_go(*failed_);
    if (connection.get() != told_by) tell_failure(connection);
  }
  for (size_t r = 0; r < pairs_.size(); ++r) lost(static_cast<int>(r), *failed_);
}

void TcpTransport::close() {
  if (getpid() != process_) return;  // a forked child has neither the threads nor a say
  {
    Hold hold(guard_);
    if (closed_) return;
    closed_ = true;
    take_arrivals();
    for (auto& [fd, connection] : connections_) {
      if (failed_) continue;
      Frame bye;
      bye.kind = FrameKind::kBye;
      bye.offset = pair(connection->peer()).out.size();
      queue(connection, bye);
    }
    push_queued(hold);
  }
  // What the kernel has not brought to the peer yet may be lost with the connection.
  const Deadline end = Deadline::after(kFarewell);
  for (bool busy = true; busy && started_ && !end.passed();) {
    {
      Hold hold(guard_);
      busy = std::any_of(connections_.begin(), connections_.end(), [](const auto& l) {
        return l.second->has_output() || under_way(l.first);
      });
    }
    if (busy) usleep(500);
  }
  leave_loops();
  forget_all();
  tell();
}

void TcpTransport::forget_all() {
  Hold hold(guard_);
  const Error over(Fault::kAborted, peers_.rank, "the group has been shut down");
  if (!failed_) failed_ = std::make_unique<Error>(over);
  for (auto& [fd, connection] : connections_) connection->let_go(over);
  for (size_t r = 0; r < pairs_.size(); ++r) lost(static_cast<int>(r), over);
  hold.wait_for_copies();
  for (Pair& p : pairs_) p.out.clear();
  // A child that was forked meanwhile has them too, and peers would wait for it.
  for (auto& [fd, connection] : connections_) hang_up(fd);
  connections_.clear();
}

// No thread of the device's is in here afterwards, or comes back.
void TcpTransport::leave_loops() {
  if (getpid() != process_) return;
  const bool well = !failed_ && !pairs_.empty();
  device_->leave(token_, well ? std::optional<Key>(peers_.key) : std::nullopt);
  device_->receiving().remove(receives_);
  device_->sending().remove(sends_);
}

}  // namespace fsccl
