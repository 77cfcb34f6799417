// Messages of two and three ranks that are threads: large bodies both ways at once through tiny
// socket buffers, many at once, and how their ranks end and leave. Built with a sanitizer by
// test_fsccl_core.py. Usage: messages_test <seed>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "transports.h"

// The kernel's, after which the thread may be held up, as by others that want its core.
std::atomic<int> held_up_ms{0};
// And how many are, whose memory begins in what is watched.
std::atomic<uintptr_t> watched_from{0}, watched_to{0};
std::atomic<int> watched{0};
bool is_watched(const msghdr& message) {
  for (size_t i = 0; i < message.msg_iovlen; ++i) {
    const auto at = reinterpret_cast<uintptr_t>(message.msg_iov[i].iov_base);
    if (at >= watched_from && at < watched_to) return true;
  }
  return false;
}
extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const ssize_t sent = syscall(SYS_sendmsg, fd, message, flags);
  const int code = errno, ms = held_up_ms;
  if (ms > 0 && sent > 50'000) {
    const int one = is_watched(*message) ? 1 : 0;
    watched += one;
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    watched -= one;
  }
  errno = code;
  return sent;
}

namespace {

using namespace fsccl;

// Every rank sends to every other at once, more than the sockets take; receives are called before
// or after the messages come, by several threads.
void all_at_once(int ranks, int buffer_bytes, int connections, unsigned seed) {
  auto transports = meet(ranks, buffer_bytes, connections);
  on_each(transports, [&](Transport& m, int me) {
    std::vector<std::thread> threads;
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == me) continue;
      threads.emplace_back([&m, me, peer, seed] {
        std::mt19937 random(seed);  // the same on all ranks
        std::vector<Bytes> out, in;
        std::vector<RequestPtr> sends, receives;
        for (unsigned k = 0; k < 12; ++k) {
          const size_t n = k % 3 == 0 ? random() % 200 : random() % 900000;
          out.push_back(pattern(n, k + static_cast<unsigned>(me)));
          in.emplace_back(n);
        }
        for (size_t k = 0; k < out.size(); ++k) {
          const uint64_t tag = k % 4 == 3 ? kUserTag : kTag;
          if ((k + static_cast<size_t>(me)) % 2 == 0) {
            receives.push_back(m.recv(peer, tag, all_of(in[k])));
            sends.push_back(m.send(peer, tag, all_of(out[k])));
          } else {
            sends.push_back(m.send(peer, tag, all_of(out[k])));
            receives.push_back(m.recv(peer, tag, all_of(in[k])));
          }
        }
        for (const auto& r : receives) m.wait(r, patience(), nullptr);
        for (const auto& r : sends) m.wait(r, patience(), nullptr);
        for (unsigned k = 0; k < in.size(); ++k) {
          expect(in[k] == pattern(in[k].size(), k + static_cast<unsigned>(peer)), "other bytes");
        }
      });
    }
    for (auto& t : threads) t.join();
  });
  on_each(transports, [](Transport& m, int) { m.close(); });
}

// What was sent is received after its sender has gone, also by who has not begun to listen then.
void who_leaves_has_sent(int connections) {
  auto ranks = meet(2, 0, connections);
  const Bytes small = pattern(100, 1), large = pattern(100000, 2);
  for (const Bytes* b : {&small, &large}) {
    ranks[0]->wait(ranks[0]->send(1, kTag, all_of(*b)), patience(), nullptr);
  }
  ranks[0]->close();
  for (const Bytes* b : {&small, &large}) {
    Bytes in(b->size());
    ranks[1]->wait(ranks[1]->recv(0, kTag, all_of(in)), patience(), nullptr);
    expect(in == *b, "other bytes");
  }
  Bytes more(10);
  const Error e = failure_of(*ranks[1], ranks[1]->recv(0, kTag, all_of(more)), &more);
  expect(e.fault == Fault::kPeerLost && e.rank == 0, e.what());
  ranks[1]->close();
}

