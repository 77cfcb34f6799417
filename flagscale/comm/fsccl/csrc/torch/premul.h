// Workaround for PREMUL_SUM (multiply each input by a factor, then sum) of bfloat16 by NCCL, which
// multiplies by a wrong factor.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <vector>

#include "convert.h"

namespace fsccl {

// Returns whether inputs must be multiplied before the call of NCCL. For bfloat16, torch passes the
// factor to NCCL as a float, and NCCL reads the first two bytes of it, which are usually zero
// (pytorch#190745).
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

// Calls call(inputs, options). If needed, the inputs are multiplied copies and the reduction is
// SUM.
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

// The same for operations in place: multiplies `tensors` if needed, and calls call(options).
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
