// A store for ranks that are threads of one process. It counts its operations.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "group.h"

namespace fsccl {

// Contents and counters of a store that several ranks share.
class StoreContents {
 public:
  std::mutex mutex;
  std::map<std::string, std::string> values;
  std::string lost_key;  // the first value that is set for this key is dropped
  size_t sets = 0, adds = 0, gets = 0, exists_calls = 0;
  size_t bytes = 0;         // of keys and values that were set, added to and read
  size_t exists_bytes = 0;  // of keys passed to has()
};

// One rank's access to the shared contents.
class CountingStore : public Store {
 public:
  explicit CountingStore(StoreContents& contents) : contents_(contents) {}
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> hold(contents_.mutex);
    ++contents_.sets;
    contents_.bytes += key.size() + value.size();
    if (key == contents_.lost_key) {
      contents_.lost_key.clear();
    } else {
      contents_.values[key] = value;
    }
  }
  int64_t add(const std::string& key, int64_t n) override {
    const std::lock_guard<std::mutex> hold(contents_.mutex);
    ++contents_.adds;
    contents_.bytes += key.size() + sizeof n;
    std::string& value = contents_.values[key];
    const int64_t sum = (value.empty() ? 0 : std::stoll(value)) + n;
    value = std::to_string(sum);
    return sum;
  }
  bool has(const std::vector<std::string>& keys) override {
    const std::lock_guard<std::mutex> hold(contents_.mutex);
    ++contents_.exists_calls;
    bool all = true;
    for (const auto& k : keys) {
      contents_.exists_bytes += k.size();
      all = all && contents_.values.count(k) > 0;
    }
    return all;
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    const std::lock_guard<std::mutex> hold(contents_.mutex);
    std::vector<std::string> out;
    for (const auto& k : keys) {
      ++contents_.gets;
      out.push_back(contents_.values.at(k));
      contents_.bytes += k.size() + out.back().size();
    }
    return out;
  }

 private:
  StoreContents& contents_;
};

}  // namespace fsccl
