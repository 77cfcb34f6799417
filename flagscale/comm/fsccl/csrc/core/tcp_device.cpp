#include "tcp_device.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>

#include <cerrno>

#include "per_process.h"
#include "tcp_transport.h"
#include "topology.h"

namespace fsccl {
namespace {

constexpr uint32_t kReadable = EPOLLIN;
// Time for which a connection stays open after a farewell, so that the peer can read it.
constexpr std::chrono::milliseconds kFarewellLinger(2000);

bool is_connection_pending(int listener) {
  pollfd waiting{listener, POLLIN, 0};
  return poll(&waiting, 1, 0) == 1;
}

// The devices of this process, by options.
struct DeviceRegistry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<TcpDevice>> devices;
};

}  // namespace

std::shared_ptr<TcpDevice> TcpDevice::of_this_process(const TcpOptions& options) {
  auto& registry = per_process<DeviceRegistry>();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  auto& device = registry.devices[options.text()];
  auto existing = device.lock();
  if (!existing) device = existing = std::make_shared<TcpDevice>(options);
  return existing;
}

TcpDevice::TcpDevice(TcpOptions options) : options_(std::move(options)) {
  raise_descriptor_limit();
  // The name is visible to all users of the host, so it consists of a random number only.
  listeners_.push_back(listen_unix("fsccl-" + std::to_string(random_number()), &unix_address_));
  for (Listener& listener : listen_tcp(options_)) {
    listeners_.push_back(std::move(listener.fd));
    tcp_addresses_.insert(0, " " + listener.address);
  }
  restore_reserve();
  id_ = receiving_.add(this);
  set_accepting(true);
}

TcpDevice::~TcpDevice() {
  receiving_.remove(id_);
  // A child forked in the meantime has copies of these descriptors, and peers would wait for it.
  for (const Fd& listener : listeners_) shut_down_socket(listener.get());
  for (const auto& [fd, peer] : unauthenticated_) shut_down_socket(fd);
  for (const auto& [sent_at, fd] : farewell_sent_) shut_down_socket(fd.get());
}

std::unique_ptr<Transport> TcpDevice::open() {
  return std::make_unique<TcpTransport>(shared_from_this());
}

uint64_t TcpDevice::register_transport(EventLoop::Id handler) {
  const uint64_t token = random_number();
  const std::lock_guard<std::mutex> lock(mutex_);
  registrations_[token].handler = handler;
  return token;
}

std::vector<TcpDevice::Arrival> TcpDevice::take_arrivals(uint64_t token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  accept_all();
  read_hellos();
  std::vector<Arrival> out;
  if (const auto registration = registrations_.find(token); registration != registrations_.end())
    out.swap(registration->second.arrivals);
  return out;
}

