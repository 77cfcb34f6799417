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

// After a fork the child is another process, whatever its memory remembers.
uint64_t process_number() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> hold(mutex);
  static pid_t owner = 0;
  static uint64_t number = 0;
  if (owner != getpid()) {
    owner = getpid();
    number = random_number();
  }
  return number;
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
  Identity me;
  me.version = kProtocolVersion;
  me.domain = first_line(kBootId) + "/" + namespace_id("pid") + "/" + namespace_id("net") + "/" +
              std::to_string(geteuid());
  me.host = host_name();
  me.pid = static_cast<int>(getpid());
  me.started = start_time_of(me.pid);
  me.process = process_number();
  me.settings = settings.shared_text();
  return me;
}

bool Identity::runs() const { return started == 0 || start_time_of(pid) == started; }

std::string Identity::encode() const {
  std::string out;
  for (const std::string& line :
       {std::to_string(version), std::to_string(pid), std::to_string(process),
        std::to_string(started), text_of(key), domain, host, address, settings, native.device,
        native.vendor, native.library, native.reach}) {
    out += line + '\n';
  }
  return out;
}

Identity Identity::decode(const std::string& text) {
  Identity i;
  const std::vector<std::string> lines = split(text, '\n');
  if (lines.empty() || !read_number(lines[0], &i.version)) i.version = 0;
  if (i.version != kProtocolVersion) return i;  // the rest may look different there
  const bool sound = lines.size() == kIdentityLines && read_number(lines[1], &i.pid) &&
                     read_number(lines[2], &i.process) && read_number(lines[3], &i.started) &&
                     read_key(lines[4], &i.key);
  if (!sound) throw Error(Fault::kMismatch, -1, "a rank introduces itself in unknown words");
  size_t at = 5;
  for (std::string* one : {&i.domain, &i.host, &i.address, &i.settings, &i.native.device,
                           &i.native.vendor, &i.native.library, &i.native.reach}) {
    *one = lines[at++];
  }
  return i;
}

std::string Clusters::text() const {
  std::string out;
  for (const auto& c : ranks) out += (out.empty() ? "" : "+") + std::to_string(c.size());
  return out + " ranks";
}

namespace {

// Ranks with the same key, divided further by FSCCL_CLUSTERS.
Clusters clusters_by(const std::vector<std::string>& keys, int rank,
                     const std::vector<int>& global_ranks, const std::vector<int>& sizes) {
  const int covered = std::accumulate(sizes.begin(), sizes.end(), 0);
  Clusters out;
  std::map<std::string, size_t> seen;
  for (size_t r = 0; r < keys.size(); ++r) {
    std::string key = keys[r];
    if (!sizes.empty()) {
      const int global = global_ranks[r];
      if (global >= covered) {
        fail_usage("FSCCL_CLUSTERS covers " + std::to_string(covered) +
                   " ranks, but there is a rank " + std::to_string(global));
      }
      int cluster = 0;
      for (int end = sizes[0]; global >= end; end += sizes[static_cast<size_t>(cluster)]) ++cluster;
      key += "/" + std::to_string(cluster);
    }
    const auto [at, fresh] = seen.emplace(key, out.ranks.size());
    if (fresh) out.ranks.emplace_back();
    if (static_cast<int>(r) == rank) {
      out.mine = static_cast<int>(at->second);
      out.index = static_cast<int>(out.ranks[at->second].size());
    }
    out.ranks[at->second].push_back(static_cast<int>(r));
  }
  return out;
}

}  // namespace

Clusters form_clusters(int rank, const std::vector<Identity>& who,
                       const std::vector<int>& global_ranks, const Settings& settings) {
  std::vector<std::string> keys;
  for (size_t r = 0; r < who.size(); ++r) {
    keys.push_back(settings.shared_memory ? who[r].domain : "rank " + std::to_string(r));
  }
  return clusters_by(keys, rank, global_ranks, settings.clusters);
}

Clusters form_native_clusters(int rank, const std::vector<Identity>& who,
                              const std::vector<int>& global_ranks, const Settings& settings) {
  std::vector<std::string> keys;
  for (const Identity& w : who) keys.push_back(w.native.text());
  return clusters_by(keys, rank, global_ranks, settings.clusters);
}

// In the same words on all ranks, whichever differ.
void check_compatible(const std::vector<Identity>& who, const std::vector<std::string>& names) {
  const Identity& first = who[0];
  for (size_t r = 1; r < who.size(); ++r) {
    const auto refuse = [&](const std::string& what) {
      throw Error(Fault::kMismatch, static_cast<int>(r), names[r] + what);
    };
    if (who[r].version != first.version) {
      refuse(" speaks fsccl protocol " + std::to_string(who[r].version) + ", " + names[0] + " " +
             std::to_string(first.version) + ": install the same version everywhere");
    }
    if (who[r].settings != first.settings) {
      refuse(" runs with " + who[r].settings + ", " + names[0] + " with " + first.settings +
             ": set the same values everywhere");
    }
  }
}

}  // namespace fsccl
