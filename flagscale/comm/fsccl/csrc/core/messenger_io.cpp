// The messenger's connections and its thread.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "messenger.h"
#include "thread.h"

namespace fsccl {
namespace {

constexpr size_t kReadBudget = 4 << 20;  // bytes from one connection before the next has its turn
constexpr std::chrono::milliseconds kMessageNap(100), kFarewell(2000);

void watch_fd(int epoll, int op, int fd, uint32_t events) {
  epoll_event e{};
  e.events = events;
  e.data.fd = fd;
  epoll_ctl(epoll, op, fd, &e);
}

}  // namespace

Messenger::Messenger(MessengerConfig config, std::vector<Fd> listeners)
    : config_(std::move(config)),
      listeners_(std::move(listeners)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(config_.addresses.size()) {
  if (epoll_.get() < 0 || wake_.get() < 0) fail_system("cannot make a poll set");
  watch_fd(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), EPOLLIN);
  for (const Fd& l : listeners_) watch_fd(epoll_.get(), EPOLL_CTL_ADD, l.get(), EPOLLIN);
}

Messenger::~Messenger() { stop_thread(); }

void Messenger::ensure_started() {
  if (!thread_.joinable() && !closed_) thread_ = std::thread([this] { run(); });
}

void Messenger::listen() {
  const std::lock_guard<std::mutex> hold(mutex_);
  ensure_started();
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
      Link& link =
          *links_.emplace(key, std::make_unique<Link>(std::move(fd), rank, true)).first->second;
      Frame hello;
      hello.tag = config_.token;
      hello.message = static_cast<uint64_t>(config_.rank);
      hello.offset = static_cast<uint64_t>(i);
      hello.total = kProtocolVersion;
      link.queue(hello);
      p.out.push_back(&link);
      push(link);
    }
  } catch (const Error& e) {
    lost(rank, Error(Fault::kPeerLost, rank, name(rank) + " cannot be reached: " + e.what()));
    return false;
  }
  ensure_started();
  return true;
}

// Sends what can be sent now; the poll set takes care of the rest. A connection found broken here
// is closed by the thread, which sees it in the poll set too.
void Messenger::push(Link& link) {
  link.flush();
  poll_for(link);
}

// A stalled connection leaves the poll set: a hang-up cannot be masked and would wake us for ever.
void Messenger::poll_for(Link& link) {
  const bool wanted = !link.stalled();
  const uint32_t events = EPOLLIN | (link.has_output() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  const int op = link.polled ? (wanted ? EPOLL_CTL_MOD : EPOLL_CTL_DEL) : EPOLL_CTL_ADD;
  if (wanted || link.polled) watch_fd(epoll_.get(), op, link.fd(), events);
  link.polled = wanted;
}

void Messenger::accept_all() {
  for (const Fd& l : listeners_) {
    for (;;) {
      Fd fd = accept_from(l.get(), config_.tcp);
      if (fd.get() < 0) break;
      const int key = fd.get();
      auto link = std::make_unique<Link>(std::move(fd), -1, false);
      poll_for(*links_.emplace(key, std::move(link)).first->second);
    }
  }
}

void Messenger::run() {
  begin_thread("fsccl-messages");
  std::vector<epoll_event> events(64);
  for (;;) {
    const int n = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    std::unique_ptr<Error> heard;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      if (stop_) return;
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t drained = read(wake_.get(), &count, sizeof count);
      // Strangers first: who has just connected may have sent all it had and left already.
      const auto stranger = [this](const epoll_event& e) { return links_.count(e.data.fd) == 0; };
      if (std::any_of(events.begin(), events.begin() + std::max(n, 0), stranger)) accept_all();
      for (int i = 0; i < n; ++i) {
        const auto link = links_.find(events[static_cast<size_t>(i)].data.fd);
        if (link != links_.end()) handle(*link->second, events[static_cast<size_t>(i)].events);
      }
      heard = std::move(heard_);
    }
    if (heard && aborted_) aborted_(*heard);
    call_ready();
  }
}

void Messenger::call_ready() {
  std::vector<std::function<void()>> ready;
  {
    std::lock_guard<std::mutex> hold(mutex_);
    ready.swap(ready_);
  }
  for (const auto& then : ready) then();
}

void Messenger::notify(const RequestPtr& request, std::function<void()> then) {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    if (!request->finished()) {
      request->on_settled = [this, then = std::move(then)](Request&) {
        ready_.push_back(then);
        wake();
      };
      return;
    }
  }
  then();
}

void Messenger::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof one);  // full is awake too
}

void Messenger::handle(Link& link, uint32_t events) {
  bool alive = true;
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) alive = link.receive(*this, kReadBudget);
  if (alive && link.has_output()) alive = link.flush();
  if (alive && (events & EPOLLERR) != 0) alive = false;
  if (alive) {
    poll_for(link);
  } else {
    close_link(link);
  }
}

