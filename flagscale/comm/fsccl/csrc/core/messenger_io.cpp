// The messenger's connections and its threads. How they end is in messenger_ends.cpp.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "messenger.h"
#include "thread.h"

namespace fsccl {
namespace {

// Bytes of one connection before the next has its turn; and before who queued them may leave.
constexpr size_t kTurnBytes = 4 << 20, kInlineBytes = 1 << 20;
constexpr std::chrono::milliseconds kMessageNap(100), kLook(1000);

void watch_fd(int epoll, int op, int fd, uint32_t events) {
  epoll_event e{};
  e.events = events;
  e.data.fd = fd;
  epoll_ctl(epoll, op, fd, &e);
}

}  // namespace

Messenger::Messenger(MessengerConfig config, std::vector<Fd> listeners)
    : config_(std::move(config)),
      process_(getpid()),
      look_every_(std::min(kLook, config_.tcp.user_timeout / 4)),
      listeners_(std::move(listeners)),
      peers_(config_.addresses.size()) {
  watch_listeners(EPOLL_CTL_ADD);
}

void Messenger::watch_listeners(int op) {
  for (const Fd& l : listeners_) watch_fd(opened_by_peers_.epoll.get(), op, l.get(), EPOLLIN);
}

Messenger::~Messenger() { stop_threads(); }

Messenger::Loop::Loop()
    : epoll(epoll_create1(EPOLL_CLOEXEC)), bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (epoll.get() < 0 || bell.get() < 0) fail_system("cannot make a poll set");
  watch_fd(epoll.get(), EPOLL_CTL_ADD, bell.get(), EPOLLIN);
}

void Messenger::Loop::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(bell.get(), &one, sizeof one);  // full is awake too
}

void Messenger::ensure_started(Loop& loop, const char* name) {
  if (loop.thread.joinable() || closed_) return;
  loop.thread = std::thread([this, &loop, name] {
    begin_thread(name);
    run(loop);
  });
}

void Messenger::listen() {
  const Hold hold(guard_);
  ensure_started(opened_by_peers_, kReceiverName);
}

void Messenger::touch(int rank) {
  listen();
  Hold hold(guard_);
  if (failed_ || peer(rank).gone || !connect(rank)) return;  // who needs that rank will be told
  queued_.push_back(peer(rank).out[0]);
  push_queued(hold);
}

bool Messenger::connect(int rank) {
  Peer& p = peer(rank);
  if (!p.out.empty()) return true;
  const std::string& address = config_.addresses[static_cast<size_t>(rank)];
  const bool tcp = address.rfind("tcp:", 0) == 0;
  try {
    for (int i = 0; i < (tcp ? config_.tcp.connections : 1); ++i) {
      Fd fd = connect_to(address, config_.tcp);
      const int key = fd.get();
      const auto link = std::make_shared<Link>(std::move(fd), rank, true);
      links_[key] = link;
      Frame hello;
      hello.tag = config_.token;
      hello.message = static_cast<uint64_t>(config_.rank);
      hello.offset = static_cast<uint64_t>(i);
      hello.total = kProtocolVersion;
      link->queue(hello);
      p.out.push_back(link);
      poll_for(*link);
    }
  } catch (const Error& e) {
    lost_soon(rank, Error(Fault::kPeerLost, rank, name(rank) + " cannot be reached: " + e.what()));
    return false;
  }
  ensure_started(opened_by_peers_, kReceiverName);
  ensure_started(opened_here_, "fsccl-sends");
  return true;
}

void Messenger::queue(const LinkPtr& link, const Frame& frame, Body body) {
  link->queue(frame, std::move(body));
  queued_.push_back(link);
}

// Sends what can be sent now; the poll sets take care of the rest. A connection found broken here
// is closed by its thread, which sees it in its poll set too.
void Messenger::push_queued(Hold& hold) {
  for (std::vector<LinkPtr> links; !queued_.empty();) {
    links.clear();
    links.swap(queued_);
    for (const LinkPtr& link : links) {
      const bool waits_for_room = (link->polled & EPOLLOUT) != 0;
      if (!waits_for_room) link->flush(hold, kInlineBytes);
      poll_for(*link);
    }
  }
}

