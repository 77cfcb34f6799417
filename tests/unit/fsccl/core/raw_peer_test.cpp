// Tests of TcpTransport with a peer made of raw sockets (RawPeer in transports.h), which can send
// any frames, stop at any byte, and be unauthenticated. Built with a sanitizer by
// test_fsccl_core.py. Usage: raw_peer_test
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

// A rank that aborts right after it has connected still sends its hello, without which the peer
// would ignore the abort.
void abort_right_after_connecting() {
  RawPeer peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  expect(request->failed(), "abort() leaves an unfinished request");
  const Fd fd = peer.accept();
  expect(RawPeer::read_struct<Frame>(fd).kind == FrameKind::kAbort, "no kAbort frame");
  peer.transport->close();
}

// A peer that connects to a rank that has failed gets the reason, although that rank has not
// listened before.
void abort_before_the_peer_connects() {
  RawPeer peer;
  peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  const Fd fd = peer.connect();
  const Frame abort_frame = RawPeer::read_struct<Frame>(fd);
  expect(abort_frame.kind == FrameKind::kAbort && abort_frame.bytes == 6, "no kAbort frame");
  peer.transport->close();
}

// A peer that has left without knowing the key of the group says so with its farewell key. With
// that key it can say nothing else.
void farewell_key_signs_farewells_only(FrameKind kind) {
  RawPeer peer;
  Bytes in(1000);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  const Fd fd = peer.accept();
  Frame frame;
  frame.kind = kind;
  frame.tag = kTag;
  const Key key = key_of_connection(RawPeer::kFarewellKey, peer.last_hello);
  frame.mac = mac_of(key, frame, 1);
  RawPeer::write_all(fd, &frame, sizeof frame);
  const Error error = expect_failure(*peer.transport, request, &in);
  const bool has_left = std::string(error.what()) == std::string("rank 1") + kLeftGroup;
  expect(has_left == (kind == FrameKind::kBye) && error.rank == 1, error.what());
  peer.transport->close();
}

// A transport that is closed or aborted before it knows its peers answers them later.
void unknown_peers_get_a_farewell(bool aborted) {
  TcpOptions options;
  options.interface = "lo";
  const auto device = std::make_shared<TcpDevice>(options);
  const auto transport = device->open();
  transport->set_farewell_key(RawPeer::kFarewellKey);
  RawPeer peer;
  const std::vector<std::string> address = split(transport->address(), ' ');
  if (aborted) transport->abort(Error(Fault::kAborted, 0, "enough"));
  transport->close();
  Frame hello;
  expect(parse_decimal(address[0], &hello.tag), "no token");
  hello.flags = kProtocolVersion;
  hello.mac = 1;  // of a key that the transport does not know
  const Fd fd = connect_to(address[2], options);
  RawPeer::make_blocking(fd);
  RawPeer::write_all(fd, &hello, sizeof hello);
  const auto frame = RawPeer::read_struct<Frame>(fd);
  const Key key = key_of_connection(RawPeer::kFarewellKey, hello);
  expect(frame.kind == (aborted ? FrameKind::kAbort : FrameKind::kBye), "another farewell");
  expect(frame.mac == mac_of(key, frame, 1), "an unsigned farewell");
  expect(frame.bytes == (aborted ? 6 : 0), "another reason");
  peer.transport->close();
}

// All callbacks of a request run, including those that are added late.
void every_callback_of_a_request_runs() {
  RawPeer peer;
  Bytes in(1000);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  std::atomic<int> callbacks{0};
  for (int i = 0; i < 3; ++i) peer.transport->notify(request, [&callbacks] { ++callbacks; });
  const Fd fd = peer.connect();
  const Bytes body(in.size(), 2);
  RawPeer::write_frame(fd, RawPeer::message(), body, Seal::kWhole);
  peer.transport->wait(request, test_deadline(), nullptr);
  peer.transport->notify(request, [&callbacks] { ++callbacks; });
  const Deadline end = test_deadline();
  while (callbacks < 4 && !end.passed()) std::this_thread::yield();
  expect(callbacks == 4 && in == body, "not all callbacks ran");
  peer.transport->close();
}

