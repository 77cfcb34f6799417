// The core's small parts: conversions over all their values, cuts, pieces, reductions.
#include <sys/mman.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "half.h"
#include "buffer_list.h"
#include "reduce.h"
#include "rendezvous.h"
#include "schedule.h"
#include "segment.h"
#include "settings.h"
#include "text.h"
#include "topology.h"

using namespace fsccl;

#define EXPECT(condition)                                                      \
  if (!(condition)) {                                                          \
    std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
    std::exit(1);                                                              \
  }

namespace {

// The float16 of a float by arithmetic: the nearest of all 63488 finite ones, ties to even.
uint16_t nearest_f16(float f) {
  if (std::isnan(f)) return 0x7E00;
  const double a = std::fabs(static_cast<double>(f));
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  if (a >= 65520.0) return sign | 0x7C00;
  const int exponent = a == 0 ? -14 : std::max(-14, std::ilogb(a));
  const double step = std::ldexp(1.0, exponent - 10);
  const auto units = static_cast<uint32_t>(std::nearbyint(a / step));  // ties to even
  return static_cast<uint16_t>(sign | (units + (static_cast<uint32_t>(exponent + 14) << 10)));
}

void conversions() {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<uint16_t>(h);
    const float wide = f16_to_float(half);
    const bool nan = (h & 0x7FFF) > 0x7C00;
    EXPECT(nan ? std::isnan(wide) : float_to_f16(wide) == half);
    const float b = bf16_to_float(half);
    EXPECT((h & 0x7FFF) > 0x7F80 ? std::isnan(bf16_to_float(float_to_bf16(b)))
                                 : float_to_bf16(b) == half);
  }
  uint32_t bits = 12345;
  for (int i = 0; i < 2000000; ++i) {
    bits = bits * 1664525u + 1013904223u;
    const float f = bits_to_float(bits);
    if (std::isnan(f)) continue;
    EXPECT(float_to_f16(f) == nearest_f16(f));
  }
  // Ties go to even; the largest float rounds to infinity.
  EXPECT(float_to_bf16(bits_to_float(0x3F808000)) == 0x3F80);
  EXPECT(float_to_bf16(bits_to_float(0x3F818000)) == 0x3F82);
  EXPECT(float_to_bf16(std::numeric_limits<float>::max()) == 0x7F80);
  float wide[20], back[20];
  uint16_t half[20];
  for (int i = 0; i < 20; ++i) wide[i] = static_cast<float>(i) * 0.37f - 3;
  f16_store(half, wide, 20);
  f16_load(back, half, 20);
  for (int i = 0; i < 20; ++i) EXPECT(back[i] == f16_to_float(float_to_f16(wide[i])));
}

void cuts() {
  const size_t sizes[] = {0, 1, 7, 4096, 100001, (size_t{1} << 33) + 5};
  for (const size_t n : sizes) {
    for (size_t parts = 1; parts <= 9; ++parts) {
      for (const size_t grain : {size_t{1}, size_t{64}, size_t{8192}}) {
        size_t at = 0, largest = 0, smallest = n;
        for (size_t i = 0; i < parts; ++i) {
          const Interval c = cut(n, parts, i, grain);
          EXPECT(c.lo == at && c.hi >= c.lo && (c.hi == n || c.hi % grain == 0));
          at = c.hi;
          largest = std::max(largest, c.size());
          smallest = std::min(smallest, c.size());
        }
        EXPECT(at == n && largest - smallest <= grain + grain - 1);
      }
    }
  }
}

void pieces() {
  char memory[100], copy[100];
  std::iota(memory, memory + 100, static_cast<char>(0));
  BufferList p;
  p.add(buffer_of(memory + 50, 10));
  p.add(buffer_of(memory + 60, 5));  // a neighbour
  p.add(buffer_of(memory, 0));
  p.add(buffer_of(memory + 10, 20));
  EXPECT(p.bytes() == 35 && p.list().size() == 2);
  p.copy_to(copy, {3, 30});
  for (int i = 0; i < 27; ++i) EXPECT(copy[i] == (i < 12 ? 53 + i : 10 + i - 12));
  EXPECT(p.contiguous({0, 15}) == reinterpret_cast<std::byte*>(memory + 50));
  EXPECT(p.contiguous({14, 16}) == nullptr);
  EXPECT(p.slice({14, 16}).list().size() == 2);
  EXPECT(p.contiguous({5, 5}) == nullptr && BufferList().slice({0, 0}).bytes() == 0);
}

