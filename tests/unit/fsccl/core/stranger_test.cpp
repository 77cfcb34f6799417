// Messages with a peer that is bare sockets, so that it can say anything, stop anywhere, and be a
// stranger. Built with a sanitizer by test_fsccl_core.py. Usage: stranger_test
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "transports.h"

namespace {

using namespace fsccl;

// Who has just connected says who it is all the same, or nobody would believe it.
void abort_at_once() {
  Stranger peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  expect(request->failed(), "abort() leaves a request");
  const Fd fd = peer.accept();
  expect(Stranger::read_all<Frame>(fd).kind == FrameKind::kAbort, "no word of the abort");
  peer.transport->close();
}

// Who connects to a rank that has failed is told why, though that one has not listened before.
void abort_before_the_peer_connects() {
  Stranger peer;
  peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  const Fd fd = peer.connect();
  const Frame told = Stranger::read_all<Frame>(fd);
  expect(told.kind == FrameKind::kAbort && told.bytes == 6, "no word of the abort");
  peer.transport->close();
}

// Everyone who wants to know of a request is told, those who ask late too.
void several_are_notified() {
  Stranger peer;
  Bytes in(1000);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  std::atomic<int> told{0};
  for (int i = 0; i < 3; ++i) peer.transport->notify(request, [&told] { ++told; });
  const Fd fd = peer.connect();
  const Bytes body(in.size(), 2);
  Stranger::write_frame(fd, Stranger::message(), body, Seal::kWhole);
  peer.transport->wait(request, patience(), nullptr);
  peer.transport->notify(request, [&told] { ++told; });
  const Deadline end = patience();
  while (told < 4 && !end.passed()) std::this_thread::yield();
  expect(told == 4 && in == body, "not all were told");
  peer.transport->close();
}

// The rest of the body comes all the same, so that what follows is understood, but unsealed.
void abort_while_sending() {
  Stranger peer;
  auto out = std::make_unique<Bytes>(Stranger::kBody);
  const RequestPtr request = peer.transport->send(1, kTag, all_of(*out));
  const Fd fd = peer.accept();
  expect(Stranger::read_all<Frame>(fd).bytes == Stranger::kBody, "other header");
  Stranger::skip(fd, Stranger::kPart);
  std::thread reader([&fd] { Stranger::skip(fd, Stranger::kBody - Stranger::kPart); });
  peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  expect(request->finished(), "abort() leaves a request");
  std::fill(out->begin(), out->end(), 1);
  out.reset();
  reader.join();
  expect(Stranger::read_all<Seal>(fd) != Seal::kWhole, "a broken body is sealed");
  expect(Stranger::read_all<Frame>(fd).kind == FrameKind::kAbort, "no word of the abort");
  peer.transport->close();
}

void abort_while_receiving() {
  Stranger peer;
  auto in = std::make_unique<Bytes>(Stranger::kBody);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(*in));
  const Fd fd = peer.connect();
  const Frame header = Stranger::message();
  const Bytes body(Stranger::kBody, 2);
  Stranger::write_header(fd, header);
  Stranger::write_all(fd, body.data(), Stranger::kPart);
  std::thread writer([&] {
    Stranger::write_all(fd, body.data() + Stranger::kPart, Stranger::kBody - Stranger::kPart);
    const Seal seal = Seal::kWhole;
    Stranger::write_all(fd, &seal, sizeof seal);
  });
  peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  expect(request->finished(), "abort() leaves a request");
  std::fill(in->begin(), in->end(), 1);
  in.reset();
  writer.join();
  expect(Stranger::read_all<Frame>(fd).kind == FrameKind::kAbort, "no word of the abort");
  peer.transport->close();
}

