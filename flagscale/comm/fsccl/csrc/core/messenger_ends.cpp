// How a messenger's connections, peers and the messenger itself end.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "messenger.h"

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kFarewell(2000);
constexpr std::chrono::milliseconds kDoubt(200);
constexpr size_t kMostWords = 4000;  // of why a group failed

}  // namespace

void Messenger::close_link(Link& link) {
  const LinkPtr alive = pointer_to(link);
  link.closed = true;
  if (const int rank = link.peer(); rank >= 0) {
    Peer& p = peer(rank);
    if (link.opened_here()) {
      p.out.erase(std::remove(p.out.begin(), p.out.end(), alive), p.out.end());
    } else {
      ++p.closed_in;
    }
    p.inbox.forget_link(&link);
    const Error why = why_it_ended(link);
    link.each_request([&](const Request& r) { note_trouble(r, why); });
    link.let_go(why);
    if (link.opened_here()) {
      lost_soon(rank, why);
    } else if (!link.said_bye || p.closed_in >= p.byes_expected) {
      lost(rank, why);
    }
  }
  poll_for(link);
  links_.erase(link.fd());
  look_for_ends();
}

Error Messenger::why_it_ended(const Link& link) const {
  const std::string& who = name(link.peer());
  if (link.said_bye) return {Fault::kPeerLost, link.peer(), who + " has left the group"};
  const int code = link.error != 0 ? link.error : pending_error(link.fd());
  std::string why = who + " ended or its connection broke";
  if (!link.cut_because.empty()) {
    why += ": " + link.cut_because;
  } else if (code != 0) {
    why += std::string(": ") + std::strerror(code);
  }
  return {Fault::kPeerLost, link.peer(), why};
}

void Messenger::lost(int rank, const Error& why) {
  Peer& p = peer(rank);
  if (!p.gone) p.gone = std::make_unique<Error>(why);
  p.calls.each_first(kCollectiveTag, [&](const RequestPtr& r) { note_trouble(*r, *p.gone); });
  if (!p.said_bye && rank != config_.rank) note_trouble(*p.gone, Link::Clock::now() + kDoubt);
  p.calls.fail_all(*p.gone);
  for (auto& [message, request] : p.held) request->fail(*p.gone);
  p.held.clear();
  p.inbox.fail_unfinished(*p.gone);
  // From anyone is from this one, too; but who has said that it goes has nothing more to send.
  if (!p.said_bye || !anybody_left()) any_.fail_all(*p.gone);
}

bool Messenger::anybody_left() const {
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (static_cast<int>(r) != config_.rank && !peers_[r].gone) return true;
  }
  return false;
}

// A connection opened here tells nothing of what the peer has sent: that comes on others, which may
// wait to be accepted, or have not said yet whose they are.
void Messenger::lost_soon(int rank, const Error& why) {
  Peer& p = peer(rank);
  if (!p.ending) p.ending = std::make_unique<Error>(why);
  look_for_ends();
}

void Messenger::look_for_ends() {
  bool accepted = false;
  const Link::Clock::time_point now = Link::Clock::now();
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (!peers_[r].ending || peers_[r].gone) continue;
    if (!accepted) accept_all();
    accepted = true;
    const bool more = std::any_of(links_.begin(), links_.end(), [&](const auto& entry) {
      const Link& l = *entry.second;
      const bool may_be_its = l.peer() < 0 && now - l.made < config_.hello_time;
      return !l.closed && !l.opened_here() && (may_be_its || l.peer() == static_cast<int>(r));
    });
    if (!more) lost(static_cast<int>(r), *peers_[r].ending);
  }
}

// From time to time, by the thread of the connections that peers have opened.
void Messenger::look_around() {
  if (deaf_) {
    deaf_ = false;
    watch_listeners(EPOLL_CTL_ADD);
    accept_all();
  }
  const Link::Clock::time_point now = Link::Clock::now();
  const std::chrono::milliseconds limit = config_.tcp.user_timeout;
  const std::string seconds = std::to_string(limit.count() / 1000) + " s";
  std::vector<LinkPtr> over;
  for (auto& [fd, link] : links_) {
    const bool stranger = link->peer() < 0;
    if (!stranger && !unheard(fd, look_every_)) link->heard = now;
    if (now - (stranger ? link->made : link->heard) < (stranger ? config_.hello_time : limit)) {
      continue;
    }
    link->cut_because = "it has acknowledged nothing for " + seconds;
    hang_up(fd);  // which the other thread sees
    if (!link->opened_here()) over.push_back(link);
  }
  for (const LinkPtr& link : over) close_link(*link);
  look_for_ends();
}

