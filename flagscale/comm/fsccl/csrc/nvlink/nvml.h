#pragma once

#include <string>

namespace fsccl {
namespace nvlink {

enum class Link { kNvlink, kOther, kUnknown };

// Queries NVML how two GPUs are connected, by the 16 bytes of their identities. NVML has GPUs that
// this process does not see (CUDA_VISIBLE_DEVICES), too. The answer is kUnknown where there is no
// NVML, or where it has not both, as in a container that has one of them.
Link query_link(const std::string& one, const std::string& other);

// Formats an identity as NVML does: GPU-, and the bytes in hexadecimal, in groups of 4, 2, 2, 2 and
// 6.
std::string name_of(const std::string& identity);

}  // namespace nvlink
}  // namespace fsccl