// A stalled connection leaves the poll set: a hang-up cannot be masked and would wake us for ever.
// Who sends needs no word of room, and asks for it when there is none.
void Messenger::poll_for(Link& link) {
  uint32_t events = 0;
  if (!link.closed && !link.stalled()) {
    const bool waits = link.has_output() && !link.sending();
    events = EPOLLIN | (waits ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  }
  if (events == link.polled) return;
  const int op = events == 0        ? EPOLL_CTL_DEL
                 : link.polled != 0 ? EPOLL_CTL_MOD
                                    : EPOLL_CTL_ADD;
  watch_fd(loop_of(link).epoll.get(), op, link.fd(), events);
  link.polled = events;
}

void Messenger::accept_all() {
  for (const Fd& l : listeners_) {
    for (;;) {
      Fd fd = accept_from(l.get(), config_.tcp);
      if (fd.get() < 0) break;
      const int key = fd.get();
      links_[key] = std::make_shared<Link>(std::move(fd), -1, false);
      poll_for(*links_[key]);
    }
    // Whoever knocks stays at the door, and would wake us for ever.
    const bool full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (full && !deaf_) {
      deaf_ = true;
      watch_listeners(EPOLL_CTL_DEL);
    }
  }
}

void Messenger::run(Loop& loop) {
  const bool receives = &loop == &opened_by_peers_;
  const int nap = receives ? static_cast<int>(look_every_.count()) : -1;
  Link::Clock::time_point looked = Link::Clock::now();
  std::array<epoll_event, 64> events;
  for (;;) {
    const int n = epoll_wait(loop.epoll.get(), events.data(), static_cast<int>(events.size()), nap);
    const auto end = events.begin() + std::max(n, 0);
    std::unique_ptr<Error> heard;
    {
      Hold hold(guard_);
      if (stop_) return;
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t drained = read(loop.bell.get(), &count, sizeof count);
      // Strangers first: who has just connected may have sent all it had and left already.
      const auto stranger = [this](const epoll_event& e) { return links_.count(e.data.fd) == 0; };
      if (receives && std::any_of(events.begin(), end, stranger)) accept_all();
      for (auto e = events.begin(); e != end; ++e) {
        const auto link = links_.find(e->data.fd);
        if (link != links_.end()) handle(LinkPtr(link->second), e->events, hold);
      }
      if (receives && Link::Clock::now() - looked >= look_every_) {
        look_around();
        looked = Link::Clock::now();
      }
      heard = std::move(heard_);
    }
    if (heard && aborted_) aborted_(*heard);
    if (receives) call_ready();
  }
}

void Messenger::call_ready() {
  std::vector<std::function<void()>> ready;
  {
    Hold hold(guard_);
    ready.swap(ready_);
  }
  for (const auto& then : ready) then();
}

void Messenger::notify(const RequestPtr& request, std::function<void()> then) {
  {
    Hold hold(guard_);
    if (!request->finished()) {
      auto before = std::move(request->on_settled);
      request->on_settled = [this, before = std::move(before), then = std::move(then)](Request& r) {
        if (before) before(r);
        ready_.push_back(then);
        opened_by_peers_.wake();
      };
      return;
    }
  }
  then();
}

void Messenger::handle(const LinkPtr& link, uint32_t events, Hold& hold) {
  bool alive = true;
  moved_.fetch_add(1, std::memory_order_relaxed);
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
    try {
      alive = link->receive(*this, hold, kTurnBytes);
    } catch (const std::bad_alloc&) {
      alive = false;
      abort_locked(Error(Fault::kSystem, config_.rank,
                         name(config_.rank) + " has no memory for a message of " +
                             (link->peer() < 0 ? "a stranger" : name(link->peer()))),
                   nullptr);
      heard_ = std::make_unique<Error>(*failed_);
    }
    push_queued(hold);
  }
  if (alive && link->has_output()) alive = link->flush(hold, kTurnBytes);
  if (alive && (events & EPOLLERR) != 0) alive = false;
  if (alive) {
    poll_for(*link);
  } else {
    close_link(*link);
  }
}