// After an abort, the rest of a body is sent, so that the peer can parse the frames that follow,
// but its seal says that it is incomplete.
void abort_while_sending() {
  RawPeer peer;
  auto out = std::make_unique<Bytes>(RawPeer::kBody);
  const RequestPtr request = peer.transport->send(1, kTag, all_of(*out));
  const Fd fd = peer.accept();
  expect(RawPeer::read_struct<Frame>(fd).bytes == RawPeer::kBody, "unexpected header");
  RawPeer::discard_bytes(fd, RawPeer::kPartialBody);
  std::thread reader([&fd] { RawPeer::discard_bytes(fd, RawPeer::kBody - RawPeer::kPartialBody); });
  peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  expect(request->finished(), "abort() leaves an unfinished request");
  std::fill(out->begin(), out->end(), 1);
  out.reset();
  reader.join();
  expect(RawPeer::read_struct<Seal>(fd) != Seal::kWhole, "a broken body is sealed");
  expect(RawPeer::read_struct<Frame>(fd).kind == FrameKind::kAbort, "no kAbort frame");
  peer.transport->close();
}

// After an abort, the rest of a body is received without accessing the memory of the request.
void abort_while_receiving() {
  RawPeer peer;
  auto in = std::make_unique<Bytes>(RawPeer::kBody);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(*in));
  const Fd fd = peer.connect();
  const Frame header = RawPeer::message();
  const Bytes body(RawPeer::kBody, 2);
  RawPeer::write_header(fd, header);
  RawPeer::write_all(fd, body.data(), RawPeer::kPartialBody);
  std::thread writer([&] {
    RawPeer::write_all(fd, body.data() + RawPeer::kPartialBody,
                       RawPeer::kBody - RawPeer::kPartialBody);
    const Seal seal = Seal::kWhole;
    RawPeer::write_all(fd, &seal, sizeof seal);
  });
  peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  expect(request->finished(), "abort() leaves an unfinished request");
  std::fill(in->begin(), in->end(), 1);
  in.reset();
  writer.join();
  expect(RawPeer::read_struct<Frame>(fd).kind == FrameKind::kAbort, "no kAbort frame");
  peer.transport->close();
}

