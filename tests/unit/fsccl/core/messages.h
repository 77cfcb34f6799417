// Messengers that know each other, and a peer that is bare sockets.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "messenger.h"

namespace {

using namespace fsccl;

constexpr uint64_t kTag = Messenger::kCollectiveTag | 7, kUserTag = 9;

[[noreturn]] void complain(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

void expect(bool right, const std::string& what) {
  if (!right) complain(what);
}

Deadline patience() { return Deadline::after(Deadline::Ms(60000)); }

// Messengers that know each other, over TCP, as between hosts.
std::vector<std::unique_ptr<Messenger>> meet(int ranks, int buffer_bytes, int connections) {
  MessengerConfig config;
  config.token = 4711;
  config.tcp.interface = "lo";
  config.tcp.buffer_bytes = buffer_bytes;
  config.tcp.connections = connections;
  std::vector<Fd> listeners;
  for (int r = 0; r < ranks; ++r) {
    std::string address;
    listeners.push_back(listen_tcp(config.tcp, &address));
    config.addresses.push_back(address);
    config.names.push_back("rank " + std::to_string(r));
  }
  std::vector<std::unique_ptr<Messenger>> out;
  for (int r = 0; r < ranks; ++r) {
    config.rank = r;
    std::vector<Fd> own;
    own.push_back(std::move(listeners[static_cast<size_t>(r)]));
    out.push_back(std::make_unique<Messenger>(config, std::move(own)));
  }
  return out;
}

using Bytes = std::vector<unsigned char>;

Bytes pattern(size_t n, unsigned seed) {
  Bytes out(n);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<unsigned char>(i * 31 + i / 257 + seed);
  return out;
}

Pieces all_of(const Bytes& b) { return {b.data(), b.size()}; }

void on_each(std::vector<std::unique_ptr<Messenger>>& ranks,
             const std::function<void(Messenger&, int)>& call) {
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&call, &m = *ranks[r], r] { call(m, static_cast<int>(r)); });
  }
  for (auto& t : threads) t.join();
}

// Rank 1 of two as bare sockets, so that it can stop in the middle of a body. The buffers hold a
// small part of it: what has gone through beyond them has been copied by the messenger.
class Stranger {
 public:
  static constexpr size_t kBody = 12 << 20, kPart = 8 << 20;

  explicit Stranger(std::chrono::milliseconds user_timeout = std::chrono::seconds(1)) {
    config_.token = 4711;
    config_.tcp.interface = "lo";
    config_.tcp.buffer_bytes = 128 << 10;
    config_.tcp.connections = 1;
    config_.tcp.user_timeout = user_timeout;
    config_.hello_time = std::chrono::milliseconds(500);
    config_.kept_bytes = 1 << 20;
    config_.addresses.resize(2);
    config_.names = {"rank 0", "rank 1"};
    std::vector<Fd> own;
    own.push_back(listen_tcp(config_.tcp, &config_.addresses[0]));
    listener_ = listen_tcp(config_.tcp, &config_.addresses[1]);
    messenger = std::make_unique<Messenger>(config_, std::move(own));
  }
  // The connection on which the messenger sends, and that on which it receives.
  Fd accept() {
    pollfd p{listener_.get(), POLLIN, 0};
    while (poll(&p, 1, -1) < 1) {
    }
    Fd fd = accept_from(listener_.get(), config_.tcp);
    take_turns(fd);
    expect(read_all<Frame>(fd).kind == FrameKind::kHello, "no hello");
    return fd;
  }
  Fd knock() {
    Fd fd = connect_to(config_.addresses[0], config_.tcp);
    take_turns(fd);
    return fd;
  }
  Fd connect(uint64_t token = 4711) {
    Fd fd = knock();
    Frame hello;
    hello.tag = token;
    hello.message = 1;
    hello.total = kProtocolVersion;
    write_all(fd, &hello, sizeof hello);
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
  static void write_frame(const Fd& fd, Frame header, const Bytes& body, Seal seal) {
    header.bytes = header.total = body.size();
    write_all(fd, &header, sizeof header);
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

  std::unique_ptr<Messenger> messenger;

 private:
  static void take_turns(const Fd& fd) { fcntl(fd.get(), F_SETFL, 0); }  // it may block

  MessengerConfig config_;
  Fd listener_;
};

// What a request failed with. Its memory is the caller's again.
Error failure_of(Messenger& m, const RequestPtr& request, Bytes* memory) {
  try {
    m.wait(request, patience(), nullptr);
  } catch (const Error& e) {
    std::fill(memory->begin(), memory->end(), 1);
    return e;
  }
  complain("a request that cannot be done is");
}

}  // namespace
