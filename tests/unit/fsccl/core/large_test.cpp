// Tests of collectives on buffers of more than 4 GiB, with little memory. Two ranks are threads;
// their buffers map the same pages repeatedly, except for the last pages, around 4 GiB, which are
// private. The period of the repetition does not divide 4 GiB, so that an offset truncated to 32
// bits leads to other bytes.
// Usage: large_test <ranks per node: 2 or 1,1> <pipeline_k>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <thread>

#include "counting_store.h"

namespace {

using namespace fsccl;

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kPeriod = 67 * kMiB + 12288;
constexpr size_t kPrivateStart = 4096 * kMiB - 8 * kMiB;  // start of the private pages
constexpr size_t kSize = 4096 * kMiB + 24 * kMiB + 3;

[[noreturn]] void fail_test(const char* message, int rank, size_t at) {
  std::fprintf(stderr, "%s: rank %d, byte %zu\n", message, rank, at);
  std::_Exit(1);
}

// A buffer of more than 4 GiB whose pages repeat.
class LargeBuffer {
 public:
  LargeBuffer() {
    const int fd = memfd_create("large", MFD_CLOEXEC);
    void* address = mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fd < 0 || address == MAP_FAILED || ftruncate(fd, kPeriod) != 0)
      fail_test("no memory", -1, 0);
    data_ = static_cast<uint8_t*>(address);
    for (size_t at = 0; at < kPrivateStart; at += kPeriod) {
      const size_t n = std::min(kPeriod, kPrivateStart - at);
      if (mmap(data_ + at, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
          MAP_FAILED) {
        fail_test("cannot map", -1, at);
      }
    }
    close(fd);
  }
  LargeBuffer(const LargeBuffer&) = delete;
  LargeBuffer& operator=(const LargeBuffer&) = delete;
  ~LargeBuffer() { munmap(data_, kSize); }

  uint8_t* data() { return data_; }
  void fill(unsigned factor) {
    for_each_byte([factor](uint8_t& byte, size_t i) { byte = value(i, factor); });
  }
  void expect(const char* message, int rank, unsigned factor) {
    for_each_byte([=](uint8_t& byte, size_t i) {
      if (byte != value(i, factor)) fail_test(message, rank, i);
    });
  }

 private:
  static uint8_t value(size_t i, unsigned factor) {
    return static_cast<uint8_t>(((i >> 12) * 7 + i) * factor);
  }
  template <class F>
  void for_each_byte(F f) {
    for (size_t i = 0; i < kPeriod; ++i) f(data_[i], i);
    for (size_t i = kPrivateStart; i < kSize; ++i) f(data_[i], i);
  }

  uint8_t* data_;
};

void run_rank(StoreContents& contents, int rank, const Settings& settings) {
  const Deadline d = Deadline::after(Deadline::Ms(600000));
  GroupConfig config;
  config.rank = rank;
  config.size = 2;
  config.settings = settings;
  Group group(std::make_unique<CountingStore>(contents), config);
  LargeBuffer in, out;
  in.fill(static_cast<unsigned>(rank) * 4 + 1);
  group.all_reduce(in.data(), out.data(), kSize, {DType::kU8, RedOp::kSum, 1, 2}, d);
  out.expect("all_reduce", rank, 6);
  LargeBuffer& buffer = rank == 1 ? in : out;
  group.broadcast(BufferList(buffer.data(), kSize), 1, d);
  buffer.expect("broadcast", rank, 5);
  if (rank == 0) in.fill(3);
  const BufferList memory(rank == 0 ? in.data() : out.data(), kSize);
  const RequestPtr message = rank == 0 ? group.send(1, 7, memory, d) : group.recv(0, 7, memory, d);
  group.wait(OpCode::kRecv, message, d);
  if (rank == 1) out.expect("recv", rank, 3);
  group.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Settings settings;
  std::stringstream in(argv[1]);
  for (std::string field; std::getline(in, field, ',');)
    settings.node_sizes.push_back(std::stoi(field));
  settings.pipeline_k = std::atoi(argv[2]);
  settings.tcp.interface = "lo";
  StoreContents contents;
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      try {
        run_rank(contents, r, settings);
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", r, e.what());
        std::_Exit(1);
      }
    });
  }
  for (auto& t : ranks) t.join();
  std::puts("ok");
  return 0;
}