// The connections end in the middle of a body: closed, or with a TCP reset.
void peer_ends_during_transfers(bool with_reset) {
  RawPeer peer;
  Bytes out(RawPeer::kBody), in(RawPeer::kBody);
  const RequestPtr sends = peer.transport->send(1, kTag, all_of(out));
  const RequestPtr receives = peer.transport->recv(1, kTag, all_of(in));
  {
    const Fd from_transport = peer.accept(), to_transport = peer.connect();
    const Frame header = RawPeer::message();
    const Bytes body(RawPeer::kPartialBody, 2);
    std::thread writer([&] {
      RawPeer::write_header(to_transport, header);
      RawPeer::write_all(to_transport, body.data(), body.size());
    });
    RawPeer::discard_bytes(from_transport, sizeof(Frame) + RawPeer::kPartialBody);
    writer.join();
    const linger reset{1, 0};
    if (with_reset) setsockopt(from_transport.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  }
  for (const auto& [request, memory] : {std::pair(sends, &out), std::pair(receives, &in)}) {
    const Error e = expect_failure(*peer.transport, request, memory);
    expect(e.fault == Fault::kPeerLost && e.rank == 1, e.what());
    expect(std::string(e.what()).find("rank 1 ended") == 0, e.what());
  }
  peer.transport->close();
}

// A peer leaves while data for it is on the way. The farewell is read although sending fails first.
void farewell_during_a_transfer_is_read() {
  constexpr int kRounds = 50;
  for (int round = 0; round < kRounds; ++round) {
    RawPeer peer;
    Bytes out(RawPeer::kBody);
    const RequestPtr request = peer.transport->send(1, kTag, all_of(out));
    {
      const Fd fd = peer.accept();
      Frame bye;
      bye.kind = FrameKind::kBye;
      bye.mac = mac_of(key_of_connection(RawPeer::kFarewellKey, peer.last_hello), bye, 1);
      // The transport sends in turns that end at different times.
      RawPeer::discard_bytes(fd, RawPeer::kBody / 4 / kRounds * static_cast<size_t>(round));
      RawPeer::write_all(fd, &bye, sizeof bye);
    }
    const Error error = expect_failure(*peer.transport, request, &out);
    expect(error.what() == std::string("rank 1") + kLeftGroup, error.what());
    peer.transport->close();
  }
}

// A body with the seal kBroken is not a message, although all its bytes have arrived.
void broken_body_is_discarded() {
  RawPeer peer;
  Bytes in(1000);
  const RequestPtr broken = peer.transport->recv(1, kTag, all_of(in));
  const Fd fd = peer.connect();
  RawPeer::write_frame(fd, RawPeer::message(), Bytes(in.size(), 2), Seal::kBroken);
  Frame abort;
  abort.kind = FrameKind::kAbort;
  abort.tag = 1;
  const std::string reason = "rank 1 gave up";
  RawPeer::write_frame(fd, abort, Bytes(reason.begin(), reason.end()), Seal::kWhole);
  expect(expect_failure(*peer.transport, broken, &in).what() == reason, "unexpected error");
  peer.transport->close();
}

// A peer that reads nothing for a long time is not lost as long as its host answers.
void slow_reader_is_not_lost() {
  RawPeer peer;
  Bytes out(RawPeer::kBody);
  const RequestPtr request = peer.transport->send(1, kTag, all_of(out));
  const Fd fd = peer.accept();
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  RawPeer::discard_bytes(fd, sizeof(Frame) + out.size() + sizeof(Seal));
  peer.transport->wait(request, test_deadline(), nullptr);
  peer.transport->close();
}

bool is_closed_by_peer(const Fd& fd) {
  char byte = 0;
  return read(fd.get(), &byte, 1) <= 0;
}

void unauthenticated_peers_are_refused() {
  RawPeer peer;
  expect(is_closed_by_peer(peer.connect(4712, RawPeer::kKey)),
         "a peer with an unknown token is answered");
  expect(is_closed_by_peer(peer.connect(peer.token, {1, 3})), "a peer without the key is answered");
  expect(is_closed_by_peer(peer.connect(peer.token, RawPeer::kKey, 64)),
         "one connection too many accepted");
  expect(is_closed_by_peer(peer.connect(peer.token, RawPeer::kKey, 0, 2)),
         "an unknown rank is answered");
  const Fd authenticated = peer.connect();
  const Fd replaying = peer.connect_without_hello();
  RawPeer::write_all(replaying, &peer.last_hello, sizeof peer.last_hello);
  expect(is_closed_by_peer(replaying), "a replayed hello is answered");
  const Frame nonsense;
  // A part of a header without the rest, on an authenticated connection, has no effect.
  RawPeer::write_all(authenticated, &nonsense, 10);
  peer.transport->close();
}

// Frames with a wrong authentication code are rejected; `repeated`: a frame with the code of an
// earlier one.
void forged_frame_closes_the_connection(bool repeated) {
  RawPeer peer;
  Bytes in(10), body(10, 2);
  const RequestPtr first = peer.transport->recv(1, kUserTag, all_of(in));
  const Fd fd = peer.connect();
  Frame f = RawPeer::message();
  f.tag = kUserTag;
  if (repeated) {
    RawPeer::write_frame(fd, f, body, Seal::kWhole);
    peer.transport->wait(first, test_deadline(), nullptr);
    f.bytes = f.total = body.size();
    f.mac = mac_of(key_of_connection(RawPeer::kKey, peer.last_hello), f, 2);
  }
  f.message = repeated ? 0 : 1;
  Bytes second_buffer(10);
  const RequestPtr second = peer.transport->recv(1, kUserTag, all_of(second_buffer));
  RawPeer::write_all(fd, &f, sizeof f);
  const Error e = expect_failure(*peer.transport, second, &second_buffer);
  expect(std::string(e.what()).find("no rank of this group has signed") != std::string::npos,
         e.what());
  peer.transport->close();
}

// However many connections are opened without a hello, a peer that sends one is served.
void many_silent_connections_block_nobody() {
  RawPeer peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kUserTag, all_of(in));
  std::vector<Fd> silent_connections;
  for (size_t k = 0; k < TcpDevice::kMaxUnauthenticated + 50; ++k)
    silent_connections.push_back(peer.connect_without_hello());
  const Fd fd = peer.connect();
  Frame f = RawPeer::message();
  f.tag = kUserTag;
  RawPeer::write_frame(fd, f, Bytes(in.size(), 2), Seal::kWhole);
  peer.transport->wait(request, test_deadline(), nullptr);
  expect(is_closed_by_peer(silent_connections.front()), "a silent connection stays open");
  peer.transport->close();
}

