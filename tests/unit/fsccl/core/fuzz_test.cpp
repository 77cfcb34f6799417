// Fuzz test of the transport and of the parsers of store values. Built with sanitizers by
// test_fsccl_core.py. Usage:
//   fuzz_test <first seed> <seeds>
// For every seed, a peer sends a valid or nearly valid hello, and then random data: frames of every
// kind with valid and invalid numbers, correctly signed or not, bodies, arbitrary bytes, the end of
// its connection. All requests must have finished once the transport has been closed. Mutated store
// values must be parsed or refused with an Error.
#include <random>

#include "rendezvous.h"
#include "transports.h"

namespace {

using Random = std::mt19937_64;

template <class T>
T choose(Random& random, std::initializer_list<T> list) {
  return *(list.begin() + random() % list.size());
}

// Returns a random number near the limits of the protocol.
uint64_t random_number_of_interest(Random& random) {
  const uint64_t small = random() % 9;
  return choose<uint64_t>(
      random, {0, 1, small, 64, 4095, 65536, (256 << 10) + small, 1 << 20, (uint64_t{1} << 40) + 1,
               uint64_t{1} << 63, ~uint64_t{0} - small, random()});
}

Frame random_frame(Random& random) {
  Frame f;
  f.kind = static_cast<FrameKind>(random() % 12);
  f.flags = random() % 4 == 0 ? static_cast<uint32_t>(random()) : random() % 2;
  f.tag = choose<uint64_t>(random,
                           {kTag, kTag + 1, kUserTag, kUserTag, random_number_of_interest(random)});
  f.message = random() % 6;
  f.bytes = random() % 3 == 0 ? random_number_of_interest(random) : random() % 70000;
  f.total = random() % 3 == 0 ? random_number_of_interest(random) : f.bytes;
  f.offset = random() % 2 == 0 ? 0 : random_number_of_interest(random);
  if (random() % 2 == 0) {
    f.fingerprint.op = static_cast<OpCode>(random() % 300);
    f.fingerprint.dtype = static_cast<DType>(random() % 300);
    f.fingerprint.red_op = static_cast<RedOp>(random() % 300);
    f.fingerprint.sequence = random_number_of_interest(random);
    f.fingerprint.bytes = random_number_of_interest(random);
  }
  if (random() % 12 == 0) f.magic = static_cast<uint32_t>(random());
  return f;
}

// Returns false if the transport has closed the connection, which it may do.
bool send_bytes(const Fd& fd, const void* data, size_t n) {
  return n == 0 || send(fd.get(), data, n, MSG_NOSIGNAL) == static_cast<ssize_t>(n);
}

bool send_random_frame(const Fd& fd, Random& random, RawPeer& peer) {
  Bytes body(random() % 5 == 0 ? 100000 : random() % 500);
  for (unsigned char& b : body) b = static_cast<unsigned char>(random());
  Frame f = random_frame(random);
  if (random() % 10 == 0) return send_bytes(fd, body.data(), body.size());
  if (random() % 3 != 0) f.bytes = body.size();
  if (random() % 2 == 0) f.total = f.bytes;
  if (random() % 10 != 0) f.mac = peer.sign(fd, f);
  const Seal seal = random() % 8 == 0 ? Seal::kBroken : Seal::kWhole;
  if (!send_bytes(fd, &f, random() % 40 == 0 ? random() % sizeof f : sizeof f)) return false;
  return f.bytes == 0 ||
         (send_bytes(fd, body.data(), body.size()) && send_bytes(fd, &seal, sizeof seal));
}

// Sends striped messages that are nearly valid: announced twice, or with stripes beyond the end of
// the message.
bool send_stripes(const Fd& fd, Random& random, RawPeer& peer) {
  const uint64_t number = random() % 4;
  const uint64_t total = choose<uint64_t>(random, {1, 64, 4096, 4096, 300000});
  Frame f;
  f.kind = FrameKind::kAnnounce;
  f.tag = choose<uint64_t>(random, {kTag, kUserTag, kUserTag, kUserTag + 1});
  f.message = number;
  f.total = total;
  f.flags = random() % 4 == 0 ? kNeedsClearToSend : 0;
  for (uint64_t announcements = random() % 4 == 0 ? 2 : 1; announcements > 0; --announcements) {
    f.mac = peer.sign(fd, f);
    if (!send_bytes(fd, &f, sizeof f)) return false;
  }
  for (uint64_t stripes = random() % 4; stripes > 0; --stripes) {
    Frame stripe;
    stripe.kind = FrameKind::kStripe;
    stripe.message = random() % 6 == 0 ? random() % 4 : number;
    stripe.bytes = choose<uint64_t>(random, {1, total / 2, total, total, total + 16});
    stripe.total = total;
    stripe.offset = choose<uint64_t>(random, {0, 0, total / 2, total, total - stripe.bytes,
                                              total + 8, ~uint64_t{0} - total + 1});
    const Bytes body(stripe.bytes, 7);
    const Seal seal = Seal::kWhole;
    stripe.mac = peer.sign(fd, stripe);
    const bool sent =
        send_bytes(fd, &stripe, sizeof stripe) && send_bytes(fd, body.data(), body.size());
    if (!sent || (stripe.bytes > 0 && !send_bytes(fd, &seal, sizeof seal))) return false;
  }
  return true;
}

// Lets a peer send random frames while requests are in progress.
void run_random_peer(Random& random) {
  RawPeer peer(std::chrono::seconds(20));
  Bytes in(4096), later(64), more(64), out = pattern(random() % 2 == 0 ? 300 : 90000, 1);
  std::vector<RequestPtr> requests{peer.transport->recv(1, kTag, all_of(in)),
                                   peer.transport->recv(1, kUserTag, all_of(later)),
                                   peer.transport->send(1, kUserTag, all_of(out))};
  std::vector<Fd> connections;
  for (uint64_t i = 0; i <= random() % 3; ++i) {
    const bool has_invalid_index = random() % 6 == 0;
    const uint64_t index = has_invalid_index ? random_number_of_interest(random) : i;
    connections.push_back(peer.connect(peer.token, RawPeer::kKey, index));
    const timeval timeout{0, 20000};  // the transport stops reading once it has buffered enough
    setsockopt(connections.back().get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
  }
  for (size_t frames = random() % 12; frames > 0; --frames) {
    const Fd& connection = connections[random() % connections.size()];
    if (!(random() % 2 == 0 ? send_stripes : send_random_frame)(connection, random, peer)) break;
    if (random() % 4 == 0) requests.push_back(peer.transport->recv(1, kUserTag, all_of(more)));
  }
  const uint64_t end = random() % 3;
  if (end == 0) connections.clear();
  if (end == 1) peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  peer.transport->close();
  for (const RequestPtr& request : requests)
    expect(request->finished(), "a request never finishes");
}

// Any value from the store must be parsed, or refused with an Error.
template <class F>
void expect_error_or_success(F&& read) {
  try {
    read();
  } catch (const Error&) {
  }
}

std::string mutated(std::string text, Random& random) {
  for (uint64_t n = random() % 4 + 1; n > 0 && !text.empty(); --n) {
    const size_t at = random() % text.size();
    const size_t length = random() % 9;
    switch (random() % 5) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, std::to_string(random_number_of_interest(random)));
        break;
      case 3:
        text.insert(at, text.substr(random() % text.size(), length));
        break;
      default:
        text.insert(at, length, choose(random, {'\n', '=', '+', '.', ' ', '/', '\0'}));
    }
  }
  return text;
}

