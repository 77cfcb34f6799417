// Collectives among the ranks of this rank's own cluster, by the cluster's native library.
//
// The library is given as a c10d::Backend over the cluster's ranks (NCCL, gloo, or fsccl's shared
// memory), so nothing here is linked against it. It gets flat tensors of equal parts only.
// Reductions that it does not support or would compute differently than fsccl specifies (bitwise
// operations, 16-bit integers, MIN and MAX, which may lose a NaN) are not passed to it: then it
// only transfers the data, and every rank reduces its part itself.
//
// Calls are made with the tensors' stream as torch's current one. With one rank they copy.
//
// gloo has no abort. Its calls are therefore polled, and the group is checked about ten times a
// second. A call that is given up may still write to its tensors, so their owner must keep them:
// see abandoned(). gloo is used for transfers only, because its reduce_scatter runs on the thread
// that waits, in a wait that never ends after a rank has exited.
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
    // Called when a call of the library begins (true) or ends (false).
    std::function<void(bool)> on_call;
    // Throws if the group has failed. Empty: the library detects that itself.
    std::function<void()> check_group;
  };

  // `native` is null for a cluster of one rank. `index` is this rank's in the cluster,
  // `description` that of the cluster, for error messages.
  LocalCommunicator(Backend native, int size, int index, std::string description, Hooks hooks)
      : native_(std::move(native)),
        size_(size),
        index_(index),
        description_(std::move(description)),
        hooks_(std::move(hooks)) {}

  int size() const { return size_; }
  int index() const { return index_; }

  // in: size() parts of out's size, of r.dtype. out: the reduction of all ranks' parts number
  // index().
  void reduce_scatter(const at::Tensor& in, const at::Tensor& out, const Reduction& r);
  // in: uint8 of any size; out: size() times as many, in the order of ranks.
  void all_gather(const at::Tensor& in, const at::Tensor& out);
  void broadcast(const at::Tensor& bytes, int root);
  // in, out: uint8, consecutive parts by rank of the cluster; the sizes of the parts are in bytes.
  void all_to_all(const at::Tensor& in, const std::vector<int64_t>& in_sizes, const at::Tensor& out,
                  const std::vector<int64_t>& out_sizes);

  void abort();
  void shutdown();
  // Returns whether a call was given up; its tensors must then be kept until the process ends.
  bool abandoned() const { return abandoned_; }

 private:
  template <class F>
  void call_library(const char* op, F&& f);
  void wait_for(const c10::intrusive_ptr<c10d::Work>& work);

  Backend native_;
  int size_, index_;
  std::string description_;
  Hooks hooks_;
  bool abandoned_ = false;
};

}  // namespace fsccl