void Messenger::abort(const Error& why) {
  Hold hold(guard_);
  abort_locked(why, nullptr);
  push_queued(hold);
  hold.wait_for_copies();
  if (getpid() != process_) return;  // a forked child has neither the threads nor a say
  try {  // who connects later is told then, also where nothing has been sent or received before
    ensure_started(opened_by_peers_, kReceiverName);
  } catch (const std::system_error&) {
    // No memory for a thread, which may be why the group fails: that is what is to be told.
  }
}

void Messenger::tell_failure(const LinkPtr& link) {
  Frame f;
  f.kind = FrameKind::kAbort;
  f.tag = static_cast<uint64_t>(static_cast<int64_t>(failed_->rank));
  link->text_out = std::string(failed_->what()).substr(0, kMostWords);
  f.bytes = link->text_out.size();
  queue(link, f, {Pieces(link->text_out.data(), link->text_out.size()), nullptr, nullptr});
}

// Room for the words of a kAbort; none for more than anybody sends, which ends the connection.
Body Messenger::room_for_words(Link& link, size_t bytes) {
  link.text_in.resize(bytes <= kMostWords ? bytes : 0);
  return {Pieces(link.text_in.data(), link.text_in.size()), nullptr, nullptr};
}

void Messenger::abort_locked(const Error& why, const Link* told_by) {
  if (failed_) return;
  failed_ = std::make_unique<Error>(Fault::kAborted, why.rank, why.what());
  for (auto& [fd, link] : links_) {
    link->let_go(*failed_);
    if (link.get() != told_by) tell_failure(link);
  }
  for (size_t r = 0; r < peers_.size(); ++r) lost(static_cast<int>(r), *failed_);
}

void Messenger::close() {
  if (getpid() != process_) return;  // a forked child has neither the threads nor a say
  {
    Hold hold(guard_);
    if (closed_) return;
    closed_ = true;
    accept_all();
    for (auto& [fd, link] : links_) {
      if (failed_) continue;
      Frame bye;
      bye.kind = FrameKind::kBye;
      bye.offset = link->peer() >= 0 ? peer(link->peer()).out.size() : 0;
      queue(link, bye);
    }
    push_queued(hold);
  }
  // What the kernel has not brought to the peer yet may be lost with the connection.
  const Deadline end = Deadline::after(kFarewell);
  for (bool busy = true; busy && opened_by_peers_.thread.joinable() && !end.passed();) {
    {
      Hold hold(guard_);
      busy = std::any_of(links_.begin(), links_.end(), [](const auto& l) {
        return l.second->has_output() || under_way(l.first);
      });
    }
    if (busy) usleep(500);
  }
  stop_threads();
  forget_all();
  call_ready();
}

void Messenger::forget_all() {
  Hold hold(guard_);
  const Error over(Fault::kAborted, config_.rank, "the group has been shut down");
  if (!failed_) failed_ = std::make_unique<Error>(over);
  for (auto& [fd, link] : links_) link->let_go(over);
  for (size_t r = 0; r < peers_.size(); ++r) lost(static_cast<int>(r), over);
  hold.wait_for_copies();
  for (Peer& p : peers_) p.out.clear();
  // A child that was forked meanwhile has them too, and peers would wait for it.
  for (auto& [fd, link] : links_) hang_up(fd);
  for (const Fd& l : listeners_) hang_up(l.get());
  links_.clear();
  listeners_.clear();
}

void Messenger::stop_threads() {
  if (getpid() != process_) {
    for (Loop* loop : {&opened_by_peers_, &opened_here_}) {
      if (loop->thread.joinable()) loop->thread.detach();
    }
    return;
  }
  {
    Hold hold(guard_);
    stop_ = true;
    closed_ = true;
  }
  for (Loop* loop : {&opened_by_peers_, &opened_here_}) {
    loop->wake();
    if (loop->thread.joinable()) loop->thread.join();
  }
}

}  // namespace fsccl