void peer_ends_in_the_middle(bool at_once) {
  Stranger peer;
  Bytes out(Stranger::kBody), in(Stranger::kBody);
  const RequestPtr sends = peer.transport->send(1, kTag, all_of(out));
  const RequestPtr receives = peer.transport->recv(1, kTag, all_of(in));
  {
    const Fd to_us = peer.accept(), to_it = peer.connect();
    const Frame header = Stranger::message();
    const Bytes body(Stranger::kPart, 2);
    std::thread writer([&] {
      Stranger::write_header(to_it, header);
      Stranger::write_all(to_it, body.data(), body.size());
    });
    Stranger::skip(to_us, sizeof(Frame) + Stranger::kPart);
    writer.join();
    const linger reset{1, 0};
    if (at_once) setsockopt(to_us.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  }
  for (const auto& [request, memory] : {std::pair(sends, &out), std::pair(receives, &in)}) {
    const Error e = failure_of(*peer.transport, request, memory);
    expect(e.fault == Fault::kPeerLost && e.rank == 1, e.what());
    expect(std::string(e.what()).find("rank 1 ended") == 0, e.what());
  }
  peer.transport->close();
}

// A message that was not sent whole is none, though all its bytes have come.
void a_broken_body_is_no_message() {
  Stranger peer;
  Bytes in(1000);
  const RequestPtr broken = peer.transport->recv(1, kTag, all_of(in));
  const Fd fd = peer.connect();
  Stranger::write_frame(fd, Stranger::message(), Bytes(in.size(), 2), Seal::kBroken);
  Frame abort;
  abort.kind = FrameKind::kAbort;
  abort.tag = 1;
  const std::string why = "rank 1 gave up";
  Stranger::write_frame(fd, abort, Bytes(why.begin(), why.end()), Seal::kWhole);
  expect(failure_of(*peer.transport, broken, &in).what() == why, "another reason");
  peer.transport->close();
}

// A peer that takes nothing for long is not lost as long as its host answers.
void a_late_reader_is_not_lost() {
  Stranger peer;
  Bytes out(Stranger::kBody);
  const RequestPtr request = peer.transport->send(1, kTag, all_of(out));
  const Fd fd = peer.accept();
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  Stranger::skip(fd, sizeof(Frame) + out.size() + sizeof(Seal));
  peer.transport->wait(request, patience(), nullptr);
  peer.transport->close();
}

bool turned_away(const Fd& fd) {
  char none = 0;
  return read(fd.get(), &none, 1) <= 0;
}

void a_stranger_is_turned_away() {
  Stranger peer;
  expect(turned_away(peer.connect(4712, Stranger::kKey)), "an answer to a stranger");
  expect(turned_away(peer.connect(peer.token, {1, 3})), "an answer to who lacks the key");
  expect(turned_away(peer.connect(peer.token, Stranger::kKey, 64)), "one connection too many");
  expect(turned_away(peer.connect(peer.token, Stranger::kKey, 0, 2)), "an answer to no rank");
  const Fd known = peer.connect();
  const Fd again = peer.knock();
  Stranger::write_all(again, &peer.said, sizeof peer.said);
  expect(turned_away(again), "an answer to who repeats another's hello");
  const Frame nonsense;
  Stranger::write_all(known, &nonsense, 10);  // known, and nothing comes of it
  peer.transport->close();
}

// Nor are frames taken that are not signed, or not where they are.
void a_forged_frame_ends_the_connection(bool repeated) {
  Stranger peer;
  Bytes in(10), body(10, 2);
  const RequestPtr first = peer.transport->recv(1, kUserTag, all_of(in));
  const Fd fd = peer.connect();
  Frame f = Stranger::message();
  f.tag = kUserTag;
  if (repeated) {
    Stranger::write_frame(fd, f, body, Seal::kWhole);
    peer.transport->wait(first, patience(), nullptr);
    f.bytes = f.total = body.size();
    f.mac = mac_of(key_of_connection(Stranger::kKey, peer.said), f, 2);
  }
  f.message = repeated ? 0 : 1;
  Bytes other(10);
  const RequestPtr second = peer.transport->recv(1, kUserTag, all_of(other));
  Stranger::write_all(fd, &f, sizeof f);
  const Error e = failure_of(*peer.transport, second, &other);
  expect(std::string(e.what()).find("nobody of this group has signed") != std::string::npos,
         e.what());
  peer.transport->close();
}

// However many knock and say nothing: who has something to say is heard.
void many_strangers_hold_up_nobody() {
  Stranger peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kUserTag, all_of(in));
  std::vector<Fd> silent;
  for (size_t k = 0; k < TcpDevice::kMostStrangers + 50; ++k) silent.push_back(peer.knock());
  const Fd fd = peer.connect();
  Frame f = Stranger::message();
  f.tag = kUserTag;
  Stranger::write_frame(fd, f, Bytes(in.size(), 2), Seal::kWhole);
  peer.transport->wait(request, patience(), nullptr);
  expect(turned_away(silent.front()), "who says nothing stays");
  peer.transport->close();
}

