// Prints how two GPUs are linked, according to NVML. Usage: nvml_test IDENTITY IDENTITY, each of 16
// characters.
#include <cstdio>

#include "nvlink/nvml.h"

int main(int count, char** words) {
  if (count != 3) return 2;
  const char* const kNames[] = {"nvlink", "other", "unknown"};
  const auto link = fsccl::nvlink::query_link(words[1], words[2]);
  printf("%s %s\n", kNames[static_cast<int>(link)], fsccl::nvlink::name_of(words[1]).c_str());
  return 0;
}