// Whoever has taken all that was sent to it may leave: its sender has nothing to complain of, however
// late its thread learns that the kernel has sent the last of it.
void who_leaves_has_received() {
  auto ranks = meet(2, 4 << 20, 1);
  const Bytes out = pattern(60000, 3);  // one call of the kernel takes it
  Bytes in(out.size());
  Bytes first(10);  // afterwards who sends does it by itself
  const RequestPtr called = ranks[1]->recv(0, kTag, all_of(first));
  ranks[0]->wait(ranks[0]->send(1, kTag, all_of(first)), patience(), nullptr);
  ranks[1]->wait(called, patience(), nullptr);
  std::thread leaves([&] {
    ranks[1]->wait(ranks[1]->recv(0, kTag, all_of(in)), patience(), nullptr);
    ranks[1]->close();
  });
  held_up_ms = 300;
  const RequestPtr sent = ranks[0]->send(1, kTag, all_of(out));
  ranks[0]->wait(sent, patience(), [&] { ranks[0]->throw_trouble(); });
  held_up_ms = 0;
  leaves.join();
  ranks[0]->throw_trouble();
  ranks[0]->close();
  expect(in == out, "other bytes");
}

void nobody_is_left_to_receive_from() {
  auto ranks = meet(3, 0, 1);
  Bytes in(10);
  const RequestPtr waits = ranks[0]->recv(Transport::kAnySource, kTag, all_of(in));
  ranks[1]->close();
  if (waits->finished()) expect(false, failure_of(*ranks[0], waits, &in).what());
  ranks[2]->close();
  for (const auto& request : {waits, ranks[0]->recv(Transport::kAnySource, kTag, all_of(in))}) {
    expect(failure_of(*ranks[0], request, &in).fault == Fault::kPeerLost, "another reason");
  }
  ranks[0]->close();
}

// Also when it connects to who has left already, as it may have been about to.
void who_comes_too_late_hears_of_no_failure() {
  auto ranks = meet(3, 0, 1);
  ranks[1]->close();
  Bytes in(10);
  const RequestPtr waits = ranks[0]->recv(Transport::kAnySource, kTag, all_of(in));
  const Error e = failure_of(*ranks[0], ranks[0]->recv(1, kTag, all_of(in)), &in);
  expect(std::string(e.what()) == "rank 1 has left the group", e.what());
  expect(!waits->finished(), "it has heard of a failure");
  ranks[0]->close();
  ranks[2]->close();
}

void long_reasons_are_cut() {
  auto ranks = meet(2, 0, 1);
  Bytes in(10);
  const RequestPtr request = ranks[1]->recv(0, kTag, all_of(in));
  ranks[0]->wait(ranks[0]->send(1, kUserTag, all_of(in)), patience(), nullptr);
  ranks[0]->abort(Error(Fault::kAborted, 0, std::string(9000, 'x')));
  const Error e = failure_of(*ranks[1], request, &in);
  expect(e.rank == 0 && e.what() == std::string(4000, 'x'), e.what());
  for (auto& r : ranks) r->close();
}

// Many peers send to a rank that receives nothing, none of them much.
void not_everything_is_kept_of_all() {
  constexpr int kRanks = 6;
  constexpr size_t kMessages = 30, kSize = 100000;
  TcpOptions options;
  options.buffer_bytes = 128 << 10;
  options.all_kept_bytes = 1 << 20;
  const auto all = devices(kRanks, options);
  std::atomic<int> sent{0};
  auto transports = meet(all);
  on_each(transports, [&](Transport& m, int me) {
    if (me == 0) {
      const std::atomic<size_t>& kept = all[0]->kept();
      size_t before = 0;
      m.listen();
      do {  // until no more comes
        before = kept;
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
      } while (kept != before || before == 0);
      expect(before <= options.all_kept_bytes + (kRanks - 1) * 2 * kSize, "more is kept");
      expect(sent < kRanks - 1, "all is kept");
      for (int peer = kRanks - 1; peer > 0; --peer) {
        for (size_t k = 0; k < kMessages; ++k) {
          Bytes in(kSize);
          m.wait(m.recv(peer, kTag, all_of(in)), patience(), nullptr);
          expect(in == pattern(kSize, static_cast<unsigned>(k) + 40U * static_cast<unsigned>(peer)),
                 "other bytes");
        }
      }
      expect(kept == 0, "what is received is kept");
    } else {
      std::vector<Bytes> out;
      std::vector<RequestPtr> requests;
      for (size_t k = 0; k < kMessages; ++k) {
        out.push_back(pattern(kSize, static_cast<unsigned>(k) + 40U * static_cast<unsigned>(me)));
      }
      for (const Bytes& b : out) requests.push_back(m.send(0, kTag, all_of(b)));
      for (const RequestPtr& r : requests) m.wait(r, patience(), nullptr);
      ++sent;
    }
    m.close();
  });
}