// A connection without a hello may belong to any peer, but only for a limited time: it does not
// hide that a peer is lost.
void silent_connection_does_not_hide_a_lost_peer() {
  RawPeer peer(std::chrono::seconds(60), std::chrono::milliseconds(500));
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  const Fd silent_connection = peer.connect_without_hello();
  {
    const Fd from_transport = peer.accept();
  }
  expect(expect_failure(*peer.transport, request, &in).fault == Fault::kPeerLost,
         "unexpected error");
  peer.transport->close();
}

// A message of a collective arrives while a message of another collective is awaited. The error is
// detected immediately, whether the receive is posted before the message arrives or after it, and
// whether the collective of the message is an earlier or a later one.
void another_collective_is_detected(bool receive_first, bool later) {
  RawPeer peer;
  peer.transport->listen();
  Bytes in(1000);
  CollectiveFingerprint own_fingerprint, peer_fingerprint;
  own_fingerprint.op = peer_fingerprint.op = OpCode::kAllReduce;
  own_fingerprint.sequence = 7;
  peer_fingerprint.sequence = later ? 8 : 6;
  const uint64_t tag = Transport::kCollectiveTag;
  const auto post_receive = [&] {
    return peer.transport->recv(1, tag | 7, all_of(in), own_fingerprint);
  };
  RequestPtr request = receive_first ? post_receive() : nullptr;
  const Fd fd = peer.connect();
  Frame f = RawPeer::message();
  f.tag = tag | peer_fingerprint.sequence;
  f.fingerprint = peer_fingerprint;
  RawPeer::write_frame(fd, f, Bytes(in.size()), Seal::kWhole);
  if (!receive_first) {
    if (!later) {  // the awaited message follows
      f.tag = tag | own_fingerprint.sequence;
      f.fingerprint = own_fingerprint;
      f.message = 1;
      RawPeer::write_frame(fd, f, Bytes(in.size()), Seal::kWhole);
    }
    Frame query;  // the reply is sent after all frames before it have been handled
    query.kind = FrameKind::kWaitQuery;
    RawPeer::write_header(fd, query);
    expect(RawPeer::read_struct<Frame>(fd).kind == FrameKind::kWaitReply, "no reply");
    request = post_receive();
  }
  const Error e = expect_failure(*peer.transport, request, &in);
  const std::string number = std::to_string(peer_fingerprint.sequence);
  expect(e.what() == "rank 0 called all_reduce #7 while rank 1 called all_reduce #" + number,
         e.what());
  peer.transport->close();
}

// A message with the awaited tag has another fingerprint.
void another_fingerprint_is_detected() {
  RawPeer peer;
  Bytes in(1000);
  CollectiveFingerprint own_fingerprint, peer_fingerprint;
  own_fingerprint.op = peer_fingerprint.op = OpCode::kReduce;
  peer_fingerprint.root = 1;
  const uint64_t tag = Transport::kCollectiveTag | 7;
  const RequestPtr request = peer.transport->recv(1, tag, all_of(in), own_fingerprint);
  const Fd fd = peer.connect();
  Frame f = RawPeer::message();
  f.tag = tag;
  f.fingerprint = peer_fingerprint;
  RawPeer::write_frame(fd, f, Bytes(in.size()), Seal::kWhole);
  expect(expect_failure(*peer.transport, request, &in).fault == Fault::kMismatch,
         "unexpected error");
  peer.transport->close();
}

// Frames that are correctly signed but invalid close the connection, which fails pending receives.
// The frame is sent `times` times.
void invalid_frames_close_the_connection(Frame f, int times) {
  RawPeer peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kUserTag, all_of(in));
  const Fd from_transport = peer.accept(), fd = peer.connect();
  for (; times > 0; --times) RawPeer::write_header(fd, f);
  expect(expect_failure(*peer.transport, request, &in).fault == Fault::kPeerLost,
         "unexpected error");
  peer.transport->close();
}

