#include "settings.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "text.h"
#include "types.h"

namespace fsccl {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

[[noreturn]] void refuse(const std::string& name, const std::string& found, const char* expected) {
  fail_usage(name + "=" + found + ": expected " + expected);
}

template <class T>
void read_variable(const char* name, long long least, long long most, const char* expected,
                   T* out) {
  const std::string text = variable(name);
  if (text.empty()) return;
  long long value = 0;
  if (!read_number(text, &value) || value < least || value > most) refuse(name, text, expected);
  *out = static_cast<T>(value);
}

std::vector<int> read_clusters() {
  const std::string text = variable("FSCCL_CLUSTERS");
  std::vector<int> out;
  for (const std::string& one : split(text, ',')) {
    long long value = 0;
    if (!read_number(one, &value) || value < 1 || value > 1 << 20) {
      refuse("FSCCL_CLUSTERS", text, "the sizes of consecutive clusters of ranks, such as 4,4");
    }
    out.push_back(static_cast<int>(value));
  }
  return out;
}

// One of two words.
bool read_choice(const char* name, const char* yes, const char* no) {
  const std::string text = variable(name);
  if (!text.empty() && text != yes && text != no) {
    refuse(name, text, (std::string(yes) + " or " + no).c_str());
  }
  return text == yes;
}

TailSettings read_tail() {
  TailSettings t;
  t.bounded = read_choice("FSCCL_TAIL", "bounded", "exact");
  t.groups = split(variable("FSCCL_TAIL_GROUPS"), ',');
  t.skip = read_choice("FSCCL_TAIL_ABOVE", "skip", "repeat");
  t.feedback = read_choice("FSCCL_TAIL_FEEDBACK", "1", "0");
  read_variable("FSCCL_TAIL_BYTES", 65536, 1LL << 40, "65536 bytes or more", &t.bytes);
  read_variable("FSCCL_TAIL_LIMIT", 0, 100, "0 to 100 percent", &t.limit);
  read_variable("FSCCL_TAIL_RATE", 0, 1000000, "0 (learned) to 1000000 Mbit/s", &t.rate_mbit);
  return t;
}

}  // namespace

Settings Settings::from_environment() {
  constexpr long long kGiB = 1LL << 30;
  Settings s;
  s.clusters = read_clusters();
  read_variable("FSCCL_SHM", 0, 1, "0 or 1", &s.shared_memory);
  s.shm_directory = variable("FSCCL_SHM_DIR");
  read_variable("FSCCL_SLOT_BYTES", 4096, kGiB, "4096 to 1 GiB", &s.slot_bytes);
  read_variable("FSCCL_ONE_SHOT_BYTES", 0, kGiB, "a number of bytes", &s.one_shot_bytes);
  read_variable("FSCCL_CHUNK_BYTES", 4096, kGiB, "4096 to 1 GiB", &s.chunk_bytes);
  if (const std::string algorithm = variable("FSCCL_ALGO"); !algorithm.empty()) {
    s.algorithm = algorithm_of(algorithm, "FSCCL_ALGO");
  }
  read_variable("FSCCL_PIPELINE_K", 0, kMostChunks, "0 (off) to 64 chunks", &s.pipeline_k);
  read_variable("FSCCL_PIPELINE_NELEM", 1, kMostElements, "1 to 67108864 elements a send",
                &s.pipeline_nelem);
  read_variable("FSCCL_PIPE_BYTES", 4096, kGiB, "4096 to 1 GiB", &s.pipe_bytes);
  read_variable("FSCCL_TINY_BYTES", 0, 1 << 20, "0 to 1 MiB", &s.tiny_bytes);
  read_variable("FSCCL_KERNEL_BYTES", 0, kGiB, "0 to 1 GiB", &s.kernel_bytes);
  s.tail = read_tail();
  s.tcp.interface = variable("FSCCL_SOCKET_IFNAME");
  read_variable("FSCCL_TCP_INTERFACES", 1, 16, "1 to 16", &s.tcp.interfaces);
  read_variable("FSCCL_TCP_CONNECTIONS", 1, 64, "1 to 64", &s.tcp.connections);
  read_variable("FSCCL_TCP_BUFFER", 0, kGiB, "a number of bytes", &s.tcp.buffer_bytes);
  long long seconds = s.tcp.user_timeout.count() / 1000;
  read_variable("FSCCL_TCP_USER_TIMEOUT", 1, 86400, "a number of seconds", &seconds);
  s.tcp.user_timeout = std::chrono::seconds(seconds);
  if (const std::string secret = variable("FSCCL_SECRET"); !secret.empty()) {
    if (!read_key(secret, &s.secret.emplace())) {
      fail_usage(
          "FSCCL_SECRET: expected 32 hexadecimal digits, as of `openssl rand -hex 16`, found " +
          std::to_string(secret.size()) + " characters that are not");
    }
  }
  const std::string debug = variable("FSCCL_DEBUG");
  if (!debug.empty() && debug != "INFO" && debug != "WARN" && debug != "0") {
    refuse("FSCCL_DEBUG", debug, "INFO or WARN");
  }
  s.debug = debug == "INFO";
  for (size_t* const slot : {&s.slot_bytes, &s.pipe_bytes}) *slot = *slot / 4096 * 4096;
  return s;
}