// Who says nothing may be anybody, but not for long: it does not hide that a peer has ended.
void a_silent_stranger_hides_nobodys_end() {
  Stranger peer(std::chrono::seconds(60));
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  const Fd silent = peer.knock();
  { const Fd from_us = peer.accept(); }
  expect(failure_of(*peer.transport, request, &in).fault == Fault::kPeerLost, "another reason");
  peer.transport->close();
}

// A message of a collective, where one of another is awaited: at once, whichever comes first.
void another_operation_is_told(bool called_before, bool later) {
  Stranger peer;
  peer.transport->listen();
  Bytes in(1000);
  OpCard mine, theirs;
  mine.op = theirs.op = OpCode::kAllReduce;
  mine.sequence = 7;
  theirs.sequence = later ? 8 : 6;
  const uint64_t tag = Transport::kCollectiveTag;
  const auto call = [&] { return peer.transport->recv(1, tag | 7, all_of(in), mine); };
  RequestPtr request = called_before ? call() : nullptr;
  const Fd fd = peer.connect();
  Frame f = Stranger::message();
  f.tag = tag | theirs.sequence;
  f.card = theirs;
  Stranger::write_frame(fd, f, Bytes(in.size()), Seal::kWhole);
  if (!called_before) {
    if (!later) {  // what is awaited comes too, after it
      f.tag = tag | mine.sequence;
      f.card = mine;
      f.message = 1;
      Stranger::write_frame(fd, f, Bytes(in.size()), Seal::kWhole);
    }
    Frame asked;  // answered when all before it has been looked at
    asked.kind = FrameKind::kAsk;
    Stranger::write_header(fd, asked);
    expect(Stranger::read_all<Frame>(fd).kind == FrameKind::kAnswer, "no answer");
    request = call();
  }
  const Error e = failure_of(*peer.transport, request, &in);
  const std::string number = std::to_string(theirs.sequence);
  expect(e.what() == "rank 0 called all_reduce #7 while rank 1 called all_reduce #" + number,
         e.what());
  peer.transport->close();
}

// The same of a message with the awaited one's tag.
void another_card_is_told() {
  Stranger peer;
  Bytes in(1000);
  OpCard mine, theirs;
  mine.op = theirs.op = OpCode::kReduce;
  theirs.root = 1;
  const uint64_t tag = Transport::kCollectiveTag | 7;
  const RequestPtr request = peer.transport->recv(1, tag, all_of(in), mine);
  const Fd fd = peer.connect();
  Frame f = Stranger::message();
  f.tag = tag;
  f.card = theirs;
  Stranger::write_frame(fd, f, Bytes(in.size()), Seal::kWhole);
  expect(failure_of(*peer.transport, request, &in).fault == Fault::kMismatch, "another reason");
  peer.transport->close();
}

// Well signed, and of no rank: the connection ends, and what waits for more.
void what_nobody_sends_ends_the_connection(Frame f, int times) {
  Stranger peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kUserTag, all_of(in));
  const Fd from_us = peer.accept(), fd = peer.connect();
  for (; times > 0; --times) Stranger::write_header(fd, f);
  expect(failure_of(*peer.transport, request, &in).fault == Fault::kPeerLost, "another reason");
  peer.transport->close();
}

