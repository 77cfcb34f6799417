// PREMUL_SUM where NCCL does it.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <vector>

#include "convert.h"

namespace fsccl {

// Of bfloat16, torch hands NCCL a PREMUL_SUM's factor as a float, and NCCL takes the first two
// bytes of it: zero, most often (pytorch#190745). Such inputs are multiplied here and then summed.
inline bool multiplied_here(const c10d::ReduceOp& op, const std::vector<at::Tensor>& in) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return false;
  const auto bf16 = [](const at::Tensor& t) { return t.scalar_type() == at::kBFloat16; };
  return std::any_of(in.begin(), in.end(), bf16);
}

inline at::Tensor multiplied(const at::Tensor& t, const c10d::ReduceOp& op) {
  const auto& factor = factor_of(op);
  if (!factor.tensor_factor.defined()) return t.mul(factor.double_factor);
  return t.mul(factor.tensor_factor.to(t.scalar_type()));
}

// The inputs and options for NCCL: f(inputs, options).
template <class Options, class F>
auto for_nccl(const std::vector<at::Tensor>& in, const Options& o, F f) {
  std::vector<at::Tensor> given = in;
  Options options = o;
  if (multiplied_here(o.reduceOp, in)) {
    for (at::Tensor& t : given) t = multiplied(t, o.reduceOp);
    options.reduceOp = c10d::ReduceOp::SUM;
  }
  return f(given, options);
}

// The same where results take the place of inputs.
template <class Options, class F>
auto for_nccl_in_place(std::vector<at::Tensor>& tensors, const Options& o, F f) {
  Options options = o;
  if (multiplied_here(o.reduceOp, tensors)) {
    for (at::Tensor& t : tensors) t.copy_(multiplied(t, o.reduceOp));
    options.reduceOp = c10d::ReduceOp::SUM;
  }
  return f(options);
}

}  // namespace fsccl
