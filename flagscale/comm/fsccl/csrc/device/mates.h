// Collectives among the ranks of this rank's own cluster, by the cluster's native library.
//
// The library comes as a c10d::Backend of its own, over the cluster's ranks: NCCL, gloo, or fsccl's
// shared memory. Nothing here links any of them. It is asked for whole, even parts of flat tensors
// only. What it cannot reduce, or would reduce otherwise than fsccl promises (bitwise operations,
// 16-bit integers; a NaN in MIN and MAX), it only moves, and every rank folds its part itself.
//
// Calls are made with the tensors' track as the current stream. With one rank they copy.
//
// gloo cannot be told to give up. Its calls are therefore waited for by glances, with a look at the
// group now and then; one that is given up may still write to its tensors, so that whoever holds
// them must keep them: see abandoned(). It only moves: a reduce_scatter of its own is done while
// one waits for it, which has no end when a rank is gone.
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

  struct Hooks {
    std::function<void(bool)> note;  // told when a call of the library begins (true) and ends
    std::function<void()> look;      // throws when the group has failed; empty: the library notices
  };

  // `who` is for messages.
  Mates(Backend native, int size, int index, std::string who, Hooks hooks)
      : native_(std::move(native)),
        size_(size),
        index_(index),
        who_(std::move(who)),
        hooks_(std::move(hooks)) {}

  int size() const { return size_; }
  int index() const { return index_; }

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
  // Whether a call was given up, whose tensors must stay for as long as the process lives.
  bool abandoned() const { return abandoned_; }

 private:
  template <class F>
  void call(const char* what, F&& f);
  void finish(const c10::intrusive_ptr<c10d::Work>& work);

  Backend native_;
  int size_, index_;
  std::string who_;
  Hooks hooks_;
  bool abandoned_ = false;
};

}  // namespace fsccl
