#include "socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <set>

#include "text.h"
#include "types.h"

namespace fsccl {
namespace {

// The descriptors of all Fd objects, which a forked child closes.
struct DescriptorRegistry {
  std::mutex mutex;
  std::set<int> fds;
};

// Never destroyed, because threads may still hold descriptors when the process ends.
DescriptorRegistry& descriptor_registry() {
  static DescriptorRegistry* const registry = [] {
    auto* const registry_object = new DescriptorRegistry;
    pthread_atfork([] { descriptor_registry().mutex.lock(); },
                   [] { descriptor_registry().mutex.unlock(); },
                   [] {
                     for (const int fd : descriptor_registry().fds) close(fd);
                     descriptor_registry().fds.clear();
                     descriptor_registry().mutex.unlock();
                   });
    return registry_object;
  }();
  return *registry;
}

// A socket address of any family.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

Address unix_address(const std::string& name) {
  Address a;
  sockaddr_un un{};
  un.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof un.sun_path) fail_usage("a socket name is too long: " + name);
  // Abstract socket: a leading zero byte, no file.
  std::memcpy(un.sun_path + 1, name.data(), name.size());
  std::memcpy(&a.storage, &un, sizeof un);
  a.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return a;
}

Address tcp_address(const std::string& host, const std::string& port) {
  addrinfo hints{}, *result = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (const int code = getaddrinfo(host.c_str(), port.c_str(), &hints, &result); code != 0) {
    fail_usage("not an address: " + host + " port " + port + ": " + gai_strerror(code));
  }
  Address a;
  std::memcpy(&a.storage, result->ai_addr, result->ai_addrlen);
  a.length = result->ai_addrlen;
  freeaddrinfo(result);
  return a;
}

// The filter of FSCCL_SOCKET_IFNAME (TcpOptions::interface).
class InterfaceFilter {
 public:
  explicit InterfaceFilter(std::string pattern) : is_set_(!pattern.empty()) {
    if (is_set_ && (pattern[0] == '^' || pattern[0] == '=')) {
      mode_ = pattern[0];
      pattern.erase(0, 1);
    }
    names_ = split(pattern, ',');
  }
  bool accepts(const std::string& name) const {
    bool matches = false;
    for (const std::string& n : names_) {
      matches = matches || (mode_ == '=' ? name == n : name.compare(0, n.size(), n) == 0);
    }
    return !is_set_ || (mode_ == '^' ? !matches : matches);
  }
  bool is_set() const { return is_set_; }

 private:
  bool is_set_;
  char mode_ = ' ';
  std::vector<std::string> names_;
};

constexpr int kPhysicalScore = 4;

// Scores an interface, -1 if it cannot be used. IPv4 scores higher than IPv6, physical interfaces
// higher than bridges and the loopback.
int score_of(const ifaddrs& i, const InterfaceFilter& filter) {
  if (i.ifa_addr == nullptr || (i.ifa_flags & IFF_UP) == 0 || !filter.accepts(i.ifa_name))
    return -1;
  const int family = i.ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return -1;
  if (family == AF_INET6) {
    const auto* ipv6_address = reinterpret_cast<const sockaddr_in6*>(i.ifa_addr);
    if (IN6_IS_ADDR_LINKLOCAL(&ipv6_address->sin6_addr)) return -1;
  }
  int score = family == AF_INET ? 1 : 0;
  if ((i.ifa_flags & IFF_LOOPBACK) == 0) score += kPhysicalScore;
  const std::string name = i.ifa_name;
  const bool bridge = name.rfind("docker", 0) == 0 || name.rfind("virbr", 0) == 0;
  return bridge ? score - 2 : score;
}

// The best address of an interface.
struct Candidate {
  std::string interface, address;
  int score;
};

std::string text_of(const sockaddr* address) {
  char text[NI_MAXHOST] = "";
  const auto length = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  getnameinfo(address, static_cast<socklen_t>(length), text, sizeof text, nullptr, 0,
              NI_NUMERICHOST);
  return text;
}

// Returns the best address of each interface that the filter accepts. `all_names` receives the
// names of all interfaces of the host.
std::vector<Candidate> candidates(const InterfaceFilter& filter, std::string* all_names) {
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) fail_system("cannot list network interfaces");
  std::vector<Candidate> out;
  for (const ifaddrs* i = interfaces; i != nullptr; i = i->ifa_next) {
    const std::string name = i->ifa_name;
    if (all_names->find(name) == std::string::npos) *all_names += " " + name;
    const int score = score_of(*i, filter);
    if (score < 0) continue;
    const auto same_interface = std::find_if(
        out.begin(), out.end(), [&](const Candidate& c) { return c.interface == name; });
    const Candidate candidate{name, text_of(i->ifa_addr), score};
    if (same_interface == out.end()) {
      out.push_back(candidate);
    } else if (same_interface->score < score) {
      *same_interface = candidate;
    }
  }
  freeifaddrs(interfaces);
  return out;
}

