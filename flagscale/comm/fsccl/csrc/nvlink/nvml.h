#pragma once

#include <string>

namespace fsccl {
namespace nvlink {

enum class Link { kNvlink, kOther, kUnknown };

// Asks NVML how two GPUs are connected. GPUs are given by their UUIDs of 16 bytes. NVML also lists
// GPUs that are hidden from this process by CUDA_VISIBLE_DEVICES. Returns kUnknown if NVML is not
// installed or does not list both GPUs, as in a container that has one of them.
Link query_link(const std::string& first_identity, const std::string& second_identity);

// Formats a UUID as NVML does: "GPU-" and the bytes in hexadecimal, in groups of 4, 2, 2, 2 and 6.
std::string nvml_uuid_of(const std::string& identity);

}  // namespace nvlink
}  // namespace fsccl
