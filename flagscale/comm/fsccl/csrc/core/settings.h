// What FSCCL_* environment variables say.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "socket.h"

namespace fsccl {

struct Settings {
  std::vector<int> clusters;      // FSCCL_CLUSTERS=4,4: sizes, over the ranks of the whole job
  bool shared_memory = true;      // FSCCL_SHM=0: TCP between all ranks
  std::string shm_directory;      // FSCCL_SHM_DIR: a tmpfs to put segments in
  size_t slot_bytes = 0;          // FSCCL_SLOT_BYTES: 0 chooses by the number of ranks
  size_t one_shot_bytes = 32768;  // FSCCL_ONE_SHOT_BYTES: the largest one-shot all_reduce
  size_t chunk_bytes = 1 << 20;   // FSCCL_CHUNK_BYTES: of pipelines between clusters
  bool debug = false;             // FSCCL_DEBUG=INFO
  TcpOptions tcp;

  // Throws Error(kUsage) naming the variable, what was found and what was expected.
  static Settings from_environment();
  // All that ranks must agree on, as text.
  std::string shared_text() const;
};

}  // namespace fsccl
