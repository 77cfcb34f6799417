// Who the ranks of a group are, and which of them can share memory.
#pragma once

#include <string>
#include <vector>

#include "settings.h"

namespace fsccl {

// What a rank tells the others when the group is made.
struct Identity {
  uint32_t version = 0;
  std::string domain;  // equal where processes see each other's memory, processes and sockets
  std::string host;
  int pid = 0;
  uint64_t process = 0;  // random, once a process
  uint64_t token = 0;    // random, once a group; rank 0's counts
  std::string unix_address, tcp_address;
  std::string settings;

  static Identity of_this_process(const Settings& settings);
  std::string encode() const;
  static Identity decode(const std::string& text);
};

uint64_t random_number();

// The group's ranks by cluster: ranks that share memory and that FSCCL_CLUSTERS does not divide.
// Clusters are in order of their first rank, ranks inside a cluster in group order.
struct Clusters {
  std::vector<std::vector<int>> ranks;
  int mine = 0;   // this rank's cluster
  int index = 0;  // and its place there

  int count() const { return static_cast<int>(ranks.size()); }
  const std::vector<int>& own() const { return ranks[static_cast<size_t>(mine)]; }
  std::string text() const;  // "2+2 ranks"
};

// `global_ranks` are the group's ranks in the whole job. Throws Error(kUsage) when FSCCL_CLUSTERS
// does not cover them.
Clusters form_clusters(int rank, const std::vector<Identity>& who,
                       const std::vector<int>& global_ranks, const Settings& settings);

// Throws Error(kMismatch) naming the first rank that cannot work with this one.
void check_compatible(int rank, const std::vector<Identity>& who,
                      const std::vector<std::string>& names);

}  // namespace fsccl
