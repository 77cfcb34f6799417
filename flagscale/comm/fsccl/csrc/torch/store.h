// torch's key-value store as the core's rendezvous.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "../core/group.h"

namespace fsccl {

class StoreRendezvous : public Rendezvous {
 public:
  explicit StoreRendezvous(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  bool has(const std::vector<std::string>& keys) override { return store_->check(keys); }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    std::vector<std::string> out;
    if (store_->hasExtendedApi()) {
      for (const auto& v : store_->multiGet(keys)) out.emplace_back(v.begin(), v.end());
    } else {
      for (const auto& key : keys) out.push_back(store_->get_to_str(key));
    }
    return out;
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace fsccl
