// Tests of TcpTransport between two or more ranks that are threads: large bodies in both directions
// at once through small socket buffers, many messages at once, ranks that fail and ranks that
// leave. Built with a sanitizer by test_fsccl_core.py. Usage: messages_test <seed>
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

// Replaces the C library's sendmsg. After large sends it delays the thread, as if other threads
// needed its core.
std::atomic<int> sendmsg_delay_ms{0};
// Counts the delayed sends whose memory begins in the watched range.
std::atomic<uintptr_t> watched_begin{0}, watched_end{0};
std::atomic<int> watched_sends{0};
bool is_watched(const msghdr& message) {
  for (size_t i = 0; i < message.msg_iovlen; ++i) {
    const auto at = reinterpret_cast<uintptr_t>(message.msg_iov[i].iov_base);
    if (at >= watched_begin && at < watched_end) return true;
  }
  return false;
}
extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const ssize_t sent = syscall(SYS_sendmsg, fd, message, flags);
  const int saved_errno = errno, ms = sendmsg_delay_ms;
  if (ms > 0 && sent > 50'000) {
    const int is_watched_send = is_watched(*message) ? 1 : 0;
    watched_sends += is_watched_send;
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    watched_sends -= is_watched_send;
  }
  errno = saved_errno;
  return sent;
}

namespace {

using namespace fsccl;

// Every rank sends to every other at once, more than the socket buffers hold. One thread per peer
// posts receives before or after the messages arrive.
void exchange_many_messages(int ranks, int buffer_bytes, int connections, unsigned seed) {
  auto transports = connect_transports(ranks, buffer_bytes, connections);
  run_on_each_rank(transports, [&](Transport& m, int me) {
    std::vector<std::thread> threads;
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == me) continue;
      threads.emplace_back([&m, me, peer, seed] {
        std::mt19937 random(seed);  // the same on all ranks
        std::vector<Bytes> out, in;
        std::vector<RequestPtr> sends, receives;
        for (unsigned k = 0; k < 12; ++k) {
          // The same on all ranks.
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
        for (const auto& r : receives) m.wait(r, test_deadline(), nullptr);
        for (const auto& r : sends) m.wait(r, test_deadline(), nullptr);
        for (unsigned k = 0; k < in.size(); ++k) {
          expect(in[k] == pattern(in[k].size(), k + static_cast<unsigned>(peer)),
                 "unexpected data");
        }
      });
    }
    for (auto& t : threads) t.join();
  });
  run_on_each_rank(transports, [](Transport& m, int) { m.close(); });
}

// Messages are received after their sender has left, also by a rank that starts to listen only
// then.
void messages_of_a_rank_that_left_are_received(int connections) {
  auto ranks = connect_transports(2, 0, connections);
  const Bytes small = pattern(100, 1), large = pattern(100000, 2);
  for (const Bytes* b : {&small, &large}) {
    ranks[0]->wait(ranks[0]->send(1, kTag, all_of(*b)), test_deadline(), nullptr);
  }
  ranks[0]->close();
  for (const Bytes* b : {&small, &large}) {
    Bytes in(b->size());
    ranks[1]->wait(ranks[1]->recv(0, kTag, all_of(in)), test_deadline(), nullptr);
    expect(in == *b, "unexpected data");
  }
  Bytes more(10);
  const Error e = expect_failure(*ranks[1], ranks[1]->recv(0, kTag, all_of(more)), &more);
  expect(e.fault == Fault::kPeerLost && e.rank == 0, e.what());
  ranks[1]->close();
}

// A rank that has received everything may leave. Its peer's send must succeed, however late the
// peer's thread learns that the kernel has sent the last of it.
void receiver_may_leave_before_send_completes() {
  auto ranks = connect_transports(2, 4 << 20, 1);
  const Bytes out = pattern(60000, 3);  // a single system call takes it
  Bytes in(out.size());
  Bytes first(10);  // afterwards the calling thread sends by itself
  const RequestPtr receive = ranks[1]->recv(0, kTag, all_of(first));
  ranks[0]->wait(ranks[0]->send(1, kTag, all_of(first)), test_deadline(), nullptr);
  ranks[1]->wait(receive, test_deadline(), nullptr);
  std::thread leaving_rank([&] {
    ranks[1]->wait(ranks[1]->recv(0, kTag, all_of(in)), test_deadline(), nullptr);
    ranks[1]->close();
  });
  sendmsg_delay_ms = 300;
  const RequestPtr sent = ranks[0]->send(1, kTag, all_of(out));
  ranks[0]->wait(sent, test_deadline(), [&] { ranks[0]->raise_transport_error(); });
  sendmsg_delay_ms = 0;
  leaving_rank.join();
  ranks[0]->raise_transport_error();
  ranks[0]->close();
  expect(in == out, "unexpected data");
}

