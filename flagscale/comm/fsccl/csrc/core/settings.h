// What FSCCL_* environment variables say.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "mac.h"
#include "route.h"
#include "socket.h"

namespace fsccl {

// all_reduce of gradients in bounded time, by datagrams (datagram/tail.h).
struct TailSettings {
  bool bounded = false;      // FSCCL_TAIL=bounded
  std::vector<std::string> groups;  // FSCCL_TAIL_GROUPS: patterns of descriptions; none: all groups
  size_t bytes = 256 << 10;  // FSCCL_TAIL_BYTES: the smallest
  double limit = 10;         // FSCCL_TAIL_LIMIT: percent that may be left out
  bool skip = false;         // FSCCL_TAIL_ABOVE=skip: above it the result is zero; else repeat
  bool feedback = false;     // FSCCL_TAIL_FEEDBACK=1: what is left out is added to the next
  double rate_mbit = 0;      // FSCCL_TAIL_RATE: of a rank; 0 learns it

  // Throws Error(kUsage) for other words than "bounded" and "exact".
  static bool says_bounded(const std::string& word);
  // Whether a group that the program describes so is one of those that are meant.
  bool means(const std::string& description) const;
};

struct Settings {
  std::vector<int> clusters;      // FSCCL_CLUSTERS=4,4: sizes, over the ranks of the whole job
  bool shared_memory = true;      // FSCCL_SHM=0: TCP between all ranks
  std::string shm_directory;      // FSCCL_SHM_DIR: a tmpfs to put segments in
  size_t slot_bytes = 0;          // FSCCL_SLOT_BYTES: 0 chooses by the number of ranks
  size_t one_shot_bytes = 32768;  // FSCCL_ONE_SHOT_BYTES: the largest one-shot all_reduce
  size_t chunk_bytes = 1 << 20;   // FSCCL_CHUNK_BYTES: of pipelines between clusters
  Algorithm algorithm = Algorithm::kAuto;  // FSCCL_ALGO: of all_reduce between clusters
  // Of engines for devices (csrc/device), whose steps are cut alike where these are alike:
  size_t pipe_bytes = 4 << 20;     // FSCCL_PIPE_BYTES: a slot of a pipe
  size_t tiny_bytes = 16 << 10;    // FSCCL_TINY_BYTES: the most a rank writes on the board
  size_t kernel_bytes = 12 << 20;  // FSCCL_KERNEL_BYTES: the most that a rank's kernel writes
  // Pipelined schedules (schedule.h), for all_reduce, all_gather and reduce_scatter:
  int pipeline_k = 0;  // FSCCL_PIPELINE_K: into how many chunks, 0 takes other algorithms
  size_t pipeline_nelem = 32768;  // FSCCL_PIPELINE_NELEM: elements a send
  bool debug = false;             // FSCCL_DEBUG=INFO
  std::optional<Key> secret;      // FSCCL_SECRET, of the run; none: of the store alone
  TcpOptions tcp;
  TailSettings tail;

  // Throws Error(kUsage) naming the variable, what was found and what was expected.
  static Settings from_environment();
  static constexpr long long kMostChunks = 64, kMostElements = 1LL << 26;
  // The same for clusters, if they do not take in all ranks of the job and no others.
  void check_clusters(int ranks_of_job) const;
  // The same for pipeline_k and pipeline_nelem, whoever set them.
  void check_pipeline() const;
  // All that ranks must agree on, as text.
  std::string shared_text() const;
};

}  // namespace fsccl
