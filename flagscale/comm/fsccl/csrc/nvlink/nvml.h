#pragma once

#include <string>

namespace fsccl {
namespace nvlink {

enum class Link { kNvlink, kOther, kUnknown };

// Queries NVML how two GPUs are connected. The identity of a GPU is the 16 bytes of its UUID, as
// Device::identity() of cuda_device.cpp returns it. NVML also lists GPUs that are hidden from this
// process by CUDA_VISIBLE_DEVICES. Returns kUnknown if NVML is not installed or does not list both
// GPUs, as in a container that has one of them.
Link query_link(const std::string& first_identity, const std::string& second_identity);

// Formats an identity as NVML does: "GPU-" and the bytes in hexadecimal, in groups of 4, 2, 2, 2
// and 6.
std::string nvml_uuid_of(const std::string& identity);

}  // namespace nvlink
}  // namespace fsccl
