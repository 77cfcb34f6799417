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

// Settings of the bounded all_reduce (datagram/bounded_all_reduce.h): it sums gradients over
// datagrams in bounded time and may exclude those that do not arrive. A bucket is the buffer of one
// such all_reduce.
struct BoundedSettings {
  bool enabled = false;  // FSCCL_TAIL=bounded
  // FSCCL_TAIL_GROUPS: glob patterns of group descriptions; empty: all groups.
  std::vector<std::string> group_patterns;
  size_t min_bytes = 256 << 10;      // FSCCL_TAIL_BYTES: smallest bucket
  double max_excluded_percent = 10;  // FSCCL_TAIL_LIMIT: of a bucket
  // If more is excluded. FSCCL_TAIL_ABOVE=skip: the result is zero; else it is computed exactly.
  bool skip_above_limit = false;
  bool error_feedback = false;  // FSCCL_TAIL_FEEDBACK=1: see datagram/error_feedback.h
  double rate_mbit = 0;         // FSCCL_TAIL_RATE: sending rate of a rank in Mbit/s; 0: measured

  // Returns whether `word` is "bounded". Throws Error(kUsage) unless it is "bounded" or "exact".
  static bool parse_mode(const std::string& word);
  // Returns whether a group with this description matches one of `group_patterns`.
  bool applies_to(const std::string& description) const;
};

// All settings of a group. Ranks compare those in agreed_settings() when the group connects.
struct Settings {
  // FSCCL_CLUSTERS=4,4: numbers of ranks of consecutive nodes, over all ranks of the job. A node is
  // a set of ranks that share memory. Empty: by host.
  std::vector<int> node_sizes;
  bool shared_memory = true;  // FSCCL_SHM=0: use TCP between all ranks
  std::string shm_directory;  // FSCCL_SHM_DIR: a tmpfs for shared segments; empty: memfd
  // FSCCL_SLOT_BYTES: data that a rank exchanges per step (shm_steps.h); 0: depends on the number
  // of ranks of the node.
  size_t slot_bytes = 0;
  size_t one_shot_bytes = 32768;           // FSCCL_ONE_SHOT_BYTES: largest one-shot all_reduce
  size_t chunk_bytes = 1 << 20;            // FSCCL_CHUNK_BYTES: unit of pipelining between nodes
  Algorithm algorithm = Algorithm::kAuto;  // FSCCL_ALGO: of all_reduce between nodes
  // Of device engines (csrc/device), which divide operations into the same steps only if these are
  // equal:
  size_t pipe_bytes = 4 << 20;  // FSCCL_PIPE_BYTES: slot of a pipe between two ranks of a host
  // FSCCL_TINY_BYTES: largest data per rank that is exchanged through the shared control block.
  size_t tiny_bytes = 16 << 10;
  // FSCCL_KERNEL_BYTES: largest operation, in bytes that a rank writes, that a single kernel does.
  size_t kernel_bytes = 12 << 20;
  // Of pipelined schedules (schedule.h) for all_reduce, all_gather and reduce_scatter:
  int pipeline_k = 0;             // FSCCL_PIPELINE_K: number of chunks; 0: use other algorithms
  size_t pipeline_nelem = 32768;  // FSCCL_PIPELINE_NELEM: elements per send
  bool debug = false;             // FSCCL_DEBUG=INFO
  // FSCCL_SECRET: secret of the run, from which the keys of groups are derived; unset: the keys
  // depend on the store alone.
  std::optional<Key> secret;
  TcpOptions tcp;
  BoundedSettings bounded;

  // Reads the environment. Throws Error(kUsage) that names the variable, its value and the allowed
  // values.
  static Settings from_environment();
  static constexpr long long kMaxPipelineChunks = 64, kMaxPipelineElements = 1LL << 26;
  // Throws Error(kUsage) unless node sizes are unset or add up to the number of ranks of the job.
  void check_node_sizes(int ranks_of_job) const;
  // Throws Error(kUsage) if pipeline_k or pipeline_nelem is out of range. Callers may set both
  // without the environment.
  void check_pipeline() const;
  // Returns, as text, all settings that must be equal on all ranks.
  std::string agreed_settings() const;
};

}  // namespace fsccl