void read_mutated_store_values(Random& random) {
  Settings settings;
  settings.tcp.interface = "lo";
  Identity identity = Identity::of_this_process(settings);
  identity.key = random_key();
  identity.address = "17 unix:somewhere 127.0.0.1:1";
  const std::string text = identity.encode();
  expect_error_or_success([&] { Identity::decode(mutated(text, random)); });
  const std::string table = encode_peer_table({text, text, text});
  expect_error_or_success([&] {
    for (const std::string& identity : decode_peer_table(mutated(table, random), 3))
      Identity::decode(identity);
  });
  expect_error_or_success([&] {
    Segment::open(mutated("/proc/" + std::to_string(getpid()) + "/fd/9", random), 4096, "");
  });
  expect_error_or_success([&] { connect_to(mutated("127.0.0.1:1", random), settings.tcp); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int first = std::atoi(argv[1]), seeds = std::atoi(argv[2]);
  for (int seed = first; seed < first + seeds; ++seed) {
    if (std::getenv("VERBOSE") != nullptr) std::fprintf(stderr, "seed %d\n", seed);
    Random random(static_cast<uint64_t>(seed));
    run_random_peer(random);
    for (int i = 0; i < 20; ++i) read_mutated_store_values(random);
  }
  std::puts("ok");
  return 0;
}