// Beyond 4 GiB, in addresses that are reserved and never touched.
void large_pieces() {
  const size_t gib = size_t{1} << 30, room = 6 * gib;
  void* at = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  EXPECT(at != MAP_FAILED);
  auto* base = static_cast<std::byte*>(at);
  BufferList p;
  p.add({base, 5 * gib});
  p.add({base + 5 * gib + 64, 1000});
  EXPECT(p.bytes() == 5 * gib + 1000 && p.list().size() == 2);
  EXPECT(p.contiguous({4 * gib + 1, 4 * gib + 9}) == base + 4 * gib + 1);
  EXPECT(p.contiguous({5 * gib + 7, 5 * gib + 9}) == base + 5 * gib + 64 + 7);
  size_t seen = 0;
  p.visit({1, p.bytes()}, [&](std::byte* where, size_t n, size_t off) {
    EXPECT(off == seen && where == (off == 0 ? base + 1 : base + 5 * gib + 64));
    seen += n;
  });
  EXPECT(seen == 5 * gib + 999);
  munmap(at, room);
}

// Pages come when they are reserved, and no others: what places them.
void segments() {
  const size_t page = Segment::whole_pages(1), bytes = 64 * page;
  Segment made = Segment::create(bytes, 3 * page, "");
  Segment seen = Segment::open(made.address(), bytes, "");
  const auto reserved = [&] {
    struct stat s{};
    EXPECT(stat(made.address().c_str(), &s) == 0 && static_cast<size_t>(s.st_size) == bytes);
    return static_cast<size_t>(s.st_blocks) * 512 / page;
  };
  EXPECT(reserved() == 3);
  seen.reserve(10 * page, 15 * page);
  made.reserve(12 * page, 16 * page);
  EXPECT(reserved() == 9);
  std::memset(seen.data() + 10 * page, 7, 6 * page);
  EXPECT(reserved() == 9 && made.data()[16 * page - 1] == std::byte{7});
}

void reductions() {
  const int8_t a[] = {100, -100, 3}, b[] = {100, -100, 4};
  const void* both[] = {a, b};
  int8_t out[3];
  reduce({DType::kI8, RedOp::kSum, 1, 2}, out, both, 2, 3);
  EXPECT(out[0] == static_cast<int8_t>(200) && out[1] == static_cast<int8_t>(-200) && out[2] == 7);
  reduce({DType::kI8, RedOp::kAvg, 1, 200}, out, both, 2, 3);  // a divisor that int8 cannot hold
  EXPECT(out[0] == 0 && out[2] == 0);
  const float x[] = {1, NAN, 2}, y[] = {NAN, 1, 3};
  const void* floats[] = {x, y};
  float least[3];
  reduce({DType::kF32, RedOp::kMin, 1, 2}, least, floats, 2, 3);
  EXPECT(std::isnan(least[0]) && std::isnan(least[1]) && least[2] == 2);
  const uint8_t t[] = {2, 0, 1}, u[] = {0, 0, 4};  // booleans with odd bytes
  const void* flags[] = {t, u};
  uint8_t any[3];
  reduce({DType::kBool, RedOp::kSum, 1, 2}, any, flags, 2, 3);
  EXPECT(any[0] == 1 && any[1] == 0 && any[2] == 1);
  // 16-bit sums are rounded once: 256 + 1 - 256 is 1, and would be 0 with bfloat16 in between.
  const uint16_t p = float_to_bf16(256), q = float_to_bf16(1), r = float_to_bf16(-256);
  const void* three[] = {&p, &q, &r};
  uint16_t sum;
  reduce({DType::kBF16, RedOp::kSum, 1, 3}, &sum, three, 3, 1);
  EXPECT(sum == float_to_bf16(1));
  try {
    check_reduction({DType::kF64, RedOp::kBxor, 1, 1});
    EXPECT(false);
  } catch (const Error& e) {
    EXPECT(e.fault == Fault::kUsage);
  }
}

// Plays a schedule on all ranks of one ring, whose sends arrive in order. A value is the set of
// ranks whose inputs it contains.
class Play {
 public:
  Play(PipelineKind kind, size_t n, size_t stride, size_t windows)
      : n_(n), at_(n), taken_(n), posted_(n), kept_(n, Blocks(n, Set(windows))) {
    for (size_t p = 0; p < n; ++p) ranks_.emplace_back(kind, n, p, stride, windows);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t p = 0; p < n; ++p) moved |= step(p);
    }
    for (size_t p = 0; p < n; ++p) {
      EXPECT(at_[p] == ranks_[p].steps() && posted_[p].size() == taken_[ranks_[p].next()]);
    }
  }
  const std::vector<unsigned>& kept(size_t rank, size_t block) const { return kept_[rank][block]; }

 private:
  using Set = std::vector<unsigned>;
  using Blocks = std::vector<Set>;

  bool step(size_t p) {
    if (at_[p] == ranks_[p].steps()) return false;
    const PipelineStep s = ranks_[p].at(at_[p]);
    const size_t before = ranks_[p].previous(), after = ranks_[p].next();
    if (s.receives && posted_[before].size() == taken_[p]) return false;
    if (s.sends && posted_[p].size() - taken_[after] == 2) return false;  // the depth of channels
    const unsigned own = 1u << p;
    unsigned value = s.receives ? posted_[before][taken_[p]++] : own;
    EXPECT(s.receives || s.reduces || s.block == p);
    if (s.receives && s.reduces) {
      EXPECT((value & own) == 0);  // nothing is added twice
      value |= own;
    }
    if (s.keeps) kept_[p][s.block][s.window] = value;
    if (s.sends) posted_[p].push_back(value);
    ++at_[p];
    return true;
  }

  size_t n_;
  std::vector<Schedule> ranks_;
  std::vector<size_t> at_, taken_;
  std::vector<Set> posted_;
  std::vector<Blocks> kept_;
};

