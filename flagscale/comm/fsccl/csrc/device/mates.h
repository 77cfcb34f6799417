// Collectives among the ranks of this rank's own cluster, by the cluster's native library.
//
// The library comes as a c10d::Backend of its own, over the cluster's ranks: NCCL, gloo, or fsccl's
// shared memory. Nothing here links any of them. It is asked for whole, even parts of flat tensors
// only. What it cannot reduce, or would reduce otherwise than fsccl promises (bitwise operations,
// 16-bit integers; a NaN in MIN and MAX), it only moves, and every rank folds its part itself.
//
// Calls are made with the tensors' track as the current stream. With one rank they copy.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>
#include <vector>

#include "../core/types.h"

namespace fsccl {

class Mates {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  // `note` is told when a call of the library begins (true) and ends. `who` is for messages.
  Mates(Backend native, int size, int index, std::string who, std::function<void(bool)> note)
      : native_(std::move(native)),
        size_(size),
        index_(index),
        who_(std::move(who)),
        note_(std::move(note)) {}

  int size() const { return size_; }
  int index() const { return index_; }
  const Backend& native() const { return native_; }

  // in: size() parts of out's size, of r.dtype; out: the reduction of everyone's part index().
  void reduce_scatter(const at::Tensor& in, const at::Tensor& out, const Reduction& r);
  // in: bytes; out: size() times as many, in the order of ranks.
  void all_gather(const at::Tensor& in, const at::Tensor& out);
  void broadcast(const at::Tensor& bytes, int root);
  // Sizes in bytes, by rank of the cluster, of what lies one after the other in flat bytes.
  void all_to_all(const at::Tensor& in, const std::vector<int64_t>& in_sizes, const at::Tensor& out,
                  const std::vector<int64_t>& out_sizes);

  void abort();
  void shutdown();

 private:
  template <class F>
  void call(const char* what, F&& f);

  Backend native_;
  int size_, index_;
  std::string who_;
  std::function<void(bool)> note_;
};

}  // namespace fsccl