// Returns `options.interfaces` addresses, each of another interface. Beyond the first address, the
// loopback and bridges are used only if the user has set a filter that accepts them.
std::vector<std::string> select_addresses(const TcpOptions& options) {
  const InterfaceFilter filter(options.interface);
  std::string all_names;
  std::vector<Candidate> candidate_list = candidates(filter, &all_names);
  std::stable_sort(candidate_list.begin(), candidate_list.end(),
                   [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  std::vector<std::string> out;
  for (const Candidate& c : candidate_list) {
    if (out.size() == static_cast<size_t>(options.interfaces)) break;
    if (out.empty() || filter.is_set() || c.score >= kPhysicalScore) out.push_back(c.address);
  }
  const std::string filter_text =
      filter.is_set() ? " matches FSCCL_SOCKET_IFNAME=" + options.interface : std::string();
  if (out.empty()) {
    fail_usage("no network interface that is up and has an address" + filter_text +
               "; there are:" + all_names);
  }
  if (out.size() < static_cast<size_t>(options.interfaces)) {
    fail_usage("FSCCL_TCP_INTERFACES=" + std::to_string(options.interfaces) + ", and only " +
               std::to_string(out.size()) + " that is up and has an address" + filter_text +
               "; there are:" + all_names);
  }
  return out;
}

void set_socket_options(int fd, int family, const TcpOptions& options) {
  if (family != AF_UNIX) {
    const int on = 1, idle = 10, interval = 5, probes = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  }
  const int size = family == AF_UNIX ? 1 << 20 : options.buffer_bytes;
  if (size > 0) {
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
  }
}

Fd open_socket(int family) {
  Fd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) fail_system("cannot make a socket");
  return fd;
}

Fd listen_on(Address a, const std::string& description) {
  Fd fd = open_socket(a.family());
  if (bind(fd.get(), a.get(), a.length) != 0 || listen(fd.get(), 4096) != 0) {
    fail_system("cannot listen on " + description);
  }
  return fd;
}

// Returns false if the socket is not a TCP socket.
bool read_tcp_info(int fd, tcp_info* info) {
  socklen_t size = sizeof *info;
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) == 0;
}

}  // namespace

std::string TcpOptions::text() const {
  std::string out = interface;
  for (const auto value :
       {static_cast<long long>(interfaces), static_cast<long long>(connections),
        static_cast<long long>(buffer_bytes), static_cast<long long>(user_timeout.count()),
        static_cast<long long>(max_buffered_bytes),
        static_cast<long long>(max_total_buffered_bytes),
        static_cast<long long>(hello_timeout.count())}) {
    out += " " + std::to_string(value);
  }
  return out;
}

Fd::Fd(int fd) : fd_(fd), owner_pid_(fd < 0 ? 0 : getpid()) {
  if (fd < 0) return;
  DescriptorRegistry& registry = descriptor_registry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.fds.insert(fd);
}

