// Unit tests of small parts of the core: conversions of all values, divisions, buffer lists,
// reductions, schedules, segments, peer tables.
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

// Returns the float16 that is nearest to a float, ties to even, calculated from its exponent.
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

void test_conversions() {
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
  // bfloat16: ties go to even; the largest float rounds to infinity.
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

void test_cuts() {
  const size_t sizes[] = {0, 1, 7, 4096, 100001, (size_t{1} << 33) + 5};
  for (const size_t n : sizes) {
    for (size_t parts = 1; parts <= 9; ++parts) {
      for (const size_t grain : {size_t{1}, size_t{64}, size_t{8192}}) {
        size_t position = 0, largest = 0, smallest = n;
        for (size_t i = 0; i < parts; ++i) {
          const Interval c = cut(n, parts, i, grain);
          EXPECT(c.lo == position && c.hi >= c.lo && (c.hi == n || c.hi % grain == 0));
          position = c.hi;
          largest = std::max(largest, c.size());
          smallest = std::min(smallest, c.size());
        }
        EXPECT(position == n && largest - smallest <= grain + grain - 1);
      }
    }
  }
}

void test_buffer_lists() {
  char memory[100], copy[100];
  std::iota(memory, memory + 100, static_cast<char>(0));
  BufferList p;
  p.add(buffer_of(memory + 50, 10));
  p.add(buffer_of(memory + 60, 5));  // adjacent to the previous one
  p.add(buffer_of(memory, 0));
  p.add(buffer_of(memory + 10, 20));
  EXPECT(p.bytes() == 35 && p.buffers().size() == 2);
  p.copy_to(copy, {3, 30});
  for (int i = 0; i < 27; ++i) EXPECT(copy[i] == (i < 12 ? 53 + i : 10 + i - 12));
  EXPECT(p.contiguous({0, 15}) == reinterpret_cast<std::byte*>(memory + 50));
  EXPECT(p.contiguous({14, 16}) == nullptr);
  EXPECT(p.slice({14, 16}).buffers().size() == 2);
  EXPECT(p.contiguous({5, 5}) == nullptr && BufferList().slice({0, 0}).bytes() == 0);
}

// Buffer lists of more than 4 GiB, in address space that is reserved but not accessed.
void test_large_buffer_lists() {
  const size_t gib = size_t{1} << 30, reserved_bytes = 6 * gib;
  void* base_address =
      mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  EXPECT(base_address != MAP_FAILED);
  auto* base = static_cast<std::byte*>(base_address);
  BufferList p;
  p.add({base, 5 * gib});
  p.add({base + 5 * gib + 64, 1000});
  EXPECT(p.bytes() == 5 * gib + 1000 && p.buffers().size() == 2);
  EXPECT(p.contiguous({4 * gib + 1, 4 * gib + 9}) == base + 4 * gib + 1);
  EXPECT(p.contiguous({5 * gib + 7, 5 * gib + 9}) == base + 5 * gib + 64 + 7);
  size_t visited = 0;
  p.visit({1, p.bytes()}, [&](std::byte* where, size_t n, size_t off) {
    EXPECT(off == visited && where == (off == 0 ? base + 1 : base + 5 * gib + 64));
    visited += n;
  });
  EXPECT(visited == 5 * gib + 999);
  munmap(base_address, reserved_bytes);
}

// Exactly the reserved pages are allocated, so that the rank that reserves them determines their
// NUMA node.
void test_segments() {
  const size_t page = Segment::round_to_pages(1), bytes = 64 * page;
  Segment segment = Segment::create(bytes, 3 * page, "");
  Segment mapping = Segment::open(segment.address(), bytes, "");
  const auto reserved_pages = [&] {
    struct stat s{};
    EXPECT(stat(segment.address().c_str(), &s) == 0 && static_cast<size_t>(s.st_size) == bytes);
    return static_cast<size_t>(s.st_blocks) * 512 / page;
  };
  EXPECT(reserved_pages() == 3);
  mapping.reserve(10 * page, 15 * page);
  segment.reserve(12 * page, 16 * page);
  EXPECT(reserved_pages() == 9);
  std::memset(mapping.data() + 10 * page, 7, 6 * page);
  EXPECT(reserved_pages() == 9 && segment.data()[16 * page - 1] == std::byte{7});
}

void test_reductions() {
  const int8_t a[] = {100, -100, 3}, b[] = {100, -100, 4};
  const void* both[] = {a, b};
  int8_t out[3];
  reduce({DType::kI8, RedOp::kSum, 1, 2}, out, both, 2, 3);
  EXPECT(out[0] == static_cast<int8_t>(200) && out[1] == static_cast<int8_t>(-200) && out[2] == 7);
  reduce({DType::kI8, RedOp::kAvg, 1, 200}, out, both, 2, 3);  // a divisor that int8 cannot hold
  EXPECT(out[0] == 0 && out[2] == 0);
  const float x[] = {1, NAN, 2}, y[] = {NAN, 1, 3};
  const void* floats[] = {x, y};
  float minimum[3];
  reduce({DType::kF32, RedOp::kMin, 1, 2}, minimum, floats, 2, 3);
  EXPECT(std::isnan(minimum[0]) && std::isnan(minimum[1]) && minimum[2] == 2);
  const uint8_t t[] = {2, 0, 1}, u[] = {0, 0, 4};  // booleans with bytes other than 0 and 1
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

// Simulates a schedule on all ranks of one ring, whose sends arrive in order. A value is the set of
// ranks whose inputs it contains, one bit each.
class ScheduleSimulation {
 public:
  ScheduleSimulation(PipelineKind kind, size_t n, size_t stride, size_t windows)
      : n_(n), step_(n), received_(n), sent_(n), stored_(n, Blocks(n, Set(windows))) {
    for (size_t p = 0; p < n; ++p) ranks_.emplace_back(kind, n, p, stride, windows);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t p = 0; p < n; ++p) moved |= step(p);
    }
    for (size_t p = 0; p < n; ++p) {
      EXPECT(step_[p] == ranks_[p].step_count() && sent_[p].size() == received_[ranks_[p].next()]);
    }
  }
  const std::vector<unsigned>& stored(size_t rank, size_t block) const {
    return stored_[rank][block];
  }

 private:
  using Set = std::vector<unsigned>;
  using Blocks = std::vector<Set>;

  bool step(size_t p) {
    if (step_[p] == ranks_[p].step_count()) return false;
    const PipelineStep s = ranks_[p].step(step_[p]);
    const size_t previous = ranks_[p].previous(), next = ranks_[p].next();
    if (s.receives && sent_[previous].size() == received_[p]) return false;
    if (s.sends && sent_[p].size() - received_[next] == 2) return false;  // the depth of Channels
    const unsigned own_set = 1u << p;
    unsigned value = s.receives ? sent_[previous][received_[p]++] : own_set;
    EXPECT(s.receives || s.reduces || s.block == p);
    if (s.receives && s.reduces) {
      EXPECT((value & own_set) == 0);  // no input is added twice
      value |= own_set;
    }
    if (s.stores) stored_[p][s.block][s.window] = value;
    if (s.sends) sent_[p].push_back(value);
    ++step_[p];
    return true;
  }

  size_t n_;
  std::vector<Schedule> ranks_;
  std::vector<size_t> step_, received_;
  std::vector<Set> sent_;
  std::vector<Blocks> stored_;
};

