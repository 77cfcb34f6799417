#include "types.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace fsccl {

const char* name_of(DType t) {
  static const char* const kNames[] = {"uint8",   "int8",    "uint16", "int16",   "uint32",
                                       "int32",   "uint64",  "int64",  "float16", "bfloat16",
                                       "float32", "float64", "bool",   "bytes",
                                       "complex32", "complex64", "complex128", "float8_e5m2",
                                       "float8_e4m3fn"};
  const auto i = static_cast<size_t>(t);
  return i < sizeof(kNames) / sizeof(kNames[0]) ? kNames[i] : "an unknown type";
}

const char* name_of(RedOp op) {
  static const char* const kNames[] = {"sum",  "avg", "product", "min",       "max",
                                       "band", "bor", "bxor",    "premul_sum"};
  const auto i = static_cast<size_t>(op);
  return i < sizeof(kNames) / sizeof(kNames[0]) ? kNames[i] : "an unknown reduction";
}

const char* name_of(OpCode op) {
  static const char* const kNames[] = {"nothing",    "all_reduce", "all_gather", "reduce_scatter",
                                       "broadcast",  "reduce",     "gather",     "scatter",
                                       "all_to_all", "barrier",    "send",       "recv"};
  const auto i = static_cast<size_t>(op);
  return i < sizeof(kNames) / sizeof(kNames[0]) ? kNames[i] : "an unknown operation";
}

void fail_usage(const std::string& message) { throw Error(Fault::kUsage, -1, message); }

std::string describe_errno(const std::string& message) {
  const int code = errno;
  std::string reason = std::strerror(code);
  rlimit limit{};
  if (code == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    reason = "this process has all descriptors open that it may have, " +
             std::to_string(limit.rlim_cur) + " (RLIMIT_NOFILE; its hard limit is " +
             std::to_string(limit.rlim_max) + "): ulimit -n raises it, LimitNOFILE= of a service " +
             "and --ulimit nofile= of a container the hard limit";
  }
  return message + ": " + reason;
}

void fail_system(const std::string& message) {
  throw Error(Fault::kSystem, -1, describe_errno(message));
}

std::string Deadline::text() const {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g s", static_cast<double>(limit_.count()) / 1000);
  return buffer;
}

}  // namespace fsccl
