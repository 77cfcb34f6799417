// PREMUL_SUM for NCCL, which multiplies bfloat16 by a wrong factor.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <vector>

#include "convert.h"

namespace fsccl {

// For bfloat16, torch hands NCCL a PREMUL_SUM's factor as a float, and NCCL takes the first two
// bytes of it: zero, most often (pytorch#190745). Such inputs are multiplied here and then summed.
inline bool needs_premul(const c10d::ReduceOp& op, const std::vector<at::Tensor>& in) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return false;
  const auto is_bf16 = [](const at::Tensor& t) { return t.scalar_type() == at::kBFloat16; };
  return std::any_of(in.begin(), in.end(), is_bf16);
}

inline at::Tensor premultiply(const at::Tensor& t, const c10d::ReduceOp& op) {
  const auto& factor = factor_of(op);
  if (!factor.tensor_factor.defined()) return t.mul(factor.double_factor);
  return t.mul(factor.tensor_factor.to(t.scalar_type()));
}

// Calls call(inputs, options) with inputs that are multiplied where they have to be.
template <class Options, class F>
auto with_nccl_premul(const std::vector<at::Tensor>& in, const Options& o, F call) {
  std::vector<at::Tensor> inputs = in;
  Options options = o;
  if (needs_premul(o.reduceOp, in)) {
    for (at::Tensor& t : inputs) t = premultiply(t, o.reduceOp);
    options.reduceOp = c10d::ReduceOp::SUM;
  }
  return call(inputs, options);
}

// The same for results that take the place of the inputs: call(options).
template <class Options, class F>
auto with_nccl_premul_in_place(std::vector<at::Tensor>& tensors, const Options& o, F call) {
  Options options = o;
  if (needs_premul(o.reduceOp, tensors)) {
    for (at::Tensor& t : tensors) t.copy_(premultiply(t, o.reduceOp));
    options.reduceOp = c10d::ReduceOp::SUM;
  }
  return call(options);
}

}  // namespace fsccl