void test_schedules() {
  for (size_t n = 2; n <= 9; ++n) {
    const unsigned all_ranks = (1u << n) - 1;
    for (const size_t stride : ring_strides(n, 2 * n, false)) {
      const ScheduleSimulation gather(PipelineKind::kAllGather, n, stride, 3);
      const ScheduleSimulation scatter(PipelineKind::kReduceScatter, n, stride, 3);
      const ScheduleSimulation reduce(PipelineKind::kAllReduce, n, stride, 3);
      for (size_t p = 0; p < n; ++p) {
        for (size_t b = 0; b < n; ++b) {
          EXPECT(gather.stored(p, b) == std::vector<unsigned>(3, b == p ? 0 : 1u << b));
          EXPECT(scatter.stored(p, b) == std::vector<unsigned>(3, b == p ? all_ranks : 0));
          EXPECT(reduce.stored(p, b) == std::vector<unsigned>(3, all_ranks));
        }
      }
    }
  }
  EXPECT((ring_strides(8, 6, false) == std::vector<size_t>{1, 7, 3, 5, 1, 7}));
  EXPECT((ring_strides(8, 3, true) == std::vector<size_t>{1, 7, 1}));
  EXPECT((ring_strides(2, 3, false) == std::vector<size_t>{1, 1, 1}));
  // The sends of all rings cover a block exactly once, also beyond 4 GiB.
  for (const size_t bytes : {size_t{0}, size_t{4}, size_t{1000}, (size_t{5} << 30) + 4}) {
    const size_t send_bytes = bytes > 5000 ? size_t{96} << 20 : 128, k = 3;
    const size_t windows = window_count(bytes, k, send_bytes, kCacheLine);
    size_t position = 0;
    for (size_t c = 0; c < k; ++c) {
      for (size_t w = 0; w < windows; ++w) {
        const Interval i = interval_of_send(bytes, k, c, w, send_bytes, kCacheLine);
        EXPECT(i.empty() || (i.lo == position && i.size() <= send_bytes));
        position += i.size();
      }
    }
    EXPECT(position == bytes);
  }
}