void Messenger::close_link(Link& link) {
  const int rank = link.peer();
  if (rank >= 0) {
    Peer& p = peer(rank);
    if (link.opened_here()) {
      p.out.erase(std::remove(p.out.begin(), p.out.end(), &link), p.out.end());
    } else {
      ++p.closed_in;
    }
    for (Incoming& m : p.incoming) {
      if (m.link == &link) m.link = nullptr;
    }
    if (link.said_bye) {
      const Error left(Fault::kPeerLost, rank, name(rank) + " has left the group");
      link.let_go(left);
      if (p.closed_in >= p.byes_expected) lost(rank, left);
    } else {
      const int code = pending_error(link.fd());
      const std::string why = code != 0 ? std::string(": ") + std::strerror(code) : "";
      const Error gone(Fault::kPeerLost, rank, name(rank) + " ended or its connection broke" + why);
      link.let_go(gone);
      lost(rank, gone);
    }
  }
  links_.erase(link.fd());
}

LinkOwner::Answer Messenger::on_frame(Link& link, const Frame& frame, Pieces* into) {
  if (frame.kind == FrameKind::kAbort) {
    link.text_in.resize(frame.bytes < 4096 ? frame.bytes : 0);
    *into = Pieces(link.text_in.data(), link.text_in.size());
    return Answer::kBody;
  }
  // A stranger's frame gets no memory, which ends the connection; only a hello has no body.
  if (link.peer() < 0) return Answer::kBody;
  if (failed_) {
    *into = link.filler(frame.bytes);
    return Answer::kBody;
  }
  if (frame.kind == FrameKind::kMessage || frame.kind == FrameKind::kAnnounce) {
    on_announced(link, frame, into);
  } else if (frame.kind == FrameKind::kStripe) {
    return on_stripe(link, frame, into);
  }
  return Answer::kBody;
}

LinkOwner::Answer Messenger::on_stripe(Link& link, const Frame& frame, Pieces* into) {
  for (Incoming& m : peer(link.peer()).incoming) {
    if (m.message != frame.message) continue;
    if (frame.offset + frame.bytes <= m.total) {
      *into = target_of(m, {frame.offset, frame.offset + frame.bytes});
    }
    return Answer::kBody;
  }
  return Answer::kStall;
}

void Messenger::on_body(Link& link, const Frame& frame) {
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
      if (!failed_ && link.peer() >= 0) received(peer(link.peer()), frame.message, frame.bytes);
      return;
    case FrameKind::kAbort:
      if (!failed_ && link.peer() >= 0) {
        const int at_fault = static_cast<int>(static_cast<int64_t>(frame.tag));
        abort_locked(Error(Fault::kAborted, at_fault, link.text_in), &link);
        heard_ = std::make_unique<Error>(*failed_);
      }
      return;
    case FrameKind::kBye:
      link.said_bye = true;
      if (link.peer() >= 0) peer(link.peer()).byes_expected = frame.offset;
      return;
    case FrameKind::kAnnounce:
      return;
  }
}

void Messenger::on_hello(Link& link, const Frame& frame) {
  const bool known = frame.tag == config_.token && frame.total == kProtocolVersion &&
                     frame.message < peers_.size() && link.peer() < 0;
  if (known) link.set_peer(static_cast<int>(frame.message));
}

void Messenger::on_clear(Link& link, const Frame& frame) {
  if (link.peer() < 0) return;
  Peer& p = peer(link.peer());
  const auto held = p.held.find(frame.message);
  if (held == p.held.end()) return;
  const RequestPtr request = held->second;
  p.held.erase(held);
  send_stripes(p, frame.message, request);
  push(*p.out[0]);
}

void Messenger::wait(const RequestPtr& request, const Deadline& deadline,
                     const std::function<void()>& watch) {
  while (!request->finished()) {
    futex_wait(request->state, Request::kPending, std::min(kMessageNap, deadline.remaining()));
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
  if (request->state.load(std::memory_order_acquire) == Request::kFailed) throw *request->error;
}

void Messenger::close() {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    if (closed_) return;
    closed_ = true;
    accept_all();
    for (auto& [fd, link] : links_) {
      if (failed_) continue;
      Frame bye;
      bye.kind = FrameKind::kBye;
      bye.offset = link->peer() >= 0 ? peer(link->peer()).out.size() : 0;
      link->queue(bye);
      push(*link);
    }
  }
  const Deadline end = Deadline::after(kFarewell);
  for (bool busy = true; busy && thread_.joinable() && !end.passed();) {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      busy = std::any_of(links_.begin(), links_.end(),
                         [](const auto& l) { return l.second->has_output(); });
    }
    if (busy) usleep(500);
  }
  stop_thread();
  forget_all();
  call_ready();
}

void Messenger::forget_all() {
  std::lock_guard<std::mutex> hold(mutex_);
  const Error over(Fault::kAborted, config_.rank, "the group has been shut down");
  if (!failed_) failed_ = std::make_unique<Error>(over);
  for (auto& [fd, link] : links_) link->let_go(over);
  for (size_t r = 0; r < peers_.size(); ++r) lost(static_cast<int>(r), over);
  for (Posted& posted : any_) posted.request->fail(over);
  any_.clear();
  for (Peer& p : peers_) p.out.clear();
  links_.clear();
  listeners_.clear();
}

void Messenger::stop_thread() {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    stop_ = true;
    closed_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

}  // namespace fsccl
