#include "topology.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "segment.h"
#include "text.h"
#include "types.h"

namespace fsccl {
namespace {

constexpr size_t kIdentityLines = 13;

std::string namespace_id(const char* kind) {
  struct stat s{};
  const std::string path = std::string("/proc/self/ns/") + kind;
  return stat(path.c_str(), &s) == 0 ? std::to_string(s.st_ino) : "?";
}

std::string host_name() {
  char text[256] = "";
  gethostname(text, sizeof text - 1);
  return text;
}

// Returns the random number of this process. A forked child is another process and gets another
// number, although it has a copy of the memory.
uint64_t this_process_id() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  static pid_t owner_pid = 0;
  static uint64_t process_number = 0;
  if (owner_pid != getpid()) {
    owner_pid = getpid();
    process_number = random_number();
  }
  return process_number;
}

}  // namespace

uint64_t random_number() {
  uint64_t n = 0;
  if (getrandom(&n, sizeof n, 0) != static_cast<ssize_t>(sizeof n))
    fail_system("no random numbers");
  return n;
}

Key random_key() { return {random_number(), random_number()}; }

Identity Identity::of_this_process(const Settings& settings) {
  Identity identity;
  identity.version = kProtocolVersion;
  identity.domain = read_first_line(kBootId) + "/" + namespace_id("pid") + "/" +
                    namespace_id("net") + "/" + std::to_string(geteuid());
  identity.host = host_name();
  identity.pid = static_cast<int>(getpid());
  identity.start_time = start_time_of(identity.pid);
  identity.process_id = this_process_id();
  identity.settings = settings.agreed_settings();
  return identity;
}

bool Identity::is_running() const {
  return start_time == 0 || is_process_running(pid, start_time);
}

std::string Identity::encode() const {
  std::string text;
  for (const std::string& line :
       {std::to_string(version), std::to_string(pid), std::to_string(process_id),
        std::to_string(start_time), text_of(key), domain, host, address, settings, native.device,
        native.vendor, native.library, native.reach}) {
    text += line + '\n';
  }
  return text;
}

Identity Identity::decode(const std::string& text) {
  Identity identity;
  const std::vector<std::string> lines = split(text, '\n');
  if (lines.empty() || !parse_decimal(lines[0], &identity.version)) identity.version = 0;
  // Identities of other versions may have another format.
  if (identity.version != kProtocolVersion) return identity;
  const bool valid = lines.size() == kIdentityLines && parse_decimal(lines[1], &identity.pid) &&
                     parse_decimal(lines[2], &identity.process_id) &&
                     parse_decimal(lines[3], &identity.start_time) &&
                     parse_key(lines[4], &identity.key);
  if (!valid) throw Error(Fault::kMismatch, -1, "the identity of a rank has an unknown format");
  size_t at = 5;
  for (std::string* field : {&identity.domain, &identity.host, &identity.address,
                             &identity.settings, &identity.native.device, &identity.native.vendor,
                             &identity.native.library, &identity.native.reach}) {
    *field = lines[at++];
  }
  return identity;
}

std::string RankPartition::text() const {
  std::string text;
  for (const auto& part : ranks) text += (text.empty() ? "" : "+") + std::to_string(part.size());
  return text + " ranks";
}

namespace {

// Groups ranks with the same key, divided further by FSCCL_CLUSTERS.
RankPartition partition_by(const std::vector<std::string>& keys, int rank,
                           const std::vector<int>& global_ranks,
                           const std::vector<int>& node_sizes) {
  const int total_ranks = std::accumulate(node_sizes.begin(), node_sizes.end(), 0);
  RankPartition partition;
  std::map<std::string, size_t> part_of_key;
  for (size_t r = 0; r < keys.size(); ++r) {
    std::string key = keys[r];
    if (!node_sizes.empty()) {
      const int global = global_ranks[r];
      if (global >= total_ranks) {
        fail_usage("FSCCL_CLUSTERS covers " + std::to_string(total_ranks) +
                   " ranks, but there is a rank " + std::to_string(global));
      }
      int node = 0;
      for (int end = node_sizes[0]; global >= end; end += node_sizes[static_cast<size_t>(node)])
        ++node;
      key += "/" + std::to_string(node);
    }
    const auto [at, inserted] = part_of_key.emplace(key, partition.ranks.size());
    if (inserted) partition.ranks.emplace_back();
    if (static_cast<int>(r) == rank) {
      partition.own_part = static_cast<int>(at->second);
      partition.own_index = static_cast<int>(partition.ranks[at->second].size());
    }
    partition.ranks[at->second].push_back(static_cast<int>(r));
  }
  return partition;
}

}  // namespace

RankPartition partition_by_node(int rank, const std::vector<Identity>& identities,
                                const std::vector<int>& global_ranks, const Settings& settings) {
  std::vector<std::string> keys;
  for (size_t r = 0; r < identities.size(); ++r) {
    keys.push_back(settings.shared_memory ? identities[r].domain : "rank " + std::to_string(r));
  }
  return partition_by(keys, rank, global_ranks, settings.node_sizes);
}

RankPartition partition_by_native_library(int rank, const std::vector<Identity>& identities,
                                          const std::vector<int>& global_ranks,
                                          const Settings& settings) {
  std::vector<std::string> keys;
  for (const Identity& identity : identities) keys.push_back(identity.native.text());
  return partition_by(keys, rank, global_ranks, settings.node_sizes);
}

// The message is the same on all ranks, whichever of them differ.
void check_compatible(const std::vector<Identity>& identities,
                      const std::vector<std::string>& names) {
  const Identity& reference = identities[0];
  for (size_t r = 1; r < identities.size(); ++r) {
    const auto refuse = [&](const std::string& difference) {
      throw Error(Fault::kMismatch, static_cast<int>(r), names[r] + difference);
    };
    if (identities[r].version != reference.version) {
      refuse(" speaks fsccl protocol " + std::to_string(identities[r].version) + ", " + names[0] +
             " " + std::to_string(reference.version) + ": install the same version everywhere");
    }
    if (identities[r].settings != reference.settings) {
      refuse(" runs with " + identities[r].settings + ", " + names[0] + " with " +
             reference.settings + ": set the same values everywhere");
    }
  }
}

}  // namespace fsccl