// A thread that sleeps until a message arrives is woken by it, and not by its timeout.
void sleeping_waiter_is_woken() {
  RawPeer peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  const Fd fd = peer.connect();
  std::atomic<bool> is_woken{false};
  std::thread sleeper([&] {
    while (!request->finished()) request->wait_briefly(std::chrono::seconds(60));
    is_woken = true;
  });
  while (request->state.load() != Request::kAwaited) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  RawPeer::write_frame(fd, RawPeer::message(), Bytes(in.size()), Seal::kWhole);
  for (int i = 0; i < 2000 && !is_woken; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  expect(is_woken, "the waiter is not woken");
  sleeper.join();
  peer.transport->close();
}

// A receive from any source fails when the only peer is lost.
void lost_peer_fails_any_source_receive() {
  RawPeer peer;
  Bytes in(10);
  const RequestPtr request = peer.transport->recv(Transport::kAnySource, kUserTag, all_of(in));
  {
    const Fd from_transport = peer.accept(), to_transport = peer.connect();
  }
  const Error e = expect_failure(*peer.transport, request, &in);
  expect(e.fault == Fault::kPeerLost && e.rank == 1, e.what());
  peer.transport->close();
}

// A wrong size is detected when the header of the message has arrived, without its body.
void wrong_size_is_detected_at_once() {
  RawPeer peer;
  Bytes in(4);
  const RequestPtr request = peer.transport->recv(1, kTag, all_of(in));
  const Fd fd = peer.connect();
  Frame header = RawPeer::message();
  header.bytes = header.total = size_t{1} << 34;
  RawPeer::write_header(fd, header);
  expect(expect_failure(*peer.transport, request, &in).fault == Fault::kMismatch,
         "unexpected error");
  peer.transport->close();
}

// A rank that receives no message stalls its sender once it has buffered max_buffered_bytes.
void buffered_bytes_of_a_peer_are_limited() {
  RawPeer peer;
  peer.transport->listen();
  const Fd fd = peer.connect();
  constexpr unsigned kCount = 64;
  std::atomic<unsigned> written{0};
  std::thread writer([&] {
    for (; written < kCount; ++written) {
      Frame f = RawPeer::message();
      f.message = written;
      RawPeer::write_frame(fd, f, pattern(100000, written), Seal::kWhole);
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  expect(written < kCount, "everything is buffered");
  for (unsigned k = 0; k < kCount; ++k) {
    Bytes in(100000);
    peer.transport->wait(peer.transport->recv(1, kTag, all_of(in)), test_deadline(), nullptr);
    expect(in == pattern(in.size(), k), "unexpected data");
  }
  writer.join();
  peer.transport->close();
}

}  // namespace

int main() {
  for (int k = 0; k < 50; ++k) RUN_CASE(abort_right_after_connecting());
  RUN_CASE(abort_before_the_peer_connects());
  for (const FrameKind kind : {FrameKind::kBye, FrameKind::kMessage, FrameKind::kWaitQuery})
    RUN_CASE(farewell_key_signs_farewells_only(kind));
  for (const bool aborted : {false, true}) RUN_CASE(unknown_peers_get_a_farewell(aborted));
  RUN_CASE(every_callback_of_a_request_runs());
  RUN_CASE(abort_while_sending());
  RUN_CASE(abort_while_receiving());
  RUN_CASE(broken_body_is_discarded());
  RUN_CASE(peer_ends_during_transfers(false));
  RUN_CASE(peer_ends_during_transfers(true));
  RUN_CASE(farewell_during_a_transfer_is_read());
  RUN_CASE(slow_reader_is_not_lost());
  RUN_CASE(unauthenticated_peers_are_refused());
  for (const bool repeated : {false, true}) RUN_CASE(forged_frame_closes_the_connection(repeated));
  RUN_CASE(many_silent_connections_block_nobody());
  RUN_CASE(silent_connection_does_not_hide_a_lost_peer());
  for (const bool receive_first : {true, false}) {
    for (const bool later : {true, false})
      RUN_CASE(another_collective_is_detected(receive_first, later));
  }
  RUN_CASE(another_fingerprint_is_detected());
  // A message that is announced twice, and one that is larger than any message may be.
  Frame announced, endless = RawPeer::message();
  announced.kind = FrameKind::kAnnounce;
  announced.tag = kTag;
  announced.total = 300000;
  endless.bytes = endless.total = (uint64_t{1} << 40) + 1;
  RUN_CASE(invalid_frames_close_the_connection(announced, 2));
  RUN_CASE(invalid_frames_close_the_connection(endless, 1));
  RUN_CASE(sleeping_waiter_is_woken());
  RUN_CASE(lost_peer_fails_any_source_receive());
  RUN_CASE(wrong_size_is_detected_at_once());
  RUN_CASE(buffered_bytes_of_a_peer_are_limited());
  std::puts("ok");
  return 0;
}