bool TailSettings::says_bounded(const std::string& word) {
  if (word != "bounded" && word != "exact") refuse("tail", word, "bounded or exact");
  return word == "bounded";
}

bool TailSettings::means(const std::string& description) const {
  return groups.empty() || std::any_of(groups.begin(), groups.end(), [&](const auto& pattern) {
           return fnmatch(pattern.c_str(), description.c_str(), 0) == 0;
         });
}

void Settings::check_clusters(int ranks_of_job) const {
  const int covered = std::accumulate(clusters.begin(), clusters.end(), 0);
  if (clusters.empty() || covered == ranks_of_job) return;
  fail_usage("FSCCL_CLUSTERS=" + variable("FSCCL_CLUSTERS") + ": the sizes add up to " +
             std::to_string(covered) + ", but the job's ranks are " + std::to_string(ranks_of_job));
}

void Settings::check_pipeline() const {
  if (pipeline_k < 0 || pipeline_k > kMostChunks) {
    refuse("pipeline_k", std::to_string(pipeline_k), "0 (off) to 64 chunks");
  }
  if (pipeline_nelem < 1 || pipeline_nelem > static_cast<size_t>(kMostElements)) {
    refuse("pipeline_nelem", std::to_string(pipeline_nelem), "1 to 67108864 elements a send");
  }
}

std::string Settings::shared_text() const {
  std::string out = "FSCCL_CLUSTERS=";
  for (size_t i = 0; i < clusters.size(); ++i) {
    out += (i > 0 ? "," : "") + std::to_string(clusters[i]);
  }
  out += std::string(" FSCCL_SHM=") + (shared_memory ? "1" : "0");
  // A digest of it: who does not know the secret learns nothing of it.
  if (secret) out += " FSCCL_SECRET=[" + text_of(derived(*secret, uint64_t{0})) + "]";
  out += " FSCCL_SLOT_BYTES=" + std::to_string(slot_bytes);
  out += " FSCCL_ONE_SHOT_BYTES=" + std::to_string(one_shot_bytes);
  out += " FSCCL_CHUNK_BYTES=" + std::to_string(chunk_bytes);
  out += " FSCCL_PIPE_BYTES=" + std::to_string(pipe_bytes);
  out += " FSCCL_TINY_BYTES=" + std::to_string(tiny_bytes);
  out += " FSCCL_KERNEL_BYTES=" + std::to_string(kernel_bytes);
  out += std::string(" FSCCL_ALGO=") + name_of(algorithm);
  out += " FSCCL_PIPELINE_K=" + std::to_string(pipeline_k);
  out += " FSCCL_PIPELINE_NELEM=" + std::to_string(pipeline_nelem);
  if (!tail.bounded) return out;
  out += " FSCCL_TAIL_GROUPS=";
  for (const std::string& pattern : tail.groups) out += pattern + ",";
  return out + " FSCCL_TAIL=bounded FSCCL_TAIL_BYTES=" + std::to_string(tail.bytes) +
         " FSCCL_TAIL_LIMIT=" + std::to_string(static_cast<int>(tail.limit)) +
         " FSCCL_TAIL_ABOVE=" + (tail.skip ? "skip" : "repeat");
}

}  // namespace fsccl
