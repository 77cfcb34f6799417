// Who the ranks of a group are, and which of them can share memory.
#pragma once

#include <string>
#include <vector>

#include "mac.h"
#include "settings.h"

namespace fsccl {

// What moves a rank's tensors among its like. Ranks with the same of all four form a native
// cluster; for the core itself, which moves host memory, it makes no difference.
struct Native {
  std::string device = "cpu";
  std::string vendor = "cpu";
  std::string library = "own";  // with its version, where unlike versions do not work together
  std::string reach;            // a name for those who reach each other; empty: everyone does

  std::string text() const { return device + "/" + vendor + "/" + library + "/" + reach; }
  bool operator==(const Native& o) const { return text() == o.text(); }
};

// What a rank tells the others when the group is made.
struct Identity {
  uint32_t version = 0;
  std::string domain;  // equal where processes see each other's memory, processes and sockets
  std::string host;
  int pid = 0;
  uint64_t started = 0;  // start_time_of(pid)
  uint64_t process = 0;  // random, once a process
  std::string address;   // of its transport
  Key key;               // random; rank 0's is the group's
  std::string settings;
  Native native;

  static Identity of_this_process(const Settings& settings);
  // Whether its process, one of this host's, still runs.
  bool runs() const;
  std::string encode() const;
  static Identity decode(const std::string& text);
};

uint64_t random_number();
Key random_key();

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

// The same by native library, in place of shared memory.
Clusters form_native_clusters(int rank, const std::vector<Identity>& who,
                              const std::vector<int>& global_ranks, const Settings& settings);

// Throws Error(kMismatch) naming the first rank that cannot work with rank 0.
void check_compatible(const std::vector<Identity>& who, const std::vector<std::string>& names);

}  // namespace fsccl
