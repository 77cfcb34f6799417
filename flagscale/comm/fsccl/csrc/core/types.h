// Types that the whole core shares: element types, reductions, operation codes, errors, deadlines.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

// Marks functions that CUDA kernels (csrc/nvlink) call as well.
#if defined(__CUDACC__)
#define FSCCL_HD __host__ __device__
#else
#define FSCCL_HD
#endif

namespace fsccl {

// Version of the wire protocol and of the shared-memory layout. Ranks that run different versions
// reject each other when the group connects.
constexpr uint32_t kProtocolVersion = 11;
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
  kOpaque,  // moved but never reduced, like those below; one element is one byte
  kComplex32,
  kComplex64,
  kComplex128,
  kF8E5M2,
  kF8E4M3,
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

// A reduction of elements. Between nodes it runs in two stages, so that each scaling happens
// exactly once:
//
//   first stage  inside a node: sums, and multiplies for PREMUL_SUM
//   last stage   over nodes: sums the partial results, and divides for AVG
struct Reduction {
  DType dtype = DType::kF32;
  RedOp op = RedOp::kSum;
  double factor = 1;   // PREMUL_SUM multiplies every input by this
  int divisor = 1;     // AVG divides the sum by this: the size of the group
  bool exact = false;  // never use the bounded all_reduce, which may exclude contributions

  size_t width() const { return size_of(dtype); }  // bytes per element
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
  kTimeout,   // a rank did not arrive before the deadline
  kPeerLost,  // the process of a rank ended, or its connection broke
  kAborted,   // the group was aborted on request
  kMismatch,  // ranks called different operations
  kSystem,    // the operating system refused a request
  kUsage,     // an argument is invalid
};

// Exception of the core. `rank` is the group rank at fault, or -1 if no rank is at fault or it is
// unknown.
class Error : public std::runtime_error {
 public:
  Error(Fault kind, int at_fault, const std::string& message)
      : std::runtime_error(message), fault(kind), rank(at_fault) {}
  Fault fault;
  int rank;
};

// Suffixes after the name of a rank in error messages. They also classify errors. kProcessEnded is
// used only if the end of the process is proved: it fails the other groups with that process, too
// (Group::report_to_other_groups).
constexpr const char* kProcessEnded = " ended without leaving the group";
constexpr const char* kConnectionLost = " ended or its connection broke";
constexpr const char* kConnectionBroke = " is running, but its connection broke";
constexpr const char* kLeftGroup = " has left the group";
// Message of operations that this rank's own shutdown of the group has ended.
constexpr const char* kShutDown = "the group has been shut down";

// What is known about the process of a rank.
enum class ProcessState { kUnknown, kRunning, kEnded };

[[noreturn]] void fail_usage(const std::string& message);
// Returns the message with a description of errno. If the process is out of file descriptors, it
// gives the limits.
std::string describe_errno(const std::string& message);
[[noreturn]] void fail_system(const std::string& message);  // throws that as Error(kSystem)

// Point in time at which a wait times out, together with the original timeout for error messages.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using Ms = std::chrono::milliseconds;

  static Deadline after(Ms limit) { return Deadline(Clock::now() + limit, limit); }
  bool passed() const { return Clock::now() >= at_; }
  Ms limit() const { return limit_; }
  Ms remaining() const {
    const auto remaining_time = std::chrono::duration_cast<Ms>(at_ - Clock::now());
    return remaining_time.count() > 0 ? remaining_time : Ms(0);
  }
  // Returns a deadline that expires earlier but reports the same timeout.
  Deadline earlier_by(Ms amount) const { return Deadline(at_ - amount, limit_); }
  std::string text() const;  // the timeout, for messages: "5 s", "0.25 s"

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
