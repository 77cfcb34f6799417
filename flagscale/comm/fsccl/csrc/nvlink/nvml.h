#pragma once

#include <string>

namespace fsccl {
namespace nvlink {

enum class Link { kNvlink, kOther, kUnknown };

// How two GPUs are connected, by the 16 bytes of their identities, as NVML knows it: of GPUs that
// this process does not see (CUDA_VISIBLE_DEVICES), too. Unknown where there is no NVML, or where
// it does not know both, as in a container that has one of them.
Link link_between(const std::string& one, const std::string& other);

// As NVML writes an identity: GPU-, and the bytes in hexadecimal, in groups of 4, 2, 2, 2 and 6.
std::string name_of(const std::string& identity);

}  // namespace nvlink
}  // namespace fsccl