void TcpDevice::unregister_transport(uint64_t token, Farewell farewell) {
  try {
    receiving_.start();  // needed to notify peers that connect later
  } catch (const Error&) {
    // No thread could be started: those peers detect the shutdown when the process ends.
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto registration = registrations_.find(token);
  if (registration == registrations_.end()) return;
  std::vector<Arrival> late_arrivals = std::move(registration->second.arrivals);
  registrations_.erase(registration);
  farewells_.insert_or_assign(token, std::move(farewell));
  farewell_order_.push_back(token);
  if (farewell_order_.size() > kMaxClosedGroups) {
    farewells_.erase(farewell_order_.front());
    farewell_order_.pop_front();
  }
  for (Arrival& a : late_arrivals) send_farewell(std::move(a));
}

// Tells a peer that connects after this rank has left its group, and would otherwise take the
// closed connection for the end of this process.
void TcpDevice::send_farewell(Arrival arrival) {
  const auto entry = farewells_.find(arrival.hello.tag);
  if (entry == farewells_.end()) return;
  const Farewell& farewell = entry->second;
  const Key key = key_of_connection(farewell.key, arrival.hello);
  if (farewell.is_group_key && arrival.hello.mac != mac_of(key, arrival.hello, 0)) return;
  Frame frame;
  frame.kind = FrameKind::kBye;
  std::string body;
  if (farewell.failure) {
    frame.kind = FrameKind::kAbort;
    frame.tag = static_cast<uint64_t>(static_cast<int64_t>(farewell.failure->rank));
    body = std::string(farewell.failure->what()).substr(0, kMaxReasonBytes);
    frame.bytes = body.size();
    const Seal seal = Seal::kWhole;
    body.append(reinterpret_cast<const char*>(&seal), sizeof seal);
  }
  frame.mac = mac_of(key, frame, 1);
  const std::string message(reinterpret_cast<const char*>(&frame), sizeof frame);
  const std::string bytes = message + body;
  const ssize_t sent =
      send(arrival.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(bytes.size()))
    farewell_sent_.emplace_back(Clock::now(), std::move(arrival.fd));
}

bool TcpDevice::has_unauthenticated(uint64_t token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto registration = registrations_.find(token);
  if (unauthenticated_.empty() || registration == registrations_.end()) return false;
  return registration->second.wakes_on_unauthenticated_change = true;
}

// Starts or stops waiting for new connections. A connection that is not accepted keeps its listener
// readable, which would wake the thread in a busy loop.
void TcpDevice::set_accepting(bool on) {
  if (accepting_ == on) return;
  for (const Fd& listener : listeners_) {
    receiving_.set(id_, listener.get(), on ? 0u : kReadable, on ? kReadable : 0u);
  }
  accepting_ = on;
}

void TcpDevice::restore_reserve() {
  if (reserve_.get() < 0) reserve_ = Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void TcpDevice::accept_all() {
  bool has_room = true;
  for (const Fd& listener : listeners_) {
    for (;;) {
      has_room = has_room && unauthenticated_.size() < kMaxUnauthenticated;
      if (!has_room) break;
      // Without this test, accept4() fails for want of a descriptor even if nobody connects.
      if (!is_connection_pending(listener.get())) break;
      Fd fd = accept_from(listener.get(), options_);
      if (fd.get() < 0 && errno == EMFILE && reserve_.get() >= 0) {
        reserve_ = Fd(-1);
        fd = accept_from(listener.get(), options_);
      }
      const int key = fd.get();
      if (key < 0) {
        has_room = errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
        if (!has_room && accept_error_.empty()) {
          accept_error_ = describe_errno("cannot accept a connection");
          accept_failed_at_ = Clock::now();
        }
        break;
      }
      accept_error_.clear();
      receiving_.set(id_, key, 0, kReadable);
      unauthenticated_[key].fd = std::move(fd);
    }
  }
  set_accepting(has_room);
}

TcpDevice::HelloState TcpDevice::read_hello(UnauthenticatedPeer* peer) {
  auto* const buffer = reinterpret_cast<char*>(&peer->hello) + peer->received_bytes;
  const ssize_t n =
      recv(peer->fd.get(), buffer, sizeof peer->hello - peer->received_bytes, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return HelloState::kIncomplete;
  if (n <= 0) return HelloState::kInvalid;
  peer->received_bytes += static_cast<size_t>(n);
  if (peer->received_bytes < sizeof peer->hello) return HelloState::kIncomplete;
  const Frame& f = peer->hello;
  const bool is_valid = f.magic == Frame::kMagic && f.kind == FrameKind::kHello && f.bytes == 0 &&
                        f.flags == kProtocolVersion;
  return is_valid ? HelloState::kValid : HelloState::kInvalid;
}

// Hands a connection with a valid hello to its endpoint and drops one with an invalid hello.
void TcpDevice::resolve_hello(std::map<int, UnauthenticatedPeer>::iterator entry,
                              HelloState state) {
  if (state == HelloState::kIncomplete) return;
  receiving_.set(id_, entry->first, kReadable, 0);
  const auto registration = registrations_.find(entry->second.hello.tag);
  if (state == HelloState::kValid && registration != registrations_.end() &&
      registration->second.arrivals.size() < kMaxEarlyArrivals) {
    registration->second.arrivals.push_back({std::move(entry->second.fd), entry->second.hello});
    receiving_.wake(registration->second.handler);
  } else if (state == HelloState::kValid && registration == registrations_.end()) {
    send_farewell({std::move(entry->second.fd), entry->second.hello});
  }
  unauthenticated_.erase(entry);
  for (auto& [token, p] : registrations_) {
    if (std::exchange(p.wakes_on_unauthenticated_change, false)) receiving_.wake(p.handler);
  }
}

void TcpDevice::read_hellos() {
  for (auto entry = unauthenticated_.begin(); entry != unauthenticated_.end();) {
    const auto next = std::next(entry);
    resolve_hello(entry, read_hello(&entry->second));
    entry = next;
  }
}

void TcpDevice::drop_expired() {
  const auto timeout =
      accepting_ ? options_.hello_timeout : std::min(kHelloTimeoutWhenFull, options_.hello_timeout);
  const auto now = Clock::now();
  for (auto entry = unauthenticated_.begin(); entry != unauthenticated_.end();) {
    const auto next = std::next(entry);
    if (now - entry->second.connected_at >= timeout) resolve_hello(entry, HelloState::kInvalid);
    entry = next;
  }
}

void TcpDevice::on_events(int fd, uint32_t) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = unauthenticated_.find(fd);
  if (entry != unauthenticated_.end()) {
    resolve_hello(entry, read_hello(&entry->second));
  } else {
    accept_all();
  }
}

void TcpDevice::on_tick() {
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_expired();
  while (!farewell_sent_.empty() && Clock::now() - farewell_sent_.front().first > kFarewellLinger) {
    farewell_sent_.pop_front();
  }
  if (!accepting_) accept_all();
  restore_reserve();
  if (accept_error_.empty() || Clock::now() - accept_failed_at_ < kMaxAcceptDelay) return;
  for (auto& [token, registration] : registrations_) receiving_.wake(registration.handler);
}

std::string TcpDevice::accept_failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_long = Clock::now() - accept_failed_at_ >= kMaxAcceptDelay;
  return is_long ? accept_error_ : "";
}

}  // namespace fsccl