LinkOwner::Answer Messenger::on_frame(Link& link, const Frame& frame, Body* into) {
  // All else that comes is therefore of a peer.
  if (link.peer() < 0 && !known(frame)) return Answer::kRefuse;
  if (frame.kind == FrameKind::kAbort) {
    *into = room_for_words(link, frame.bytes);
    return Answer::kBody;
  }
  if (failed_) {
    *into = link.filler(frame.bytes);
    return Answer::kBody;
  }
  Answer answer = Answer::kBody;
  if (frame.kind == FrameKind::kMessage || frame.kind == FrameKind::kAnnounce) {
    answer = on_announced(link, frame, into);
  } else if (frame.kind == FrameKind::kStripe) {
    answer = on_stripe(link, frame, into);
  }
  if (answer == Answer::kStall) peer(link.peer()).stalled = true;
  return answer;
}

LinkOwner::Answer Messenger::on_stripe(Link& link, const Frame& frame, Body* into) {
  Incoming* const m = peer(link.peer()).inbox.find(frame.message);
  if (m == nullptr) return Answer::kStall;
  if (frame.bytes > m->total || frame.offset > m->total - frame.bytes) return Answer::kRefuse;
  *into = target_of(link, *m, {frame.offset, frame.offset + frame.bytes});
  return Answer::kBody;
}

void Messenger::on_body(Link& link, const Frame& frame, Hold& hold) {
  switch (frame.kind) {
    case FrameKind::kHello:
      return on_hello(link, frame);
    case FrameKind::kClear:
      return on_clear(link, frame);
    case FrameKind::kAsk:
      return on_ask(link, frame);
    case FrameKind::kAnswer:
      return on_answer(frame);
    case FrameKind::kMessage:
    case FrameKind::kStripe:
      if (!failed_) received(peer(link.peer()), frame, hold);
      return;
    case FrameKind::kAbort:
      if (!failed_) {
        const int at_fault = static_cast<int>(static_cast<int64_t>(frame.tag));
        abort_locked(Error(Fault::kAborted, at_fault, link.text_in), &link);
        heard_ = std::make_unique<Error>(*failed_);
      }
      return;
    case FrameKind::kBye:
      link.said_bye = peer(link.peer()).said_bye = true;
      peer(link.peer()).byes_expected = frame.offset;
      return;
    case FrameKind::kAnnounce:
      return;
  }
}

// Whether a stranger is one of us.
bool Messenger::known(const Frame& hello) const {
  return hello.kind == FrameKind::kHello && hello.bytes == 0 && hello.tag == config_.token &&
         hello.total == kProtocolVersion && hello.message < peers_.size();
}

void Messenger::on_hello(Link& link, const Frame& frame) {
  if (link.peer() >= 0) return;
  link.set_peer(static_cast<int>(frame.message));
  link.heard = Link::Clock::now();
  look_for_ends();
  if (failed_) tell_failure(pointer_to(link));  // it was not there when the others were told
}

void Messenger::on_clear(Link& link, const Frame& frame) {
  Peer& p = peer(link.peer());
  const auto held = p.held.find(frame.message);
  if (held == p.held.end()) return;
  const RequestPtr request = held->second;
  p.held.erase(held);
  send_stripes(p, frame.message, request);
}

void Messenger::wait(const RequestPtr& request, const Deadline& deadline,
                     const std::function<void()>& watch) {
  while (!request->finished()) {
    request->sleep(std::min(kMessageNap, deadline.remaining()));
    if (request->finished()) break;
    if (watch) watch();
    if (deadline.passed()) {
      const int who = request->peer;
      const std::string whom = who == kAnySource ? std::string("no rank's message") : name(who);
      throw Error(
          Fault::kTimeout, who,
          whom + (who == kAnySource ? " came" : " did not come") + " within " + deadline.text());
    }
  }
  if (request->failed()) throw *request->error;
}

}  // namespace fsccl
