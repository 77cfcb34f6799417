// Names shared by the whole core: element types, reductions, errors and deadlines.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__CUDACC__)
#define FSCCL_HD __host__ __device__
#else
#define FSCCL_HD
#endif

namespace fsccl {

// Ranks that speak another version refuse each other when the group connects.
constexpr uint32_t kProtocolVersion = 10;
constexpr size_t kCacheLine = 64;

enum class DType : uint8_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kBool,
  kOpaque,  // moved, never reduced; its size is one byte
};

enum class RedOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

enum class OpCode : uint16_t {
  kNone,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSend,
  kRecv,
};

constexpr size_t size_of(DType t) {
  switch (t) {
    case DType::kU16:
    case DType::kI16:
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kU32:
    case DType::kI32:
    case DType::kF32:
      return 4;
    case DType::kU64:
    case DType::kI64:
    case DType::kF64:
      return 8;
    default:
      return 1;
  }
}

const char* name_of(DType t);
const char* name_of(RedOp op);
const char* name_of(OpCode op);

// What is done to the elements. A reduction over clusters runs in two stages: the first sums
// inside the cluster (and multiplies, for PREMUL_SUM), the last sums over clusters (and divides,
// for AVG), so that each scaling happens once.
struct Reduction {
  DType dtype = DType::kF32;
  RedOp op = RedOp::kSum;
  double factor = 1;  // PREMUL_SUM multiplies every input by it
  int divisor = 1;    // AVG divides the sum by it: the size of the group
  bool whole = false;  // nothing may be left out, whatever settings allow (TailSettings)

  size_t width() const { return size_of(dtype); }
  Reduction first_stage() const {
    Reduction r = *this;
    if (op == RedOp::kAvg) r.op = RedOp::kSum;
    return r;
  }
  Reduction last_stage() const {
    Reduction r = *this;
    if (op == RedOp::kPremulSum) r.op = RedOp::kSum;
    return r;
  }
};

enum class Fault {
  kTimeout,   // a rank did not come in time
  kPeerLost,  // a rank's process ended, or its connection broke
  kAborted,   // someone asked the group to stop
  kMismatch,  // ranks called different operations
  kSystem,    // the operating system refused something
  kUsage,     // an argument makes no sense
};

// `rank` is the group rank at fault, or -1 when it is nobody's or unknown.
class Error : public std::runtime_error {
 public:
  Error(Fault kind, int at_fault, const std::string& what)
      : std::runtime_error(what), fault(kind), rank(at_fault) {}
  Fault fault;
  int rank;
};

// After a rank's name: what has become of it.
constexpr const char* kEnded = " ended without leaving the group";
constexpr const char* kBroke = " ended or its connection broke";
constexpr const char* kLeft = " has left the group";

[[noreturn]] void fail_usage(const std::string& what);
// Appends what errno says; where no descriptor is left, with the numbers.
[[noreturn]] void fail_system(const std::string& what);

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using Ms = std::chrono::milliseconds;

  static Deadline after(Ms limit) { return Deadline(Clock::now() + limit, limit); }
  bool passed() const { return Clock::now() >= at_; }
  Ms limit() const { return limit_; }
  Ms remaining() const {
    const auto left = std::chrono::duration_cast<Ms>(at_ - Clock::now());
    return left.count() > 0 ? left : Ms(0);
  }
  // A moment earlier, with the same words.
  Deadline earlier(Ms by) const { return Deadline(at_ - by, limit_); }
  std::string text() const;  // "5 s", "0.25 s": the limit, for messages

 private:
  Deadline(Clock::time_point at, Ms limit) : at_(at), limit_(limit) {}
  Clock::time_point at_;
  Ms limit_;
};

template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace fsccl