void any_source_receive_fails_when_all_peers_left() {
  auto ranks = connect_transports(3, 0, 1);
  Bytes in(10);
  const RequestPtr receive = ranks[0]->recv(Transport::kAnySource, kTag, all_of(in));
  ranks[1]->close();
  if (receive->finished()) expect(false, expect_failure(*ranks[0], receive, &in).what());
  ranks[2]->close();
  for (const auto& request : {receive, ranks[0]->recv(Transport::kAnySource, kTag, all_of(in))}) {
    expect(expect_failure(*ranks[0], request, &in).fault == Fault::kPeerLost, "unexpected error");
  }
  ranks[0]->close();
}

// A rank that connects to a rank that has already left gets kBye: a receive from any source
// continues.
void connecting_to_a_rank_that_left_is_no_failure() {
  auto ranks = connect_transports(3, 0, 1);
  ranks[1]->close();
  Bytes in(10);
  const RequestPtr receive = ranks[0]->recv(Transport::kAnySource, kTag, all_of(in));
  const Error e = expect_failure(*ranks[0], ranks[0]->recv(1, kTag, all_of(in)), &in);
  expect(std::string(e.what()) == "rank 1 has left the group", e.what());
  expect(!receive->finished(), "reported as a failure");
  ranks[0]->close();
  ranks[2]->close();
}

void long_abort_reasons_are_truncated() {
  auto ranks = connect_transports(2, 0, 1);
  Bytes in(10);
  const RequestPtr request = ranks[1]->recv(0, kTag, all_of(in));
  ranks[0]->wait(ranks[0]->send(1, kUserTag, all_of(in)), test_deadline(), nullptr);
  ranks[0]->abort(Error(Fault::kAborted, 0, std::string(9000, 'x')));
  const Error e = expect_failure(*ranks[1], request, &in);
  expect(e.rank == 0 && e.what() == std::string(4000, 'x'), e.what());
  for (auto& r : ranks) r->close();
}

// Many peers send messages to a rank that receives none until no more arrive.
void total_buffered_bytes_are_limited() {
  constexpr int kRanks = 6;
  constexpr size_t kMessages = 30, kSize = 100000;
  TcpOptions options;
  options.buffer_bytes = 128 << 10;
  options.max_total_buffered_bytes = 1 << 20;
  const auto devices = make_devices(kRanks, options);
  std::atomic<int> sent{0};
  auto transports = connect_transports(devices);
  run_on_each_rank(transports, [&](Transport& m, int me) {
    if (me == 0) {
      const std::atomic<size_t>& buffered = devices[0]->buffered_bytes();
      size_t previous = 0;
      m.listen();
      do {  // until no more arrives
        previous = buffered;
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
      } while (buffered != previous || previous == 0);
      expect(previous <= options.max_total_buffered_bytes + (kRanks - 1) * 2 * kSize,
             "more is buffered than allowed");
      expect(sent < kRanks - 1, "everything is buffered");
      for (int peer = kRanks - 1; peer > 0; --peer) {
        for (size_t k = 0; k < kMessages; ++k) {
          Bytes in(kSize);
          m.wait(m.recv(peer, kTag, all_of(in)), test_deadline(), nullptr);
          expect(in == pattern(kSize, static_cast<unsigned>(k) + 40U * static_cast<unsigned>(peer)),
                 "unexpected data");
        }
      }
      expect(buffered == 0, "received data stays buffered");
    } else {
      std::vector<Bytes> out;
      std::vector<RequestPtr> requests;
      for (size_t k = 0; k < kMessages; ++k) {
        out.push_back(pattern(kSize, static_cast<unsigned>(k) + 40U * static_cast<unsigned>(me)));
      }
      for (const Bytes& b : out) requests.push_back(m.send(0, kTag, all_of(b)));
      for (const RequestPtr& r : requests) m.wait(r, test_deadline(), nullptr);
      ++sent;
    }
    m.close();
  });
}

