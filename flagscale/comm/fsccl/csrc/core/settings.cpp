#include "settings.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "text.h"
#include "types.h"

namespace fsccl {
namespace {

std::string read_environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

[[noreturn]] void throw_invalid(const std::string& name, const std::string& actual,
                                const char* expected) {
  fail_usage(name + "=" + actual + ": expected " + expected);
}

template <class T>
void read_variable(const char* name, long long min_value, long long max_value, const char* expected,
                   T* out) {
  const std::string text = read_environment(name);
  if (text.empty()) return;
  long long value = 0;
  if (!parse_decimal(text, &value) || value < min_value || value > max_value)
    throw_invalid(name, text, expected);
  *out = static_cast<T>(value);
}

std::vector<int> read_node_sizes() {
  const std::string text = read_environment("FSCCL_CLUSTERS");
  std::vector<int> sizes;
  for (const std::string& entry : split(text, ',')) {
    long long value = 0;
    if (!parse_decimal(entry, &value) || value < 1 || value > 1 << 20) {
      throw_invalid("FSCCL_CLUSTERS", text, "the sizes of consecutive nodes of ranks, such as 4,4");
    }
    sizes.push_back(static_cast<int>(value));
  }
  return sizes;
}

// Reads a variable that accepts two words and returns whether the first one is set.
bool read_choice(const char* name, const char* if_true, const char* if_false) {
  const std::string text = read_environment(name);
  if (!text.empty() && text != if_true && text != if_false) {
    throw_invalid(name, text, (std::string(if_true) + " or " + if_false).c_str());
  }
  return text == if_true;
}

BoundedSettings read_bounded_settings() {
  BoundedSettings settings;
  settings.enabled = read_choice("FSCCL_TAIL", "bounded", "exact");
  settings.group_patterns = split(read_environment("FSCCL_TAIL_GROUPS"), ',');
  settings.skip_above_limit = read_choice("FSCCL_TAIL_ABOVE", "skip", "repeat");
  settings.error_feedback = read_choice("FSCCL_TAIL_FEEDBACK", "1", "0");
  read_variable("FSCCL_TAIL_BYTES", 65536, 1LL << 40, "65536 bytes or more", &settings.min_bytes);
  read_variable("FSCCL_TAIL_LIMIT", 0, 100, "0 to 100 percent", &settings.max_excluded_percent);
  read_variable("FSCCL_TAIL_RATE", 0, 1000000, "0 (learned) to 1000000 Mbit/s",
                &settings.rate_mbit);
  return settings;
}

}  // namespace

Settings Settings::from_environment() {
  constexpr long long kGiB = 1LL << 30;
  Settings s;
  s.node_sizes = read_node_sizes();
  read_variable("FSCCL_SHM", 0, 1, "0 or 1", &s.shared_memory);
  s.shm_directory = read_environment("FSCCL_SHM_DIR");
  read_variable("FSCCL_SLOT_BYTES", 4096, kGiB, "4096 to 1 GiB", &s.slot_bytes);
  read_variable("FSCCL_ONE_SHOT_BYTES", 0, kGiB, "a number of bytes", &s.one_shot_bytes);
  read_variable("FSCCL_CHUNK_BYTES", 4096, kGiB, "4096 to 1 GiB", &s.chunk_bytes);
  if (const std::string algorithm = read_environment("FSCCL_ALGO"); !algorithm.empty()) {
    s.algorithm = algorithm_of(algorithm, "FSCCL_ALGO");
  }
  read_variable("FSCCL_PIPELINE_K", 0, kMaxPipelineChunks, "0 (off) to 64 chunks", &s.pipeline_k);
  read_variable("FSCCL_PIPELINE_NELEM", 1, kMaxPipelineElements, "1 to 67108864 elements a send",
                &s.pipeline_nelem);
  read_variable("FSCCL_PIPE_BYTES", 4096, kGiB, "4096 to 1 GiB", &s.pipe_bytes);
  read_variable("FSCCL_TINY_BYTES", 0, 1 << 20, "0 to 1 MiB", &s.tiny_bytes);
  read_variable("FSCCL_KERNEL_BYTES", 0, kGiB, "0 to 1 GiB", &s.kernel_bytes);
  s.bounded = read_bounded_settings();
  s.tcp.interface = read_environment("FSCCL_SOCKET_IFNAME");
  read_variable("FSCCL_TCP_INTERFACES", 1, 16, "1 to 16", &s.tcp.interfaces);
  read_variable("FSCCL_TCP_CONNECTIONS", 1, 64, "1 to 64", &s.tcp.connections);
  read_variable("FSCCL_TCP_BUFFER", 0, kGiB, "a number of bytes", &s.tcp.buffer_bytes);
  long long seconds = s.tcp.user_timeout.count() / 1000;
  read_variable("FSCCL_TCP_USER_TIMEOUT", 1, 86400, "a number of seconds", &seconds);
  s.tcp.user_timeout = std::chrono::seconds(seconds);
  if (const std::string secret = read_environment("FSCCL_SECRET"); !secret.empty()) {
    if (!parse_key(secret, &s.secret.emplace())) {
      fail_usage(
          "FSCCL_SECRET: expected 32 hexadecimal digits, as of `openssl rand -hex 16`, found " +
          std::to_string(secret.size()) + " characters that are not");
    }
  }
  const std::string debug = read_environment("FSCCL_DEBUG");
  if (!debug.empty() && debug != "INFO" && debug != "WARN" && debug != "0") {
    throw_invalid("FSCCL_DEBUG", debug, "INFO or WARN");
  }
  s.debug = debug == "INFO";
  for (size_t* const slot : {&s.slot_bytes, &s.pipe_bytes}) *slot = *slot / 4096 * 4096;
  return s;
}

bool BoundedSettings::parse_mode(const std::string& word) {
  if (word != "bounded" && word != "exact") throw_invalid("tail", word, "bounded or exact");
  return word == "bounded";
}

bool BoundedSettings::applies_to(const std::string& description) const {
  return group_patterns.empty() ||
         std::any_of(group_patterns.begin(), group_patterns.end(), [&](const auto& pattern) {
           return fnmatch(pattern.c_str(), description.c_str(), 0) == 0;
         });
}

void Settings::check_node_sizes(int ranks_of_job) const {
  const int total_ranks = std::accumulate(node_sizes.begin(), node_sizes.end(), 0);
  if (node_sizes.empty() || total_ranks == ranks_of_job) return;
  fail_usage("FSCCL_CLUSTERS=" + read_environment("FSCCL_CLUSTERS") + ": the sizes add up to " +
             std::to_string(total_ranks) + ", but the job's ranks are " +
             std::to_string(ranks_of_job));
}

void Settings::check_pipeline() const {
  if (pipeline_k < 0 || pipeline_k > kMaxPipelineChunks) {
    throw_invalid("pipeline_k", std::to_string(pipeline_k), "0 (off) to 64 chunks");
  }
  if (pipeline_nelem < 1 || pipeline_nelem > static_cast<size_t>(kMaxPipelineElements)) {
    throw_invalid("pipeline_nelem", std::to_string(pipeline_nelem),
                  "1 to 67108864 elements a send");
  }
}

std::string Settings::agreed_settings() const {
  std::string text = "FSCCL_CLUSTERS=";
  for (size_t i = 0; i < node_sizes.size(); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(node_sizes[i]);
  }
  text += std::string(" FSCCL_SHM=") + (shared_memory ? "1" : "0");
  // Only a digest of the secret, which reveals nothing about it.
  if (secret) text += " FSCCL_SECRET=[" + text_of(derive_key(*secret, uint64_t{0})) + "]";
  text += " FSCCL_SLOT_BYTES=" + std::to_string(slot_bytes);
  text += " FSCCL_ONE_SHOT_BYTES=" + std::to_string(one_shot_bytes);
  text += " FSCCL_CHUNK_BYTES=" + std::to_string(chunk_bytes);
  text += " FSCCL_PIPE_BYTES=" + std::to_string(pipe_bytes);
  text += " FSCCL_TINY_BYTES=" + std::to_string(tiny_bytes);
  text += " FSCCL_KERNEL_BYTES=" + std::to_string(kernel_bytes);
  text += std::string(" FSCCL_ALGO=") + name_of(algorithm);
  text += " FSCCL_PIPELINE_K=" + std::to_string(pipeline_k);
  text += " FSCCL_PIPELINE_NELEM=" + std::to_string(pipeline_nelem);
  if (!bounded.enabled) return text;
  text += " FSCCL_TAIL_GROUPS=";
  for (const std::string& pattern : bounded.group_patterns) text += pattern + ",";
  return text + " FSCCL_TAIL=bounded FSCCL_TAIL_BYTES=" + std::to_string(bounded.min_bytes) +
         " FSCCL_TAIL_LIMIT=" + std::to_string(static_cast<int>(bounded.max_excluded_percent)) +
         " FSCCL_TAIL_ABOVE=" + (bounded.skip_above_limit ? "skip" : "repeat");
}

}  // namespace fsccl
