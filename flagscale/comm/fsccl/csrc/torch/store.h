// torch's key-value store as the core's.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <stdexcept>
#include <string>
#include <vector>

#include "../core/rendezvous.h"

namespace fsccl {

class TorchStore : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    in_words([&] { store_->set(key, value); });
  }
  int64_t add(const std::string& key, int64_t n) override {
    return in_words([&] { return store_->add(key, n); });
  }
  bool has(const std::vector<std::string>& keys) override {
    return in_words([&] { return store_->check(keys); });
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    return in_words([&] {
      std::vector<std::string> out;
      if (store_->hasExtendedApi()) {
        for (const auto& v : store_->multiGet(keys)) out.emplace_back(v.begin(), v.end());
      } else {
        for (const auto& key : keys) out.push_back(store_->get_to_str(key));
      }
      return out;
    });
  }

 private:
  // torch's exceptions carry a trace of calls.
  template <class F>
  static auto in_words(F&& call) -> decltype(call()) {
    try {
      return call();
    } catch (const c10::Error& e) {
      throw std::runtime_error(std::string("the store: ") + e.what_without_backtrace());
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace fsccl
