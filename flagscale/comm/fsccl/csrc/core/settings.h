// Settings of fsccl, read from FSCCL_* environment variables.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "mac.h"
#include "route.h"
#include "socket.h"

namespace fsccl {

// Settings of the bounded-time all_reduce of gradients over datagrams
// (datagram/bounded_all_reduce.h).
struct BoundedSettings {
  bool enabled = false;                     // FSCCL_TAIL=bounded
  std::vector<std::string> group_patterns;  // FSCCL_TAIL_GROUPS: by group description; empty: all
  size_t min_bytes = 256 << 10;             // FSCCL_TAIL_BYTES: smallest bucket
  double max_excluded_percent = 10;         // FSCCL_TAIL_LIMIT: of a bucket
  bool skip_above_limit = false;  // FSCCL_TAIL_ABOVE=skip: result is zero; else: repeated exactly
  bool feedback = false;          // FSCCL_TAIL_FEEDBACK=1: error feedback (ErrorFeedback)
  double rate_mbit = 0;           // FSCCL_TAIL_RATE: Mbit/s of a rank; 0: measured

  // Returns whether `word` is "bounded". Throws Error(kUsage) unless it is "bounded" or "exact".
  static bool parse_mode(const std::string& word);
  // Returns whether a group with this description matches one of `group_patterns`.
  bool applies_to(const std::string& description) const;
};

// All settings of a group. Ranks compare those in agreed_settings() when the group connects.
struct Settings {
  std::vector<int> node_sizes;  // FSCCL_CLUSTERS=4,4: consecutive nodes, over all ranks of the job
  bool shared_memory = true;    // FSCCL_SHM=0: use TCP between all ranks
  std::string shm_directory;    // FSCCL_SHM_DIR: a tmpfs for shared segments; empty: memfd
  size_t slot_bytes = 0;        // FSCCL_SLOT_BYTES: slot of ShmSteps; 0: by the number of ranks
  size_t one_shot_bytes = 32768;           // FSCCL_ONE_SHOT_BYTES: largest one-shot all_reduce
  size_t chunk_bytes = 1 << 20;            // FSCCL_CHUNK_BYTES: unit of pipelining between nodes
  Algorithm algorithm = Algorithm::kAuto;  // FSCCL_ALGO: of all_reduce between nodes
  // Of device engines (csrc/device), which cut steps identically only if these are equal:
  size_t pipe_bytes = 4 << 20;     // FSCCL_PIPE_BYTES: slot of a pipe
  size_t tiny_bytes = 16 << 10;    // FSCCL_TINY_BYTES: most of a rank in the shared control block
  size_t kernel_bytes = 12 << 20;  // FSCCL_KERNEL_BYTES: most that the kernel of a rank writes
  // Of pipelined schedules (schedule.h) for all_reduce, all_gather and reduce_scatter:
  int pipeline_k = 0;             // FSCCL_PIPELINE_K: number of chunks; 0: use other algorithms
  size_t pipeline_nelem = 32768;  // FSCCL_PIPELINE_NELEM: elements per send
  bool debug = false;             // FSCCL_DEBUG=INFO
  std::optional<Key> secret;      // FSCCL_SECRET of the run; unset: the key is from the store alone
  TcpOptions tcp;
  BoundedSettings bounded;

  // Reads the environment. Throws Error(kUsage) with the variable, its value and the values that it
  // may have.
  static Settings from_environment();
  static constexpr long long kMostChunks = 64, kMostElements = 1LL << 26;
  // Throws Error(kUsage) unless node sizes are unset or add up to the number of ranks of the job.
  void check_node_sizes(int ranks_of_job) const;
  // Throws Error(kUsage) if pipeline_k or pipeline_nelem is out of range, whoever set it.
  void check_pipeline() const;
  // Returns, as text, all settings that must be equal on all ranks.
  std::string agreed_settings() const;
};

}  // namespace fsccl
