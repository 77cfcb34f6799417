// Adapter of torch's key-value store to the core's interface.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <stdexcept>
#include <string>
#include <vector>

#include "../core/generation.h"
#include "../core/rendezvous.h"
#include "work.h"

namespace fsccl {

class TorchStore : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    rethrow_without_trace([&] { store_->set(key, value); });
  }
  int64_t add(const std::string& key, int64_t n) override {
    return rethrow_without_trace([&] { return store_->add(key, n); });
  }
  bool has(const std::vector<std::string>& keys) override {
    return rethrow_without_trace([&] { return store_->check(keys); });
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    return rethrow_without_trace([&] {
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
  // Rethrows torch's exceptions without their backtrace.
  template <class F>
  static auto rethrow_without_trace(F&& call) -> decltype(call()) {
    try {
      return call();
    } catch (const c10::Error& e) {
      throw std::runtime_error(std::string("the store: ") + e.what_without_backtrace());
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

// agree_on_generation() over a store of torch, with torch's exceptions. `global_ranks`: the ranks in
// the whole job; empty: the same as in the group.
inline std::string agree_on_generation_of_ranks(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size,
                                                std::chrono::milliseconds timeout,
                                                const std::vector<int>& global_ranks) {
  std::vector<std::string> names;
  for (size_t r = 0; r < static_cast<size_t>(size); ++r) {
    names.push_back("rank " + std::to_string(global_ranks.empty() ? static_cast<int>(r)
                                                                  : global_ranks[r]));
  }
  try {
    TorchStore adapter(store);
    return agree_on_generation(adapter, rank, names, Deadline::after(timeout));
  } catch (const std::exception& e) {
    std::rethrow_exception(torch_error(e));
  }
}

}  // namespace fsccl
