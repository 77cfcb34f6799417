// Helpers of the transport tests: transports that are connected to each other, and a peer that
// speaks the wire protocol over raw sockets.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tcp_transport.h"
#include "text.h"
#include "topology.h"

namespace {

using namespace fsccl;

// Tags of messages of a collective, and of messages of the user.
constexpr uint64_t kTag = Transport::kCollectiveTag | 7, kUserTag = 9;

[[noreturn]] void fail_test(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::_Exit(1);
}

void expect(bool condition, const std::string& message) {
  if (!condition) fail_test(message);
}

Deadline test_deadline() { return Deadline::after(Deadline::Ms(60000)); }

// Returns transports that are connected to each other over TCP, as between hosts, one per device.
inline std::vector<std::unique_ptr<Transport>> connect_transports(
    const std::vector<std::shared_ptr<TcpDevice>>& devices) {
  const int ranks = static_cast<int>(devices.size());
  Peers peers;
  std::vector<std::unique_ptr<Transport>> out;
  for (int r = 0; r < ranks; ++r) {
    out.push_back(devices[static_cast<size_t>(r)]->open());
    peers.addresses.push_back(out.back()->address());
    peers.names.push_back("rank " + std::to_string(r));
    peers.same_host.push_back(false);
    peers.farewell_keys.push_back(random_key());
  }
  for (; peers.rank < ranks; ++peers.rank) out[static_cast<size_t>(peers.rank)]->set_peers(peers);
  return out;
}

inline std::vector<std::shared_ptr<TcpDevice>> make_devices(int ranks, TcpOptions options) {
  options.interface = "lo";
  std::vector<std::shared_ptr<TcpDevice>> out;
  for (int r = 0; r < ranks; ++r) out.push_back(std::make_shared<TcpDevice>(options));
  return out;
}

inline std::vector<std::unique_ptr<Transport>> connect_transports(int ranks, int buffer_bytes,
                                                                  int connections) {
  TcpOptions options;
  options.buffer_bytes = buffer_bytes;
  options.connections = connections;
  return connect_transports(make_devices(ranks, options));
}

using Bytes = std::vector<unsigned char>;

// Returns n bytes that differ by position and seed, so that misplaced data is detected.
Bytes pattern(size_t n, unsigned seed) {
  Bytes out(n);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<unsigned char>(i * 31 + i / 257 + seed);
  return out;
}

BufferList all_of(const Bytes& b) { return {b.data(), b.size()}; }

inline void run_on_each_rank(std::vector<std::unique_ptr<Transport>>& ranks,
                             const std::function<void(Transport&, int)>& call) {
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&call, &m = *ranks[r], r] { call(m, static_cast<int>(r)); });
  }
  for (auto& t : threads) t.join();
}

// Peer of a transport, which is rank 0 of 2. The peer is rank 1 and consists of raw sockets, so
// that it can send any frames, or stop in the middle of a body. The socket buffers are much smaller
// than a body, so the transport sends or receives a body with many system calls.
class RawPeer {
 public:
  // Bytes of a body, and of the part of it that is transferred before something happens.
  static constexpr size_t kBody = 12 << 20, kPartialBody = 8 << 20;

