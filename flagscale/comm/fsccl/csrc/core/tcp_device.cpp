#include "tcp_device.h"

#include <sys/epoll.h>

#include <cerrno>

#include "per_process.h"
#include "tcp_transport.h"
#include "topology.h"

namespace fsccl {
namespace {

constexpr uint32_t kReadable = EPOLLIN;
constexpr std::chrono::milliseconds kUntilRead(2000);

struct KnownDevices {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<TcpDevice>> all;
};

}  // namespace

std::shared_ptr<TcpDevice> TcpDevice::of_this_process(const TcpOptions& options) {
  auto& known = per_process<KnownDevices>();
  const std::lock_guard<std::mutex> hold(known.mutex);
  auto& device = known.all[options.text()];
  auto found = device.lock();
  if (!found) device = found = std::make_shared<TcpDevice>(options);
  return found;
}

TcpDevice::TcpDevice(TcpOptions options) : options_(std::move(options)) {
  raise_descriptor_limit();
  // Its name can be read by everyone on the host, so it is made of nothing else.
  listeners_.push_back(listen_unix("fsccl-" + std::to_string(random_number()), &unix_address_));
  for (Listener& l : listen_tcp(options_)) {
    listeners_.push_back(std::move(l.fd));
    tcp_addresses_.insert(0, " " + l.address);
  }
  id_ = receiving_.add(this);
  listen(true);
}

TcpDevice::~TcpDevice() {
  receiving_.remove(id_);
  // A child that was forked meanwhile has them too, and peers would wait for it.
  for (const Fd& l : listeners_) hang_up(l.get());
  for (const auto& [fd, s] : strangers_) hang_up(fd);
  for (const auto& [since, fd] : told_bye_) hang_up(fd.get());
}

std::unique_ptr<Transport> TcpDevice::open() {
  return std::make_unique<TcpTransport>(shared_from_this());
}

uint64_t TcpDevice::enter(EventLoop::Id handler) {
  const uint64_t token = random_number();
  const std::lock_guard<std::mutex> hold(mutex_);
  ports_[token].handler = handler;
  return token;
}

std::vector<TcpDevice::Arrival> TcpDevice::arrivals(uint64_t token) {
  const std::lock_guard<std::mutex> hold(mutex_);
  accept_all();
  read_all();
  std::vector<Arrival> out;
  if (const auto port = ports_.find(token); port != ports_.end()) out.swap(port->second.arrived);
  return out;
}

void TcpDevice::leave(uint64_t token, const std::optional<Key>& left) {
  try {
    receiving_.start();  // somebody has to turn away who comes too late
  } catch (const Error&) {
    // No memory for a thread: they will find out when the process ends.
  }
  const std::lock_guard<std::mutex> hold(mutex_);
  const auto port = ports_.find(token);
  if (port == ports_.end()) return;
  std::vector<Arrival> late = std::move(port->second.arrived);
  ports_.erase(port);
  if (left) {
    left_[token] = *left;
    left_in_order_.push_back(token);
  }
  if (left_in_order_.size() > kMostLeft) {
    left_.erase(left_in_order_.front());
    left_in_order_.pop_front();
  }
  for (Arrival& a : late) say_bye(std::move(a));
}

// It was on its way when the group was left, and would take that for a failure.
void TcpDevice::say_bye(Arrival late) {
  const auto group = left_.find(late.hello.tag);
  if (group == left_.end()) return;
  const Key key = key_of_connection(group->second, late.hello);
  if (late.hello.mac != mac_of(key, late.hello, 0)) return;
  Frame bye;
  bye.kind = FrameKind::kBye;
  bye.mac = mac_of(key, bye, 1);
  if (send(late.fd.get(), &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof bye) {
    told_bye_.emplace_back(Clock::now(), std::move(late.fd));
  }
}

bool TcpDevice::has_strangers(uint64_t token) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const auto port = ports_.find(token);
  if (strangers_.empty() || port == ports_.end()) return false;
  return port->second.waits = true;
}

// Whoever knocks stays at the door, and would wake us for ever.
void TcpDevice::listen(bool on) {
  if (listens_ == on) return;
  for (const Fd& l : listeners_) {
    receiving_.set(id_, l.get(), on ? 0u : kReadable, on ? kReadable : 0u);
  }
  listens_ = on;
}

void TcpDevice::accept_all() {
  bool room = true;
  for (const Fd& l : listeners_) {
    for (;;) {
      room = room && strangers_.size() < kMostStrangers;
      if (!room) break;
      Fd fd = accept_from(l.get(), options_);
      const int key = fd.get();
      if (key < 0) {
        room = errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
        break;
      }
      receiving_.set(id_, key, 0, kReadable);
      strangers_[key].fd = std::move(fd);
    }
  }
  listen(room);
}

TcpDevice::Said TcpDevice::read(Stranger* s) {
  auto* const at = reinterpret_cast<char*>(&s->hello) + s->got;
  const ssize_t n = recv(s->fd.get(), at, sizeof s->hello - s->got, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Said::kNothingYet;
  if (n <= 0) return Said::kNonsense;
  s->got += static_cast<size_t>(n);
  if (s->got < sizeof s->hello) return Said::kNothingYet;
  const Frame& f = s->hello;
  const bool ours = f.magic == Frame::kMagic && f.kind == FrameKind::kHello && f.bytes == 0 &&
                    f.flags == kProtocolVersion;
  return ours ? Said::kHello : Said::kNonsense;
}

// Who has said for whom it comes goes there; who has said anything else goes.
void TcpDevice::settle(std::map<int, Stranger>::iterator at, Said said) {
  if (said == Said::kNothingYet) return;
  receiving_.set(id_, at->first, kReadable, 0);
  const auto port = ports_.find(at->second.hello.tag);
  if (said == Said::kHello && port != ports_.end() && port->second.arrived.size() < kMostEarly) {
    port->second.arrived.push_back({std::move(at->second.fd), at->second.hello});
    receiving_.poke(port->second.handler);
  } else if (said == Said::kHello && port == ports_.end()) {
    say_bye({std::move(at->second.fd), at->second.hello});
  }
  strangers_.erase(at);
  for (auto& [token, p] : ports_) {
    if (std::exchange(p.waits, false)) receiving_.poke(p.handler);
  }
}

void TcpDevice::read_all() {
  for (auto at = strangers_.begin(); at != strangers_.end();) {
    const auto next = std::next(at);
    settle(at, read(&at->second));
    at = next;
  }
}

void TcpDevice::drop_late() {
  const auto patience = listens_ ? options_.hello_time : std::min(kHurry, options_.hello_time);
  const auto now = Clock::now();
  for (auto at = strangers_.begin(); at != strangers_.end();) {
    const auto next = std::next(at);
    if (now - at->second.made >= patience) settle(at, Said::kNonsense);
    at = next;
  }
}

void TcpDevice::on_events(int fd, uint32_t) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const auto stranger = strangers_.find(fd);
  if (stranger != strangers_.end()) {
    settle(stranger, read(&stranger->second));
  } else {
    accept_all();
  }
}

void TcpDevice::on_tick() {
  const std::lock_guard<std::mutex> hold(mutex_);
  drop_late();
  while (!told_bye_.empty() && Clock::now() - told_bye_.front().first > kUntilRead) {
    told_bye_.pop_front();
  }
  if (!listens_) accept_all();
}

}  // namespace fsccl