// Whoever sleeps until something comes is woken by it, and not by the end of its patience.
void a_sleeper_is_woken() {
  Stranger peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  const Fd fd = peer.connect();
  std::atomic<bool> woken{false};
  std::thread sleeper([&] {
    while (!request->finished()) request->sleep(std::chrono::seconds(60));
    woken = true;
  });
  while (request->state.load() != Request::kAwaited) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Stranger::write_frame(fd, Stranger::message(), Bytes(in.size()), Seal::kWhole);
  for (int i = 0; i < 2000 && !woken; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  expect(woken, "it sleeps on");
  sleeper.join();
  peer.transport->close();
}

// From anyone is from this one, too.
void a_dead_peer_ends_waiting_for_anyone() {
  Stranger peer;
  Bytes in(10);
  const RequestPtr request =
      peer.transport->recv(Transport::kAnySource, kUserTag, all_of(in));
  { const Fd from_us = peer.accept(), to_us = peer.connect(); }
  const Error e = failure_of(*peer.transport, request, &in);
  expect(e.fault == Fault::kPeerLost && e.rank == 1, e.what());
  peer.transport->close();
}

// Before the rest of it has come, and without taking it in.
void another_size_is_told_at_once() {
  Stranger peer;
  Bytes in(4);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  const Fd fd = peer.connect();
  Frame header = Stranger::message();
  header.bytes = header.total = size_t{1} << 34;
  Stranger::write_header(fd, header);
  expect(failure_of(*peer.transport, request, &in).fault == Fault::kMismatch, "another reason");
  peer.transport->close();
}

// Who sends to a rank that receives nothing waits, once that has kept enough.
void not_everything_is_kept() {
  Stranger peer;
  peer.transport->listen();
  const Fd fd = peer.connect();
  constexpr unsigned kCount = 64;
  std::atomic<unsigned> written{0};
  std::thread writer([&] {
    for (; written < kCount; ++written) {
      Frame f = Stranger::message();
      f.message = written;
      Stranger::write_frame(fd, f, pattern(100000, written), Seal::kWhole);
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  expect(written < kCount, "all is kept");
  for (unsigned k = 0; k < kCount; ++k) {
    Bytes in(100000);
    peer.transport->wait(peer.transport->recv(1, kTag, all_of(in)), patience(), nullptr);
    expect(in == pattern(in.size(), k), "other bytes");
  }
  writer.join();
  peer.transport->close();
}

}  // namespace

int main() {
  for (int k = 0; k < 50; ++k) PART(abort_at_once());
  PART(abort_before_the_peer_connects());
  PART(several_are_notified());
  PART(abort_while_sending());
  PART(abort_while_receiving());
  PART(a_broken_body_is_no_message());
  PART(peer_ends_in_the_middle(false));
  PART(peer_ends_in_the_middle(true));
  PART(a_late_reader_is_not_lost());
  PART(a_stranger_is_turned_away());
  for (const bool repeated : {false, true}) PART(a_forged_frame_ends_the_connection(repeated));
  PART(many_strangers_hold_up_nobody());
  PART(a_silent_stranger_hides_nobodys_end());
  for (const bool before : {true, false}) {
    for (const bool later : {true, false}) PART(another_operation_is_told(before, later));
  }
  PART(another_card_is_told());
  Frame announced, endless = Stranger::message();
  announced.kind = FrameKind::kAnnounce;
  announced.tag = kTag;
  announced.total = 300000;
  endless.bytes = endless.total = (uint64_t{1} << 40) + 1;
  PART(what_nobody_sends_ends_the_connection(announced, 2));
  PART(what_nobody_sends_ends_the_connection(endless, 1));
  PART(a_sleeper_is_woken());
  PART(a_dead_peer_ends_waiting_for_anyone());
  PART(another_size_is_told_at_once());
  PART(not_everything_is_kept());
  std::puts("ok");
  return 0;
}
