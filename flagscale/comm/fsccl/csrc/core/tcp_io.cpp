// The transport's connections. How they end is in tcp_ends.cpp.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tcp_transport.h"
#include "text.h"
#include "topology.h"

namespace fsccl {
namespace {

// Bytes of one connection before the next has its turn; and before who queued them may leave.
constexpr size_t kTurnBytes = 4 << 20, kInlineBytes = 1 << 20;
constexpr std::chrono::milliseconds kLook(1000);
constexpr uint64_t kMostConnections = 64;  // that a peer opens

}  // namespace

TcpTransport::TcpTransport(std::shared_ptr<TcpDevice> device)
    : device_(std::move(device)),
      process_(getpid()),
      look_every_(std::min(kLook, device_->options().user_timeout / 4)) {
  receives_ = device_->receiving().add(this);
  sends_ = device_->sending().add(this);
  token_ = device_->enter(receives_);
}

TcpTransport::~TcpTransport() { leave_loops(); }

std::string TcpTransport::address() const {
  return std::to_string(token_) + " " + device_->unix_address() + device_->tcp_addresses();
}

void TcpTransport::meet(Peers peers) {
  Hold hold(guard_);
  peers_ = std::move(peers);
  pairs_ = std::vector<Pair>(peers_.names.size());
  for (Pair& p : pairs_) p.inbox.count_in(&device_->kept());
  take_arrivals();
}

void TcpTransport::start_threads() {
  if (started_ || closed_) return;
  device_->receiving().start();
  device_->sending().start();
  started_ = true;
}

void TcpTransport::listen() {
  const Hold hold(guard_);
  start_threads();
}

void TcpTransport::touch(int rank) {
  listen();
  Hold hold(guard_);
  if (failed_ || pair(rank).gone || !connect(rank)) return;  // who needs that rank will be told
  queued_.push_back(pair(rank).out[0]);
  push_queued(hold);
}

bool TcpTransport::connect(int rank, size_t bytes) {
  Pair& p = pair(rank);
  const bool near = peers_.near[static_cast<size_t>(rank)];
  const size_t most = near || bytes <= kStripeBytes ? 1 : ceil_div(bytes, kStripeBytes);
  const TcpOptions& options = device_->options();
  const auto interfaces = static_cast<size_t>(options.interfaces);
  const auto all = ceil_div(static_cast<size_t>(options.connections), interfaces) * interfaces;
  const size_t ways = std::min(most, all);
  try {
    while (p.out.size() < ways) open(rank, near);
  } catch (const Error& e) {
    if (!p.out.empty()) return true;  // it goes by fewer
    const bool ours = e.fault != Fault::kPeerLost;
    lost_soon(rank, Error(e.fault, ours ? peers_.rank : rank,
                          (ours ? name(peers_.rank) + " cannot reach " + name(rank)
                                : name(rank) + " cannot be reached") +
                              ": " + e.what()));
    return false;
  }
  return true;
}

void TcpTransport::open(int rank, bool near) {
  Pair& p = pair(rank);
  const std::vector<std::string> to = split(peers_.addresses[static_cast<size_t>(rank)], ' ');
  Frame hello;
  if (to.size() < 3 || !read_number(to[0], &hello.tag)) fail_usage("it has no such address");
  const std::string& far = to[to.size() - 1 - p.out.size() % (to.size() - 2)];
  hello.message = static_cast<uint64_t>(peers_.rank);
  hello.flags = kProtocolVersion;
  hello.offset = p.opened++;
  hello.total = random_number();
  Fd fd = connect_to(near ? to[1] : far, device_->options());
  const Key key = key_of_connection(peers_.key, hello);
  const auto connection = std::make_shared<Connection>(std::move(fd), rank, true, key);
  connections_[connection->fd()] = connection;
  connection->queue(hello);
  p.out.push_back(connection);
  poll_for(*connection);
  start_threads();
}

void TcpTransport::queue(const ConnectionPtr& connection, const Frame& frame, Body body) {
  connection->queue(frame, std::move(body));
  queued_.push_back(connection);
}

// Sends what can be sent now; the poll sets take care of the rest. A connection found broken here
// is closed by its thread, which sees it in its poll set too.
void TcpTransport::push_queued(Hold& hold) {
  for (std::vector<ConnectionPtr> connections; !queued_.empty();) {
    connections.clear();
    connections.swap(queued_);
    for (const ConnectionPtr& connection : connections) {
      const bool waits_for_room = (connection->polled & EPOLLOUT) != 0;
      if (!waits_for_room) connection->flush(hold, kInlineBytes);
      poll_for(*connection);
    }
  }
}

// A stalled connection leaves the poll set: a hang-up cannot be masked and would wake us for ever.
// Who sends needs no word of room, and asks for it when there is none.
void TcpTransport::poll_for(Connection& connection) {
  uint32_t events = 0;
  if (!connection.closed && !connection.stalled()) {
    const bool waits = connection.has_output() && !connection.sending();
    events = EPOLLIN | (waits ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  }
  if (events == connection.polled) return;
  const bool ours = connection.opened_here();
  EventLoop& loop = ours ? device_->sending() : device_->receiving();
  loop.set(ours ? sends_ : receives_, connection.fd(), connection.polled, events);
  connection.polled = events;
}

// Of peers that have connected since; once they are known, all that has come before that.
void TcpTransport::take_arrivals() {
  if (pairs_.empty()) return;
  for (TcpDevice::Arrival& a : device_->arrivals(token_)) {
    const Frame& hello = a.hello;
    const Key key = key_of_connection(peers_.key, hello);
    if (hello.message >= pairs_.size() || hello.offset >= kMostConnections ||
        hello.mac != mac_of(key, hello, 0)) {
      continue;  // none of us
    }
    const int rank = static_cast<int>(hello.message);
    const uint64_t which = uint64_t{1} << hello.offset;
    if ((pair(rank).called_in & which) != 0) continue;  // it is being repeated
    pair(rank).called_in |= which;
    const int fd = a.fd.get();
    const auto connection = std::make_shared<Connection>(std::move(a.fd), rank, false, key);
    connections_[fd] = connection;
    poll_for(*connection);
    if (failed_) tell_failure(connection);  // it was not there when the others were told
  }
}

// Somebody has come, or a stranger has gone, or a request has finished that somebody wants to know
// of.
void TcpTransport::on_poke() {
  {
    Hold hold(guard_);
    take_arrivals();
    look_for_ends();
    push_queued(hold);
  }
  tell();
}

void TcpTransport::on_tick() {
  const Hold hold(guard_);
  if (closed_ || Connection::Clock::now() - looked_ < look_every_) return;
  looked_ = Connection::Clock::now();
  look_around();
}

// Without the lock, to whom it concerns.
void TcpTransport::tell() {
  std::vector<std::function<void()>> ready;
  std::unique_ptr<Error> heard;
  {
    const Hold hold(guard_);
    ready.swap(ready_);
    heard = std::move(heard_);
  }
  if (heard && aborted_) aborted_(*heard);
  for (const auto& then : ready) then();
}

void TcpTransport::notify(const RequestPtr& request, std::function<void()> then) {
  {
    Hold hold(guard_);
    if (!request->finished()) {
      auto before = std::move(request->on_settled);
      request->on_settled = [this, before = std::move(before), then = std::move(then)](Request& r) {
        if (before) before(r);
        ready_.push_back(then);
        device_->receiving().poke(receives_);
      };
      return;
    }
  }
  then();
}

void TcpTransport::on_events(int fd, uint32_t events) {
  {
    Hold hold(guard_);
    const auto found = connections_.find(fd);
    if (found != connections_.end()) handle(ConnectionPtr(found->second), events, hold);
    if (!heard_) return;
  }
  tell();
}

void TcpTransport::handle(const ConnectionPtr& connection, uint32_t events, Hold& hold) {
  bool alive = true;
  moved_.fetch_add(1, std::memory_order_relaxed);
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
    try {
      alive = connection->receive(*this, hold, kTurnBytes);
    } catch (const std::bad_alloc&) {
      alive = false;
      abort_locked(
          Error(Fault::kSystem, peers_.rank,
                name(peers_.rank) + " has no memory for a message of " + name(connection->peer())),
          nullptr);
      heard_ = std::make_unique<Error>(*failed_);
    }
    push_queued(hold);
  }
  if (alive && connection->has_output()) alive = connection->flush(hold, kTurnBytes);
  if (alive && (events & EPOLLERR) != 0) alive = false;
  if (alive) return poll_for(*connection);
  // Who sends may have sent all, and the peer taken it and left, before it could say so here.
  hold.wait_until([&] { return !connection->sending(); });
  close_connection(*connection);
}

ConnectionOwner::Answer TcpTransport::on_frame(Connection& connection, const Frame& frame,
                                               Body* into) {
  if (frame.kind == FrameKind::kAbort) {
    *into = room_for_words(connection, frame.bytes);
    return Answer::kBody;
  }
  if (failed_) {
    *into = connection.filler(frame.bytes);
    return Answer::kBody;
  }
  Answer answer = Answer::kBody;
  if (frame.kind == FrameKind::kMessage || frame.kind == FrameKind::kAnnounce) {
    answer = on_announced(connection, frame, into);
  } else if (frame.kind == FrameKind::kStripe) {
    answer = on_stripe(connection, frame, into);
  }
  if (answer == Answer::kStall) pair(connection.peer()).stalled = true;
  return answer;
}

ConnectionOwner::Answer TcpTransport::on_stripe(Connection& connection, const Frame& frame,
                                                Body* into) {
  Incoming* const m = pair(connection.peer()).inbox.find(frame.message);
  if (m == nullptr) return Answer::kStall;
  if (frame.bytes > m->total || frame.offset > m->total - frame.bytes) return Answer::kRefuse;
  *into = target_of(connection, *m, {frame.offset, frame.offset + frame.bytes});
  return Answer::kBody;
}

void TcpTransport::on_body(Connection& connection, const Frame& frame, Hold& hold) {
  switch (frame.kind) {
    case FrameKind::kHello:  // the device has had it
      return;
    case FrameKind::kClear:
      return on_clear(connection, frame);
    case FrameKind::kAsk:
      return on_ask(connection, frame);
    case FrameKind::kAnswer:
      return on_answer(frame);
    case FrameKind::kMessage:
    case FrameKind::kStripe:
      if (!failed_) received(pair(connection.peer()), frame, hold);
      return;
    case FrameKind::kAbort:
      if (!failed_) {
        const int at_fault = static_cast<int>(static_cast<int64_t>(frame.tag));
        abort_locked(Error(Fault::kAborted, at_fault, connection.text_in), &connection);
        heard_ = std::make_unique<Error>(*failed_);
      }
      return;
    case FrameKind::kBye:
      connection.said_bye = pair(connection.peer()).said_bye = true;
      pair(connection.peer()).byes_expected = frame.offset;
      return;
    case FrameKind::kAnnounce:
      return;
  }
}

void TcpTransport::on_clear(Connection& connection, const Frame& frame) {
  Pair& p = pair(connection.peer());
  const auto held = p.held.find(frame.message);
  if (held == p.held.end()) return;
  const RequestPtr request = held->second;
  p.held.erase(held);
  send_stripes(p, frame.message, request);
}

}  // namespace fsccl
