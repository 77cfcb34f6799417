#include "endpoint.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <system_error>

#include "../core/thread.h"

namespace fsccl::datagram {
namespace {

void wake_up(int fd) {
  const uint64_t one = 1;
  static_cast<void>(!write(fd, &one, sizeof one));  // where it is full it is awake
}

}  // namespace

Endpoint::Endpoint(const Circle& circle, std::vector<int> members, std::unique_ptr<Socket> socket,
                   size_t payload, Transport& transport)
    : circle_(circle),
      members_(std::move(members)),
      transport_(transport),
      socket_(std::move(socket)),
      wake_(std::make_shared<Fd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))),
      session_(circle, payload, Limits(), *this),
      peers_(members_.size()) {
  if (wake_->get() < 0) fail_system("cannot make an event");
  const std::lock_guard<std::mutex> hold(mutex_);
  for (int r = 0; r < circle_.ranks; ++r) {
    if (r != circle_.rank) peer(r).notice = receive(r, kNoticeTag, sizeof(Notice));
  }
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error&) {
    fail_system("cannot start a thread");
  }
}

Endpoint::~Endpoint() { stop(); }

const Outcome& Endpoint::run(const Job& job, const std::function<void(int)>& watch) {
  std::unique_lock<std::mutex> hold(mutex_);
  if (trouble_) throw Error(*trouble_);
  session_.start(job, now());
  socket_->flush();
  wake_up(wake_->get());
  try {
    while (!session_.done()) {
      const bool woken = done_.wait_for(hold, std::chrono::milliseconds(100),
                                        [this] { return session_.done() || trouble_; });
      if (session_.done()) break;
      if (trouble_) throw Error(*trouble_);
      if (woken) continue;
      const int awaited = session_.awaited();
      const int whom = awaited < 0 ? -1 : members_[static_cast<size_t>(awaited)];
      hold.unlock();
      watch(whom);
      hold.lock();
    }
  } catch (const Error&) {
    if (!hold.owns_lock()) hold.lock();
    session_.cancel();
    throw;
  }
  return session_.outcome();
}

Counters Endpoint::counters() {
  const std::lock_guard<std::mutex> hold(mutex_);
  uint64_t sent_bytes = 0;
  for (const Peer& p : peers_) sent_bytes += p.sent.bytes;
  return {session_.dropped(), sent_bytes, socket_->kernel_drops(), socket_->refused()};
}

std::map<int, Transport::Traffic> Endpoint::sent() {
  const std::lock_guard<std::mutex> hold(mutex_);
  std::map<int, Transport::Traffic> out;
  for (size_t r = 0; r < peers_.size(); ++r) out[members_[r]] = peers_[r].sent;
  return out;
}

void Endpoint::send(int to, size_t bytes) {
  socket_->send(to, bytes);
  Transport::Traffic& sent = peer(to).sent;
  ++sent.messages;
  sent.bytes += bytes;
}

void Endpoint::stop() {
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    if (stop_) return;
    stop_ = true;
    session_.last_words([this](int r, const std::vector<std::byte>& record) {
      if (!peer(r).gone) tell_record(r, record);
    });
    session_.cancel();
  }
  wake_up(wake_->get());
  thread_.join();
}

void Endpoint::work() {
  begin_thread("fsccl-tail");
  std::unique_lock<std::mutex> hold(mutex_);
  while (!stop_) {
    Time at = now(), next = at + std::chrono::seconds(1);
    try {
      next = session_.step(at);
      socket_->flush();
      take_messages();
      look_for_gone();
    } catch (const Error& why) {
      trouble_ = why;
      session_.cancel();
    }
    if (session_.done() || trouble_) done_.notify_all();
    // While there is something to send, what has come is looked at when it is time to send more.
    const bool reading = !session_.sending();
    hold.unlock();
    socket_->wait(wake_->get(), next - now(), reading);
    hold.lock();
    uint64_t woken = 0;
    static_cast<void>(!read(wake_->get(), &woken, sizeof woken));
    at = now();
    const auto take = [&](int from, const std::byte* packet, size_t bytes) {
      session_.on_packet(from, packet, bytes, at);
    };
    for (int batch = 0; batch < 4 && socket_->receive(take); ++batch) continue;
  }
}

// Who asks has a place for the answer first.
void Endpoint::tell(int to, const Notice& notice) {
  Peer& p = peer(to);
  if (notice.kind == Notice::kAsk && !p.record.request) {
    p.record = receive(to, kRecordTag, session_.record_bytes());
  }
  post(to, kNoticeTag, &notice, sizeof notice);
}

void Endpoint::tell_record(int to, const std::vector<std::byte>& record) {
  post(to, kRecordTag, record.data(), record.size());
}

void Endpoint::post(int to, uint64_t tag, const void* data, size_t bytes) {
  sends_.remove_if([](const Post& p) { return p.request->finished(); });
  const auto* const from = static_cast<const std::byte*>(data);
  Post out{nullptr, std::make_shared<std::vector<std::byte>>(from, from + bytes)};
  out.request = transport_.send(members_[static_cast<size_t>(to)], tag,
                                BufferList(out.memory->data(), bytes));
  sends_.push_back(std::move(out));
}

Endpoint::Post Endpoint::receive(int from, uint64_t tag, size_t bytes) {
  Post in{nullptr, std::make_shared<std::vector<std::byte>>(bytes)};
  in.request = transport_.recv(members_[static_cast<size_t>(from)], tag,
                               BufferList(in.memory->data(), bytes));
  // Whoever holds the memory as long as the request may be written to: also when this end is gone.
  transport_.notify(in.request, [wake = wake_, memory = in.memory] { wake_up(wake->get()); });
  return in;
}

void Endpoint::take_messages() {
  for (int r = 0; r < circle_.ranks; ++r) {
    Peer& p = peer(r);
    while (p.notice.request && p.notice.request->finished()) {
      if (p.notice.request->failed()) {
        p.gone = *p.notice.request->error;
        p.notice = {};
        break;
      }
      Notice notice;
      std::memcpy(&notice, p.notice.memory->data(), sizeof notice);
      p.notice = receive(r, kNoticeTag, sizeof notice);
      session_.on_notice(r, notice, now());
    }
    if (!p.record.request || !p.record.request->finished()) continue;
    const Post come = std::exchange(p.record, {});
    if (!come.request->failed()) {
      session_.on_record(r, *come.memory, now());
    } else if (session_.awaits(r)) {
      trouble_ = *come.request->error;
    }
  }
  if (session_.unlike() >= 0 && !trouble_) {
    const int who = members_[static_cast<size_t>(session_.unlike())];
    trouble_.emplace(Fault::kMismatch, who,
                     "rank " + std::to_string(who) + " of the group called another all_reduce, of "
                     "other elements or so many, than this rank");
  }
}

// A rank that has left may have said what is needed of it before.
void Endpoint::look_for_gone() {
  for (int r = 0; r < circle_.ranks; ++r) {
    Peer& p = peer(r);
    if (!p.gone || trouble_ || !session_.awaits(r)) continue;
    if (!session_.agreeing()) {
      trouble_ = *p.gone;
    } else if (!p.record.request) {
      p.record = receive(r, kRecordTag, session_.record_bytes());
    }
  }
}

}  // namespace fsccl::datagram
