// Says how GPUs are connected by the NVML that is found: usage: nvml_test IDENTITY IDENTITY, each 16
// characters.
#include <cstdio>

#include "nvlink/nvml.h"

int main(int count, char** words) {
  if (count != 3) return 2;
  const char* const said[] = {"nvlink", "other", "unknown"};
  const auto link = fsccl::nvlink::link_between(words[1], words[2]);
  printf("%s %s\n", said[static_cast<int>(link)], fsccl::nvlink::name_of(words[1]).c_str());
  return 0;
}
