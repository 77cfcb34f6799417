// Identities of the ranks of a group, and their partition into nodes: sets of ranks that share
// memory.
#pragma once

#include <string>
#include <vector>

#include "mac.h"
#include "settings.h"

namespace fsccl {

// The native collective library of a rank's device, such as NCCL. Ranks that agree in all four
// fields can use it among each other and form one part of partition_by_native_library(). The core
// itself handles host memory and does not distinguish them.
struct NativeLibrary {
  std::string device = "cpu";
  std::string vendor = "cpu";
  std::string library = "own";  // including its version, if versions are incompatible
  std::string reach;            // name of a set of ranks that can reach each other; empty: all can

  std::string text() const { return device + "/" + vendor + "/" + library + "/" + reach; }
  bool operator==(const NativeLibrary& other) const { return text() == other.text(); }
};

// Identity of a rank, which all ranks exchange when the group connects (rendezvous.h).
struct Identity {
  uint32_t version = 0;  // kProtocolVersion
  // Boot ID, PID and network namespaces, and user: processes with the same domain can share memory.
  std::string domain;
  std::string host;
  int pid = 0;
  uint64_t start_time = 0;  // start_time_of(pid)
  uint64_t process_id = 0;  // random, one per process
  std::string address;      // of its transport
  Key key;  // random; that of rank 0 becomes the key of the group, others are farewell keys
  std::string settings;     // agreed_settings()
  NativeLibrary native;

  static Identity of_this_process(const Settings& settings);
  // Returns whether its process still runs. Valid on the same host only.
  bool is_running() const;
  std::string encode() const;
  static Identity decode(const std::string& text);
};

uint64_t random_number();
Key random_key();

// Partition of the ranks of a group into parts: nodes (ranks that share memory), or ranks with the
// same native library. Parts are ordered by their first rank, and ranks inside a part by group
// rank.
struct RankPartition {
  std::vector<std::vector<int>> ranks;  // group ranks, by part
  int own_part = 0;                     // index of the part of this rank
  int own_index = 0;                    // index of this rank in that part

  int count() const { return static_cast<int>(ranks.size()); }
  const std::vector<int>& own_ranks() const { return ranks[static_cast<size_t>(own_part)]; }
  std::string text() const;  // "2+2 ranks"
};

// Divides ranks into nodes: sets of ranks that share memory and that FSCCL_CLUSTERS does not
// separate. `global_ranks` are the ranks of the group in the whole job. Throws Error(kUsage) if one
// of them is not covered by FSCCL_CLUSTERS.
RankPartition partition_by_node(int rank, const std::vector<Identity>& identities,
                                const std::vector<int>& global_ranks, const Settings& settings);

// As partition_by_node(), by native library instead of shared memory.
RankPartition partition_by_native_library(int rank, const std::vector<Identity>& identities,
                                          const std::vector<int>& global_ranks,
                                          const Settings& settings);

// Throws Error(kMismatch) that names the first rank with another version or other settings than
// rank 0.
void check_compatible(const std::vector<Identity>& identities,
                      const std::vector<std::string>& names);

}  // namespace fsccl
