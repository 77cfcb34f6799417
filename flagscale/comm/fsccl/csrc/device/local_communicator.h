// Collectives among the ranks of this rank's own cluster, by the cluster's native library.
//
// The library comes as a c10d::Backend of its own, over the cluster's ranks: NCCL, gloo, or fsccl's
// shared memory. Nothing here links any of them. It gets only whole, equal parts of flat tensors.
// It only moves types and reductions that it does not have, or would do otherwise than fsccl
// promises (bitwise operations, 16-bit integers; a NaN in MIN and MAX); then every rank reduces its
// part itself.
//
// Calls are made with the tensors' stream as the current one. With one rank they copy.
//
// gloo has no abort. Its calls are therefore polled, with a check of the group now and then. A call
// that is given up may still write to its tensors, so their owner must keep them: see abandoned().
// gloo is used for moving only: its reduce_scatter is carried out by the waiting thread, in a wait
// that never ends when a rank is gone.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>
#include <vector>

#include "../core/types.h"

namespace fsccl {

// Called by the thread that runs the engine's operations, except abort(), which any thread may
// call. Errors of the library are thrown as Error(kSystem) with no rank at fault.
class LocalCommunicator {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  struct Hooks {
    std::function<void(bool)> on_call;  // a call of the library begins (true) or ends (false)
    // Throws when the group has failed; empty: the library detects that itself.
    std::function<void()> check_group;
  };

  // `description` of the cluster is for messages. `native` is null for a cluster of one rank.
  LocalCommunicator(Backend native, int size, int index, std::string description, Hooks hooks)
      : native_(std::move(native)),
        size_(size),
        index_(index),
        description_(std::move(description)),
        hooks_(std::move(hooks)) {}

  int size() const { return size_; }
  int index() const { return index_; }

  // in: size() parts of out's size, of r.dtype; out: the reduction of all ranks' part index().
  void reduce_scatter(const at::Tensor& in, const at::Tensor& out, const Reduction& r);
  // in: bytes; out: size() times as many, in the order of ranks.
  void all_gather(const at::Tensor& in, const at::Tensor& out);
  void broadcast(const at::Tensor& bytes, int root);
  // Sizes in bytes, by rank of the cluster, of parts that lie one after the other in flat bytes.
  void all_to_all(const at::Tensor& in, const std::vector<int64_t>& in_sizes, const at::Tensor& out,
                  const std::vector<int64_t>& out_sizes);

  void abort();
  void shutdown();
  // Returns whether a call was given up, whose tensors must stay for as long as the process lives.
  bool abandoned() const { return abandoned_; }

 private:
  template <class F>
  void call(const char* op, F&& f);
  void wait_for(const c10::intrusive_ptr<c10d::Work>& work);

  Backend native_;
  int size_, index_;
  std::string description_;
  Hooks hooks_;
  bool abandoned_ = false;
};

}  // namespace fsccl
