// Store for tests whose ranks are threads of one process. It counts its operations and can lose a
// value.
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
  size_t sets = 0, adds = 0, gets = 0, has_calls = 0;  // numbers of operations
  size_t bytes = 0;          // of keys and values of set(), add() and get()
  size_t has_key_bytes = 0;  // of keys passed to has()
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
    ++contents_.has_calls;
    bool all = true;
    for (const auto& k : keys) {
      contents_.has_key_bytes += k.size();
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