  explicit RawPeer(std::chrono::milliseconds user_timeout = std::chrono::seconds(1),
                   std::chrono::milliseconds hello_timeout = std::chrono::seconds(20)) {
    options_.interface = "lo";
    options_.buffer_bytes = 128 << 10;
    options_.connections = 1;
    options_.user_timeout = user_timeout;
    options_.hello_timeout = hello_timeout;
    options_.max_buffered_bytes = 1 << 20;
    transport = std::make_shared<TcpDevice>(options_)->open();
    Listener listener = std::move(listen_tcp(options_)[0]);
    listener_ = std::move(listener.fd);
    Peers peers;
    peers.addresses = {transport->address(), "99 unix:nowhere " + listener.address};
    peers.names = {"rank 0", "rank 1"};
    peers.same_host = {false, false};
    peers.key = kKey;
    peers.farewell_keys = {Key(), kFarewellKey};
    const std::vector<std::string> address_fields = split(transport->address(), ' ');
    if (!parse_decimal(address_fields[0], &token) || address_fields.size() != 3)
      fail_test("no address");
    address_ = address_fields[2];
    transport->set_peers(peers);
    transport->listen();
  }
  // Accepts the connection on which the transport sends. connect() opens the connection on which
  // the transport receives.
  Fd accept() {
    pollfd p{listener_.get(), POLLIN, 0};
    while (poll(&p, 1, -1) < 1) {
    }
    Fd fd = accept_from(listener_.get(), options_);
    make_blocking(fd);
    const auto hello = read_struct<Frame>(fd);
    last_hello = hello;
    connection_keys()[fd.get()] = {key_of_connection(kKey, hello), 1};
    const bool condition = hello.mac == mac_of(connection_keys()[fd.get()].key, hello, 0);
    expect(hello.kind == FrameKind::kHello && condition, "no hello");
    return fd;
  }
  Fd connect_without_hello() {
    Fd fd = connect_to(address_, options_);
    make_blocking(fd);
    return fd;
  }
  // Opens a connection and sends a hello, which it stores in `last_hello`. `to` is the token of the
  // transport, `key` the key of the group.
  Fd connect() { return connect(token, kKey); }
  Fd connect(uint64_t to, const Key& key, uint64_t index = 0, uint64_t rank = 1) {
    Fd fd = connect_without_hello();
    last_hello = Frame();
    last_hello.tag = to;
    last_hello.message = rank;
    last_hello.offset = index;
    last_hello.flags = kProtocolVersion;
    last_hello.total = random_number();
    connection_keys()[fd.get()] = {key_of_connection(key, last_hello), 0};
    last_hello.mac = mac_of(connection_keys()[fd.get()].key, last_hello, 0);
    write_header(fd, last_hello);
    return fd;
  }
  static Frame message() {
    Frame f;
    f.kind = FrameKind::kMessage;
    f.tag = kTag;
    f.bytes = f.total = kBody;
    return f;
  }
  static void write_all(const Fd& fd, const void* data, size_t n) {
    for (const auto* at = static_cast<const char*>(data); n > 0;) {
      const ssize_t count = send(fd.get(), at, n, MSG_NOSIGNAL);
      if (count <= 0) fail_test("cannot write");
      at += count;
      n -= static_cast<size_t>(count);
    }
  }
  // Returns the authentication code of the next frame on this connection.
  static uint64_t sign(const Fd& fd, const Frame& header) {
    ConnectionKey& connection_key = connection_keys().at(fd.get());
    const uint64_t mac = mac_of(connection_key.key, header, connection_key.next_number);
    connection_key.next_number += 2;
    return mac;
  }
  static void write_header(const Fd& fd, Frame header) {
    header.mac = sign(fd, header);
    write_all(fd, &header, sizeof header);
  }
  static void write_frame(const Fd& fd, Frame header, const Bytes& body, Seal seal) {
    header.bytes = header.total = body.size();
    write_header(fd, header);
    write_all(fd, body.data(), body.size());
    write_all(fd, &seal, sizeof seal);
  }
  static void discard_bytes(const Fd& fd, size_t n) {
    for (Bytes buffer(64 << 10); n > 0;) {
      const ssize_t count = read(fd.get(), buffer.data(), std::min(n, buffer.size()));
      if (count <= 0) fail_test("cannot read");
      n -= static_cast<size_t>(count);
    }
  }
  template <class T>
  static T read_struct(const Fd& fd) {
    T out;
    if (recv(fd.get(), &out, sizeof out, MSG_WAITALL) != sizeof out) fail_test("cannot read all");
    return out;
  }

  static void make_blocking(const Fd& fd) { fcntl(fd.get(), F_SETFL, 0); }

  std::unique_ptr<Transport> transport;
  uint64_t token = 0;
  Frame last_hello;
  static constexpr Key kKey{1, 2}, kFarewellKey{3, 4};

 private:
  // Key and frame counter of a connection of a RawPeer.
  struct ConnectionKey {
    Key key;
    uint64_t next_number;  // of a frame
  };
  static std::map<int, ConnectionKey>& connection_keys() {  // by descriptor
    static std::map<int, ConnectionKey> keys;
    return keys;
  }

  TcpOptions options_;
  Fd listener_;
  std::string address_;
};

// Waits for a request that must fail, and returns its error. Overwrites its memory, which the
// transport must not access any more.
inline Error expect_failure(Transport& m, const RequestPtr& request, Bytes* memory) {
  try {
    m.wait(request, test_deadline(), nullptr);
  } catch (const Error& e) {
    std::fill(memory->begin(), memory->end(), 1);
    return e;
  }
  fail_test("a request that must fail has succeeded");
}

}  // namespace

// Prints the name of a case, so that the output shows which one failed.
#define RUN_CASE(call)                   \
  do {                                   \
    std::fprintf(stderr, "%s\n", #call); \
    call;                                \
  } while (false)
