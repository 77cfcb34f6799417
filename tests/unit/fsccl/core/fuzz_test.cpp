// What a transport and the readers of the store's values do with what they do not expect. Built
// with sanitizers by test_fsccl_core.py. Usage:
//   fuzz_test <first seed> <seeds>
// Every round is one peer that says hello as it should, or nearly, and then anything: frames of
// every kind with sensible and absurd numbers, well signed or not, bodies, garbage, its end. All
// requests must have finished once the transport has been closed. And values of the store, mutated.
#include <random>

#include "rendezvous.h"
#include "transports.h"

namespace {

using Random = std::mt19937_64;

template <class T>
T one_of(Random& random, std::initializer_list<T> list) {
  return *(list.begin() + random() % list.size());
}

uint64_t some_number(Random& random) {
  const uint64_t small = random() % 9;
  return one_of<uint64_t>(random, {0, 1, small, 64, 4095, 65536, (256 << 10) + small, 1 << 20,
                                   (uint64_t{1} << 40) + 1, uint64_t{1} << 63, ~uint64_t{0} - small, random()});
}

Frame some_frame(Random& random) {
  Frame f;
  f.kind = static_cast<FrameKind>(random() % 12);
  f.flags = random() % 4 == 0 ? static_cast<uint32_t>(random()) : random() % 2;
  f.tag = one_of<uint64_t>(random, {kTag, kTag + 1, kUserTag, kUserTag, some_number(random)});
  f.message = random() % 6;
  f.bytes = random() % 3 == 0 ? some_number(random) : random() % 70000;
  f.total = random() % 3 == 0 ? some_number(random) : f.bytes;
  f.offset = random() % 2 == 0 ? 0 : some_number(random);
  if (random() % 2 == 0) {
    f.card.op = static_cast<OpCode>(random() % 300);
    f.card.dtype = static_cast<DType>(random() % 300);
    f.card.red = static_cast<RedOp>(random() % 300);
    f.card.sequence = some_number(random);
    f.card.bytes = some_number(random);
  }
  if (random() % 12 == 0) f.magic = static_cast<uint32_t>(random());
  return f;
}

// False: the transport has hung up, as it may.
bool say(const Fd& fd, const void* data, size_t n) {
  return n == 0 || send(fd.get(), data, n, MSG_NOSIGNAL) == static_cast<ssize_t>(n);
}

bool say_something(const Fd& fd, Random& random, Stranger& peer) {
  Bytes body(random() % 5 == 0 ? 100000 : random() % 500);
  for (unsigned char& b : body) b = static_cast<unsigned char>(random());
  Frame f = some_frame(random);
  if (random() % 10 == 0) return say(fd, body.data(), body.size());
  if (random() % 3 != 0) f.bytes = body.size();
  if (random() % 2 == 0) f.total = f.bytes;
  if (random() % 10 != 0) f.mac = peer.sign(fd, f);
  const Seal seal = random() % 8 == 0 ? Seal::kBroken : Seal::kWhole;
  if (!say(fd, &f, random() % 40 == 0 ? random() % sizeof f : sizeof f)) return false;
  return f.bytes == 0 || (say(fd, body.data(), body.size()) && say(fd, &seal, sizeof seal));
}

// Somebody waits, and something is on its way, while it talks.
void listen_to(Random& random) {
  Stranger peer(std::chrono::seconds(20));
  Bytes in(4096), later(100), out = pattern(random() % 2 == 0 ? 300 : 90000, 1);
  std::vector<RequestPtr> all{peer.transport->recv(1, kTag, all_of(in)),
                              peer.transport->recv(1, kUserTag, all_of(later)),
                              peer.transport->send(1, kUserTag, all_of(out))};
  std::vector<Fd> ways;
  for (uint64_t i = 0; i <= random() % 3; ++i) {
    const bool odd = random() % 6 == 0;
    const uint64_t index = odd ? some_number(random) : i;
    ways.push_back(peer.connect(peer.token, Stranger::kKey, index));
  }
  for (size_t frames = random() % 12; frames > 0; --frames) {
    if (!say_something(ways[random() % ways.size()], random, peer)) break;
  }
  const uint64_t end = random() % 3;
  if (end == 0) ways.clear();
  if (end == 1) peer.transport->abort(Error(Fault::kAborted, 0, "enough"));
  peer.transport->close();
  for (const RequestPtr& request : all) expect(request->finished(), "a request goes on for ever");
}

// Whatever the store says is read, or refused with words of ours.
template <class F>
void read_anyhow(F&& read) {
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
        text.insert(at, std::to_string(some_number(random)));
        break;
      case 3:
        text.insert(at, text.substr(random() % text.size(), length));
        break;
      default:
        text.insert(at, length, one_of(random, {'\n', '=', '+', '.', ' ', '/', '\0'}));
    }
  }
  return text;
}

void read_the_store(Random& random) {
  Settings settings;
  settings.tcp.interface = "lo";
  Identity me = Identity::of_this_process(settings);
  me.key = random_key();
  me.address = "17 unix:somewhere 127.0.0.1:1";
  const std::string text = me.encode();
  read_anyhow([&] { Identity::decode(mutated(text, random)); });
  const std::string roll = encode_roll({text, text, text});
  read_anyhow([&] {
    for (const std::string& one : decode_roll(mutated(roll, random), 3)) Identity::decode(one);
  });
  read_anyhow([&] {
    Segment::open(mutated("/proc/" + std::to_string(getpid()) + "/fd/9", random), 4096, "");
  });
  read_anyhow([&] { connect_to(mutated("127.0.0.1:1", random), settings.tcp); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int first = std::atoi(argv[1]), seeds = std::atoi(argv[2]);
  for (int seed = first; seed < first + seeds; ++seed) {
    if (std::getenv("VERBOSE") != nullptr) std::fprintf(stderr, "seed %d\n", seed);
    Random random(static_cast<uint64_t>(seed));
    listen_to(random);
    for (int i = 0; i < 20; ++i) read_the_store(random);
  }
  std::puts("ok");
  return 0;
}
