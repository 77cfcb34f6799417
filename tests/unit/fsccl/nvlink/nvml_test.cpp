// Prints how NVML says two GPUs are linked, and the first one's UUID. Usage: nvml_test UUID UUID,
// each of 16 characters, which are its bytes.
#include <cstdio>

#include "nvlink/nvml.h"

int main(int count, char** words) {
  if (count != 3) return 2;
  const char* const kNames[] = {"nvlink", "other", "unknown"};
  const auto link = fsccl::nvlink::query_link(words[1], words[2]);
  printf("%s %s\n", kNames[static_cast<int>(link)], fsccl::nvlink::nvml_uuid_of(words[1]).c_str());
  return 0;
}