// SipHash-2-4 has test vectors by its authors: the key is 00 01 ... 0f, the messages are 00, 00 01,
// 00 01 02, ...
void test_macs() {
  constexpr Key kReferenceKey{0x0706050403020100, 0x0f0e0d0c0b0a0908};
  unsigned char message[64];
  std::iota(std::begin(message), std::end(message), static_cast<unsigned char>(0));
  EXPECT(mac_of(kReferenceKey, message, 0) == 0x726fdb47dd0e0e31);
  EXPECT(mac_of(kReferenceKey, message, 1) == 0x74f839c593dc67fd);
  EXPECT(mac_of(kReferenceKey, message, 8) == 0x93f5f5799a932462);
  EXPECT(mac_of(kReferenceKey, message, 15) == 0xa129ca6149be45e5);
  const Key key = random_key();
  Key parsed;
  EXPECT(parse_key(text_of(key), &parsed) && parsed.lo == key.lo && parsed.hi == key.hi);
  for (const char* invalid :
       {"", "0123", "0123456789abcdef0123456789abcdeg", "-123456789abcdef0123456789abcdef",
        "0123456789abcdef0123456789abcdef0"}) {
    EXPECT(!parse_key(invalid, &parsed));
  }
}

// Peer tables are decoded to the identities that were encoded, whatever the identities contain.
// Truncated tables are refused.
void test_peer_tables() {
  const Identity identity = Identity::of_this_process(Settings());
  std::vector<std::string> identities{identity.encode(), identity.encode(), "99\nwho knows\n",
                                      "99\n", identity.encode()};
  identities.insert(identities.end(), {"=\n+\n.\n", "\n\n=\n", "\n=\n+\n", ""});
  for (size_t n = 0; n <= identities.size(); ++n) {
    const std::vector<std::string> prefix(identities.begin(),
                                          identities.begin() + static_cast<long>(n));
    const std::string table = encode_peer_table(prefix);
    EXPECT(decode_peer_table(table, n) == prefix);
    for (size_t length = 0; length < table.size(); ++length) {
      bool refused = false;
      try {
        decode_peer_table(table.substr(0, length), n);
      } catch (const Error& e) {
        refused = e.fault == Fault::kMismatch;
      }
      EXPECT(refused || length + 1 == table.size());  // the last newline may be missing
    }
  }
  EXPECT(encode_peer_table({identities[0], identities[0]}).size() < identities[0].size() + 64);
}

}  // namespace

int main() {
  test_schedules();
  test_peer_tables();
  test_macs();
  test_conversions();
  test_cuts();
  test_buffer_lists();
  test_large_buffer_lists();
  test_segments();
  test_reductions();
  return 0;
}
