// A store for ranks that are threads of one process.
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
};

class BoardRendezvous : public Rendezvous {
 public:
  explicit BoardRendezvous(Board& board) : board_(board) {}
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> hold(board_.mutex);
    board_.values[key] = value;
  }
  bool has(const std::vector<std::string>& keys) override {
    std::lock_guard<std::mutex> hold(board_.mutex);
    for (const auto& k : keys) {
      if (board_.values.count(k) == 0) return false;
    }
    return true;
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    std::lock_guard<std::mutex> hold(board_.mutex);
    std::vector<std::string> out;
    for (const auto& k : keys) out.push_back(board_.values.at(k));
    return out;
  }

 private:
  Board& board_;
};

}  // namespace fsccl
