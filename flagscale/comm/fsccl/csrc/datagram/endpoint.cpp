#include "endpoint.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <system_error>

#include "../core/thread.h"

namespace fsccl::datagram {
namespace {

void signal_event(int fd) {
  const uint64_t increment = 1;
  // Fails with EAGAIN if it is signalled already.
  static_cast<void>(!write(fd, &increment, sizeof increment));
}

}  // namespace

Endpoint::Endpoint(const Rail& rail, std::vector<int> members, std::unique_ptr<Socket> socket,
                   size_t payload, Transport& transport)
    : rail_(rail),
      members_(std::move(members)),
      transport_(transport),
      socket_(std::move(socket)),
      wake_fd_(std::make_shared<Fd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))),
      session_(rail, payload, ProtocolLimits(), *this),
      peers_(members_.size()) {
  if (wake_fd_->get() < 0) fail_system("cannot make an event");
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int r = 0; r < rail_.ranks; ++r) {
    if (r != rail_.rank) peer(r).notice = post_receive(r, kNoticeTag, sizeof(Notice));
  }
  try {
    thread_ = std::thread([this] { run_thread(); });
  } catch (const std::system_error&) {
    fail_system("cannot start a thread");
  }
}

Endpoint::~Endpoint() { stop(); }

const Outcome& Endpoint::run(const AllReduceJob& job, const std::function<void(int)>& poll) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (error_) throw Error(*error_);
  session_.start(job, now());
  socket_->flush();
  signal_event(wake_fd_->get());
  try {
    while (!session_.is_done()) {
      const bool signalled = done_.wait_for(lock, std::chrono::milliseconds(100),
                                            [this] { return session_.is_done() || error_; });
      if (session_.is_done()) break;
      if (error_) throw Error(*error_);
      if (signalled) continue;
      const int awaited_rank = session_.awaited_rank();
      const int awaited_member =
          awaited_rank < 0 ? -1 : members_[static_cast<size_t>(awaited_rank)];
      lock.unlock();
      poll(awaited_member);
      lock.lock();
    }
  } catch (const Error&) {
    if (!lock.owns_lock()) lock.lock();
    session_.cancel();
    throw;
  }
  return session_.outcome();
}

EndpointCounters Endpoint::counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t sent_bytes = 0;
  for (const Peer& peer_state : peers_) sent_bytes += peer_state.sent.bytes;
  return {session_.drop_counters(), sent_bytes, socket_->kernel_drops(),
          socket_->refused_packets()};
}

std::map<int, Transport::Traffic> Endpoint::sent() {
  const std::lock_guard<std::mutex> lock(mutex_);
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
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stop_requested_) return;
    stop_requested_ = true;
    session_.each_peer_without_record([this](int r, const std::vector<std::byte>& record) {
      if (!peer(r).loss) send_record(r, record);
    });
    session_.cancel();
  }
  signal_event(wake_fd_->get());
  thread_.join();
}

void Endpoint::run_thread() {
  set_up_thread("fsccl-tail");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_requested_) {
    Time time = now(), next_step = time + std::chrono::seconds(1);
    try {
      next_step = session_.step(time);
      socket_->flush();
      handle_messages();
      check_lost_peers();
    } catch (const Error& error) {
      error_ = error;
      session_.cancel();
    }
    if (session_.is_done() || error_) done_.notify_all();
    // While there is data to send, received packets are handled when it is time to send again.
    const bool reading = !session_.sending();
    lock.unlock();
    socket_->wait(wake_fd_->get(), next_step - now(), reading);
    lock.lock();
    uint64_t signalled = 0;
    static_cast<void>(!read(wake_fd_->get(), &signalled, sizeof signalled));
    time = now();
    const auto handle_packet = [&](int from, const std::byte* packet, size_t bytes) {
      session_.on_packet(from, packet, bytes, time);
    };
    for (int batch = 0; batch < 4 && socket_->receive(handle_packet); ++batch) continue;
  }
}

// The receive for a record is posted before the record is requested.
void Endpoint::send_notice(int to, const Notice& notice) {
  Peer& peer_state = peer(to);
  if (notice.kind == Notice::kRequestRecord && !peer_state.record.request) {
    peer_state.record = post_receive(to, kRecordTag, session_.record_bytes());
  }
  send_message(to, kNoticeTag, &notice, sizeof notice);
}

void Endpoint::send_record(int to, const std::vector<std::byte>& record) {
  send_message(to, kRecordTag, record.data(), record.size());
}

void Endpoint::send_message(int to, uint64_t tag, const void* data, size_t bytes) {
  sends_.remove_if([](const PendingMessage& pending) { return pending.request->finished(); });
  const auto* const from = static_cast<const std::byte*>(data);
  PendingMessage out{nullptr, std::make_shared<std::vector<std::byte>>(from, from + bytes)};
  out.request = transport_.send(members_[static_cast<size_t>(to)], tag,
                                BufferList(out.memory->data(), bytes));
  sends_.push_back(std::move(out));
}

Endpoint::PendingMessage Endpoint::post_receive(int from, uint64_t tag, size_t bytes) {
  PendingMessage in{nullptr, std::make_shared<std::vector<std::byte>>(bytes)};
  in.request = transport_.recv(members_[static_cast<size_t>(from)], tag,
                               BufferList(in.memory->data(), bytes));
  // The callback keeps the memory alive as long as the request may write to it, even if this
  // endpoint is gone.
  transport_.notify(in.request,
                    [wake = wake_fd_, memory = in.memory] { signal_event(wake->get()); });
  return in;
}

void Endpoint::handle_messages() {
  for (int r = 0; r < rail_.ranks; ++r) {
    Peer& peer_state = peer(r);
    while (peer_state.notice.request && peer_state.notice.request->finished()) {
      if (peer_state.notice.request->failed()) {
        peer_state.loss = *peer_state.notice.request->error;
        peer_state.notice = {};
        break;
      }
      Notice notice;
      std::memcpy(&notice, peer_state.notice.memory->data(), sizeof notice);
      peer_state.notice = post_receive(r, kNoticeTag, sizeof notice);
      session_.on_notice(r, notice, now());
    }
    if (!peer_state.record.request || !peer_state.record.request->finished()) continue;
    const PendingMessage record = std::exchange(peer_state.record, {});
    if (!record.request->failed()) {
      session_.on_record(r, *record.memory, now());
    } else if (session_.awaits(r)) {
      error_ = *record.request->error;
    }
  }
  if (session_.mismatched_rank() >= 0 && !error_) {
    const int member = members_[static_cast<size_t>(session_.mismatched_rank())];
    error_.emplace(Fault::kMismatch, member,
                   "rank " + std::to_string(member) +
                       " of the group called another all_reduce, of "
                       "other elements or so many, than this rank");
  }
}

// Fails the operation if it waits for a peer that is lost, unless the peer may have sent its record
// before.
void Endpoint::check_lost_peers() {
  for (int r = 0; r < rail_.ranks; ++r) {
    Peer& peer_state = peer(r);
    if (!peer_state.loss || error_ || !session_.awaits(r)) continue;
    if (!session_.is_agreeing()) {
      error_ = *peer_state.loss;
    } else if (!peer_state.record.request) {
      peer_state.record = post_receive(r, kRecordTag, session_.record_bytes());
    }
  }
}

}  // namespace fsccl::datagram