Fd::~Fd() {
  if (fd_ < 0 || owner_pid_ != getpid()) return;
  DescriptorRegistry& registry = descriptor_registry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.fds.erase(fd_);
  close(fd_);
}

Fd listen_unix(const std::string& name, std::string* address) {
  *address = "unix:" + name;
  return listen_on(unix_address(name), *address);
}

std::vector<Listener> listen_tcp(const TcpOptions& options) {
  std::vector<Listener> out;
  for (const std::string& host : select_addresses(options)) {
    Fd fd = listen_on(tcp_address(host, "0"), host);
    Address bound;
    bound.length = sizeof bound.storage;
    if (getsockname(fd.get(), bound.get(), &bound.length) != 0) fail_system("cannot read a port");
    char port[NI_MAXSERV] = "";
    getnameinfo(bound.get(), bound.length, nullptr, 0, port, sizeof port, NI_NUMERICSERV);
    out.push_back({std::move(fd), std::string("tcp:") + port + ":" + host});
  }
  return out;
}

namespace {

// Starts a connection and returns its socket. `error_code` is the errno if that is refused at once,
// otherwise 0.
Fd start_connecting(const std::string& address, const TcpOptions& options, int* error_code) {
  Address a;
  if (address.rfind("unix:", 0) == 0) {
    a = unix_address(address.substr(5));
  } else {
    const size_t colon = address.find(':', 4);
    if (address.rfind("tcp:", 0) != 0 || colon == std::string::npos) {
      fail_usage("not an address: " + address);
    }
    a = tcp_address(address.substr(colon + 1), address.substr(4, colon - 4));
  }
  Fd fd = open_socket(a.family());
  set_socket_options(fd.get(), a.family(), options);
  const bool started = connect(fd.get(), a.get(), a.length) == 0 || errno == EINPROGRESS;
  *error_code = started ? 0 : errno;
  return fd;
}

}  // namespace

Fd connect_to(const std::string& address, const TcpOptions& options) {
  int error_code = 0;
  Fd fd = start_connecting(address, options, &error_code);
  if (error_code != 0) {
    throw Error(Fault::kPeerLost, -1,
                "cannot connect to " + address + ": " + std::strerror(error_code));
  }
  return fd;
}

ProcessState probe_listener(const std::string& address, const TcpOptions& options,
                            const Deadline& deadline) {
  int error_code = 0;
  const Fd fd = start_connecting(address, options, &error_code);
  if (error_code == 0) {
    pollfd waiting{fd.get(), POLLOUT, 0};
    if (poll(&waiting, 1, static_cast<int>(deadline.remaining().count())) != 1)
      return ProcessState::kUnknown;
    error_code = pending_error(fd.get());
  }
  if (error_code == 0) return ProcessState::kRunning;
  return error_code == ECONNREFUSED ? ProcessState::kEnded : ProcessState::kUnknown;
}

Fd accept_from(int listener, const TcpOptions& options) {
  Address peer;
  peer.length = sizeof peer.storage;
  Fd fd(accept4(listener, peer.get(), &peer.length, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.get() >= 0) set_socket_options(fd.get(), peer.family(), options);
  return fd;
}

int pending_error(int fd) {
  int code = 0;
  socklen_t size = sizeof code;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &size) == 0 ? code : errno;
}

bool has_been_unacknowledged_for(int fd, std::chrono::milliseconds duration) {
  tcp_info info{};
  if (!read_tcp_info(fd, &info)) return false;
  const bool is_waiting = info.tcpi_unacked > 0 || info.tcpi_probes > 1;
  return is_waiting && std::chrono::milliseconds(info.tcpi_last_ack_recv) >= duration;
}

bool has_unacknowledged_data(int fd) {
  tcp_info info{};
  int bytes = 0;
  return read_tcp_info(fd, &info) && info.tcpi_state == TCP_ESTABLISHED &&
         ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

void shut_down_socket(int fd) { shutdown(fd, SHUT_RDWR); }

}  // namespace fsccl