void schedules() {
  for (size_t n = 2; n <= 9; ++n) {
    const unsigned everyone = (1u << n) - 1;
    for (const size_t stride : ring_strides(n, 2 * n, false)) {
      const Play gather(PipelineKind::kAllGather, n, stride, 3);
      const Play scatter(PipelineKind::kReduceScatter, n, stride, 3);
      const Play reduce(PipelineKind::kAllReduce, n, stride, 3);
      for (size_t p = 0; p < n; ++p) {
        for (size_t b = 0; b < n; ++b) {
          EXPECT(gather.kept(p, b) == std::vector<unsigned>(3, b == p ? 0 : 1u << b));
          EXPECT(scatter.kept(p, b) == std::vector<unsigned>(3, b == p ? everyone : 0));
          EXPECT(reduce.kept(p, b) == std::vector<unsigned>(3, everyone));
        }
      }
    }
  }
  EXPECT((ring_strides(8, 6, false) == std::vector<size_t>{1, 7, 3, 5, 1, 7}));
  EXPECT((ring_strides(8, 3, true) == std::vector<size_t>{1, 7, 1}));
  EXPECT((ring_strides(2, 3, false) == std::vector<size_t>{1, 1, 1}));
  // The sends of all rings cover a block, once, beyond 4 GiB too.
  for (const size_t bytes : {size_t{0}, size_t{4}, size_t{1000}, (size_t{5} << 30) + 4}) {
    const size_t send = bytes > 5000 ? size_t{96} << 20 : 128, k = 3;
    const size_t windows = windows_for(bytes, k, send, kCacheLine);
    size_t at = 0;
    for (size_t c = 0; c < k; ++c) {
      for (size_t w = 0; w < windows; ++w) {
        const Interval i = piece_of(bytes, k, c, w, send, kCacheLine);
        EXPECT(i.empty() || (i.lo == at && i.size() <= send));
        at += i.size();
      }
    }
    EXPECT(at == bytes);
  }
}

// Against the vectors of its authors, of which the messages are 0, 1, 2, ... of every length.
void macs() {
  constexpr Key kTheirs{0x0706050403020100, 0x0f0e0d0c0b0a0908};
  unsigned char message[64];
  std::iota(std::begin(message), std::end(message), static_cast<unsigned char>(0));
  EXPECT(mac_of(kTheirs, message, 0) == 0x726fdb47dd0e0e31);
  EXPECT(mac_of(kTheirs, message, 1) == 0x74f839c593dc67fd);
  EXPECT(mac_of(kTheirs, message, 8) == 0x93f5f5799a932462);
  EXPECT(mac_of(kTheirs, message, 15) == 0xa129ca6149be45e5);
  const Key key = random_key();
  Key back;
  EXPECT(read_key(text_of(key), &back) && back.lo == key.lo && back.hi == key.hi);
  for (const char* wrong : {"", "0123", "0123456789abcdef0123456789abcdeg",
                            "-123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcdef0"}) {
    EXPECT(!read_key(wrong, &back));
  }
}

// Whatever ranks say of themselves comes back, as if it had been said by each alone.
void rolls() {
  const Identity me = Identity::of_this_process(Settings());
  std::vector<std::string> all{me.encode(), me.encode(), "99\nwho knows\n", "99\n", me.encode()};
  all.insert(all.end(), {"=\n+\n.\n", "\n\n=\n", "\n=\n+\n", ""});
  for (size_t n = 0; n <= all.size(); ++n) {
    const std::vector<std::string> some(all.begin(), all.begin() + static_cast<long>(n));
    const std::string roll = encode_roll(some);
    EXPECT(decode_roll(roll, n) == some);
    for (size_t cut = 0; cut < roll.size(); ++cut) {
      bool refused = false;
      try {
        decode_roll(roll.substr(0, cut), n);
      } catch (const Error& e) {
        refused = e.fault == Fault::kMismatch;
      }
      EXPECT(refused || cut + 1 == roll.size());  // the last newline may be missing
    }
  }
  EXPECT(encode_roll({all[0], all[0]}).size() < all[0].size() + 64);
}

}  // namespace

int main() {
  schedules();
  rolls();
  macs();
  conversions();
  cuts();
  pieces();
  large_pieces();
  segments();
  reductions();
  return 0;
}