// Both are in the middle of many messages to each other, on several connections, when one fails.
// What has been received nevertheless is what was sent.
void abort_among_many(unsigned seed) {
  auto transports = meet(2, 128 << 10, 2);
  on_each(transports, [&](Transport& m, int me) {
    const Bytes sent(700000, 3);
    std::vector<Bytes> out(10, sent), in(10, Bytes(sent.size(), 0));
    Bytes never(10);
    std::vector<RequestPtr> all;
    for (size_t k = 0; k < out.size(); ++k) {
      all.push_back(m.recv(1 - me, kTag, all_of(in[k])));
      all.push_back(m.send(1 - me, kTag, all_of(out[k])));
    }
    all.push_back(m.recv(1 - me, kTag, all_of(never)));
    if (me == 0) {
      m.wait(all[2 * (seed % 5)], patience(), nullptr);
      m.abort(Error(Fault::kAborted, 0, "enough"));
    } else {
      const Error e = failure_of(m, all.back(), &never);
      expect(std::string(e.what()) == "enough" && e.rank == 0, e.what());
      m.abort(e);
    }
    for (const auto& r : all) expect(r->finished(), "abort() leaves a request");
    for (size_t k = 0; k < in.size(); ++k) {
      expect(all[2 * k]->failed() || in[k] == sent, "a message that was never sent");
    }
    for (auto* list : {&out, &in}) {
      for (Bytes& b : *list) std::fill(b.begin(), b.end(), 1);
    }
    expect(m.send(1 - me, kTag, all_of(never))->failed(), "an aborted transport sends");
    m.close();
  });
}

// Who hears that a send has failed may use its memory: nothing is copied from it any more.
void nothing_fails_while_it_is_copied() {
  auto ranks = meet(2, 128 << 10, 1);
  Bytes out(48 << 20), in(out.size());
  const RequestPtr come = ranks[1]->recv(0, kTag, all_of(in));
  const RequestPtr sent = ranks[0]->send(1, kTag, all_of(out));  // the rest is its thread's
  watched_from = reinterpret_cast<uintptr_t>(out.data());
  watched_to = watched_from + out.size();
  held_up_ms = 300;
  while (watched == 0) std::this_thread::yield();
  bool early = false;
  std::thread waiter([&] {
    while (!sent->finished()) sent->sleep(std::chrono::milliseconds(100));
    early = watched > 0;
  });
  ranks[0]->abort(Error(Fault::kAborted, 0, "enough"));
  waiter.join();
  held_up_ms = 0;
  expect(sent->failed() && !early, "it has failed while it was copied");
  on_each(ranks, [](Transport& m, int) { m.close(); });
}

// Of a receive from this rank and one from anyone.
void who_has_called_first_gets_the_first(bool anyone) {
  auto ranks = meet(2, 0, 1);
  Bytes first(1000), second(1000);
  const int any = Transport::kAnySource;
  const RequestPtr all[] = {ranks[0]->recv(anyone ? any : 1, kUserTag, all_of(first)),
                            ranks[0]->recv(anyone ? 1 : any, kUserTag, all_of(second))};
  const Bytes out[] = {pattern(1000, 1), pattern(1000, 2)};
  for (const Bytes& b : out) ranks[1]->wait(ranks[1]->send(0, kUserTag, all_of(b)), patience(), {});
  for (const RequestPtr& r : all) ranks[0]->wait(r, patience(), nullptr);
  expect(first == out[0] && second == out[1], "in another order");
  on_each(ranks, [](Transport& m, int) { m.close(); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto seed = static_cast<unsigned>(std::atoi(argv[1]));
  PART(all_at_once(2, 128 << 10, 2, seed));
  PART(all_at_once(3, 0, 3, seed));
  PART(all_at_once(2, 256 << 10, 1, seed));
  for (unsigned k = 0; k < 10; ++k) PART(abort_among_many(seed + k));
  for (int k = 0; k < 20; ++k) PART(who_leaves_has_sent(1 + k % 2));
  PART(who_leaves_has_received());
  PART(nothing_fails_while_it_is_copied());
  for (const bool anyone : {true, false}) PART(who_has_called_first_gets_the_first(anyone));
  PART(nobody_is_left_to_receive_from());
  for (int k = 0; k < 10; ++k) PART(who_comes_too_late_hears_of_no_failure());
  PART(long_reasons_are_cut());
  PART(not_everything_is_kept_of_all());
  std::puts("ok");
  return 0;
}