// Two ranks exchange many messages on several connections when one fails. Every message that is
// received nevertheless must be intact.
void abort_with_many_messages_in_progress(unsigned seed) {
  auto transports = connect_transports(2, 128 << 10, 2);
  run_on_each_rank(transports, [&](Transport& m, int me) {
    const Bytes sent(700000, 3);
    std::vector<Bytes> out(10, sent), in(10, Bytes(sent.size(), 0));
    Bytes unmatched(10);
    std::vector<RequestPtr> requests;
    for (size_t k = 0; k < out.size(); ++k) {
      requests.push_back(m.recv(1 - me, kTag, all_of(in[k])));
      requests.push_back(m.send(1 - me, kTag, all_of(out[k])));
    }
    requests.push_back(m.recv(1 - me, kTag, all_of(unmatched)));
    if (me == 0) {
      m.wait(requests[2 * (seed % 5)], test_deadline(), nullptr);
      m.abort(Error(Fault::kAborted, 0, "enough"));
    } else {
      const Error e = expect_failure(m, requests.back(), &unmatched);
      expect(std::string(e.what()) == "enough" && e.rank == 0, e.what());
      m.abort(e);
    }
    for (const auto& r : requests) expect(r->finished(), "abort() leaves an unfinished request");
    for (size_t k = 0; k < in.size(); ++k) {
      expect(requests[2 * k]->failed() || in[k] == sent, "a message that was never sent");
    }
    for (auto* list : {&out, &in}) {
      for (Bytes& b : *list) std::fill(b.begin(), b.end(), 1);
    }
    expect(m.send(1 - me, kTag, all_of(unmatched))->failed(), "an aborted transport sends");
    m.close();
  });
}

// Once a send has failed, its memory may be reused: no copy from it may be in progress.
void send_fails_only_after_its_copy_ends() {
  auto ranks = connect_transports(2, 128 << 10, 1);
  Bytes out(48 << 20), in(out.size());
  const RequestPtr receive = ranks[1]->recv(0, kTag, all_of(in));
  const RequestPtr sent = ranks[0]->send(1, kTag, all_of(out));  // its thread sends the rest
  watched_begin = reinterpret_cast<uintptr_t>(out.data());
  watched_end = watched_begin + out.size();
  sendmsg_delay_ms = 300;
  while (watched_sends == 0) std::this_thread::yield();
  bool failed_during_copy = false;
  std::thread waiter([&] {
    while (!sent->finished()) sent->wait_briefly(std::chrono::milliseconds(100));
    failed_during_copy = watched_sends > 0;
  });
  ranks[0]->abort(Error(Fault::kAborted, 0, "enough"));
  waiter.join();
  sendmsg_delay_ms = 0;
  expect(sent->failed() && !failed_during_copy, "failed while its memory was copied");
  run_on_each_rank(ranks, [](Transport& m, int) { m.close(); });
}

// A receive from one rank and a receive from any source with the same tag; `any_source_first`: the
// latter is posted first.
void receives_match_in_posting_order(bool any_source_first) {
  auto ranks = connect_transports(2, 0, 1);
  Bytes first(1000), second(1000);
  const int any = Transport::kAnySource;
  const RequestPtr receives[] = {
      ranks[0]->recv(any_source_first ? any : 1, kUserTag, all_of(first)),
      ranks[0]->recv(any_source_first ? 1 : any, kUserTag, all_of(second))};
  const Bytes out[] = {pattern(1000, 1), pattern(1000, 2)};
  for (const Bytes& b : out)
    ranks[1]->wait(ranks[1]->send(0, kUserTag, all_of(b)), test_deadline(), {});
  for (const RequestPtr& r : receives) ranks[0]->wait(r, test_deadline(), nullptr);
  expect(first == out[0] && second == out[1], "received in another order");
  run_on_each_rank(ranks, [](Transport& m, int) { m.close(); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto seed = static_cast<unsigned>(std::atoi(argv[1]));
  RUN_CASE(exchange_many_messages(2, 128 << 10, 2, seed));
  RUN_CASE(exchange_many_messages(3, 0, 3, seed));
  RUN_CASE(exchange_many_messages(2, 256 << 10, 1, seed));
  for (unsigned k = 0; k < 10; ++k) RUN_CASE(abort_with_many_messages_in_progress(seed + k));
  for (int k = 0; k < 20; ++k) RUN_CASE(messages_of_a_rank_that_left_are_received(1 + k % 2));
  RUN_CASE(receiver_may_leave_before_send_completes());
  RUN_CASE(send_fails_only_after_its_copy_ends());
  for (const bool any_source_first : {true, false})
    RUN_CASE(receives_match_in_posting_order(any_source_first));
  RUN_CASE(any_source_receive_fails_when_all_peers_left());
  for (int k = 0; k < 10; ++k) RUN_CASE(connecting_to_a_rank_that_left_is_no_failure());
  RUN_CASE(long_abort_reasons_are_truncated());
  RUN_CASE(total_buffered_bytes_are_limited());
  std::puts("ok");
  return 0;
}
