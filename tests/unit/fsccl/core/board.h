// A store for ranks that are threads of one process, which counts what they do.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "group.h"

namespace fsccl {

class Board {
 public:
  std::mutex mutex;
  std::map<std::string, std::string> values;
  std::string loses;  // the first value that is set for this key gets lost
  size_t sets = 0, adds = 0, gets = 0, looks = 0;
  size_t bytes = 0;         // of keys and values set, added to and got
  size_t looked_bytes = 0;  // of keys looked for
};

class BoardStore : public Store {
 public:
  explicit BoardStore(Board& board) : board_(board) {}
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> hold(board_.mutex);
    ++board_.sets;
    board_.bytes += key.size() + value.size();
    if (key == board_.loses) {
      board_.loses.clear();
    } else {
      board_.values[key] = value;
    }
  }
  int64_t add(const std::string& key, int64_t n) override {
    const std::lock_guard<std::mutex> hold(board_.mutex);
    ++board_.adds;
    board_.bytes += key.size() + sizeof n;
    std::string& value = board_.values[key];
    const int64_t sum = (value.empty() ? 0 : std::stoll(value)) + n;
    value = std::to_string(sum);
    return sum;
  }
  bool has(const std::vector<std::string>& keys) override {
    const std::lock_guard<std::mutex> hold(board_.mutex);
    ++board_.looks;
    bool all = true;
    for (const auto& k : keys) {
      board_.looked_bytes += k.size();
      all = all && board_.values.count(k) > 0;
    }
    return all;
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    const std::lock_guard<std::mutex> hold(board_.mutex);
    std::vector<std::string> out;
    for (const auto& k : keys) {
      ++board_.gets;
      out.push_back(board_.values.at(k));
      board_.bytes += k.size() + out.back().size();
    }
    return out;
  }

 private:
  Board& board_;
};

}  // namespace fsccl
