// Transports that know each other, and a peer that is bare sockets.
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

constexpr uint64_t kTag = Transport::kCollectiveTag | 7, kUserTag = 9;

[[noreturn]] void complain(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

void expect(bool right, const std::string& what) {
  if (!right) complain(what);
}

Deadline patience() { return Deadline::after(Deadline::Ms(60000)); }

// Transports that know each other, over TCP, as between hosts, each with a device of its own.
inline std::vector<std::unique_ptr<Transport>> meet(
    const std::vector<std::shared_ptr<TcpDevice>>& devices) {
  const int ranks = static_cast<int>(devices.size());
  Peers peers;
  std::vector<std::unique_ptr<Transport>> out;
  for (int r = 0; r < ranks; ++r) {
    out.push_back(devices[static_cast<size_t>(r)]->open());
    peers.addresses.push_back(out.back()->address());
    peers.names.push_back("rank " + std::to_string(r));
    peers.near.push_back(false);
  }
  for (; peers.rank < ranks; ++peers.rank) out[static_cast<size_t>(peers.rank)]->meet(peers);
  return out;
}

inline std::vector<std::shared_ptr<TcpDevice>> devices(int ranks, TcpOptions options) {
  options.interface = "lo";
  std::vector<std::shared_ptr<TcpDevice>> out;
  for (int r = 0; r < ranks; ++r) out.push_back(std::make_shared<TcpDevice>(options));
  return out;
}

inline std::vector<std::unique_ptr<Transport>> meet(int ranks, int buffer_bytes, int connections) {
  TcpOptions options;
  options.buffer_bytes = buffer_bytes;
  options.connections = connections;
  return meet(devices(ranks, options));
}

using Bytes = std::vector<unsigned char>;

Bytes pattern(size_t n, unsigned seed) {
  Bytes out(n);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<unsigned char>(i * 31 + i / 257 + seed);
  return out;
}

BufferList all_of(const Bytes& b) { return {b.data(), b.size()}; }

inline void on_each(std::vector<std::unique_ptr<Transport>>& ranks,
             const std::function<void(Transport&, int)>& call) {
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&call, &m = *ranks[r], r] { call(m, static_cast<int>(r)); });
  }
  for (auto& t : threads) t.join();
}

// Rank 1 of two as bare sockets, so that it can stop in the middle of a body. The buffers hold a
// small part of it: what has gone through beyond them has been copied by the transport.
class Stranger {
 public:
  static constexpr size_t kBody = 12 << 20, kPart = 8 << 20;

  explicit Stranger(std::chrono::milliseconds user_timeout = std::chrono::seconds(1)) {
    options_.interface = "lo";
    options_.buffer_bytes = 128 << 10;
    options_.connections = 1;
    options_.user_timeout = user_timeout;
    options_.hello_time = std::chrono::milliseconds(500);
    options_.kept_bytes = 1 << 20;
    transport = std::make_shared<TcpDevice>(options_)->open();
    Listener own = std::move(listen_tcp(options_)[0]);
    listener_ = std::move(own.fd);
    Peers peers;
    peers.addresses = {transport->address(), "99 unix:nowhere " + own.address};
    peers.names = {"rank 0", "rank 1"};
    peers.near = {false, false};
    peers.key = kKey;
    const std::vector<std::string> address = split(transport->address(), ' ');
    if (!read_number(address[0], &token) || address.size() != 3) complain("no address");
    address_ = address[2];
    transport->meet(peers);
    transport->listen();
  }
  // The connection on which the transport sends, and that on which it receives.
  Fd accept() {
    pollfd p{listener_.get(), POLLIN, 0};
    while (poll(&p, 1, -1) < 1) {
    }
    Fd fd = accept_from(listener_.get(), options_);
    take_turns(fd);
    const auto hello = read_all<Frame>(fd);
    lines()[fd.get()] = {key_of_connection(kKey, hello), 1};
    const bool right = hello.mac == mac_of(lines()[fd.get()].key, hello, 0);
    expect(hello.kind == FrameKind::kHello && right, "no hello");
    return fd;
  }
  Fd knock() {
    Fd fd = connect_to(address_, options_);
    take_turns(fd);
    return fd;
  }
  // `key` is the group's; the hello is left in `said`.
  Fd connect() { return connect(token, kKey); }
  Fd connect(uint64_t to, const Key& key, uint64_t index = 0, uint64_t rank = 1) {
    Fd fd = knock();
    said = Frame();
    said.tag = to;
    said.message = rank;
    said.offset = index;
    said.flags = kProtocolVersion;
    said.total = random_number();
    lines()[fd.get()] = {key_of_connection(key, said), 0};
    said.mac = mac_of(lines()[fd.get()].key, said, 0);
    write_header(fd, said);
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
      const ssize_t done = send(fd.get(), at, n, MSG_NOSIGNAL);
      if (done <= 0) complain("cannot write");
      at += done;
      n -= static_cast<size_t>(done);
    }
  }
  // The next frame on this connection.
  static uint64_t sign(const Fd& fd, const Frame& header) {
    Line& line = lines().at(fd.get());
    const uint64_t mac = mac_of(line.key, header, line.next);
    line.next += 2;
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
  static void skip(const Fd& fd, size_t n) {
    for (Bytes part(64 << 10); n > 0;) {
      const ssize_t done = read(fd.get(), part.data(), std::min(n, part.size()));
      if (done <= 0) complain("cannot read");
      n -= static_cast<size_t>(done);
    }
  }
  template <class T>
  static T read_all(const Fd& fd) {
    T out;
    if (recv(fd.get(), &out, sizeof out, MSG_WAITALL) != sizeof out) complain("cannot read all");
    return out;
  }

  std::unique_ptr<Transport> transport;
  uint64_t token = 0;
  Frame said;
  static constexpr Key kKey{1, 2};

 private:
  struct Line {
    Key key;
    uint64_t next;  // number of a frame
  };
  static std::map<int, Line>& lines() {  // by descriptor
    static std::map<int, Line> all;
    return all;
  }
  static void take_turns(const Fd& fd) { fcntl(fd.get(), F_SETFL, 0); }  // it may block

  TcpOptions options_;
  Fd listener_;
  std::string address_;
};

// What a request failed with. Its memory is the caller's again.
inline Error failure_of(Transport& m, const RequestPtr& request, Bytes* memory) {
  try {
    m.wait(request, patience(), nullptr);
  } catch (const Error& e) {
    std::fill(memory->begin(), memory->end(), 1);
    return e;
  }
  complain("a request that cannot be done is");
}

}  // namespace

// Says which part it was that failed.
#define PART(call)                     \
  do {                                 \
    std::fprintf(stderr, "%s\n", #call); \
    call;                              \
  } while (false)
