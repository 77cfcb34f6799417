// Properties of a call that do not depend on the path that runs it.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>

namespace fsccl {

using TensorSpan = c10::ArrayRef<at::Tensor>;

struct OperationInfo {
  c10d::OpType type;
  const char* title;  // for the profiler and for messages: "fsccl:all_reduce"
  bool async;         // false: the call returns when the operation has ended (host memory) or has
                      // been enqueued (device)
  std::chrono::milliseconds timeout;  // c10d::kUnsetTimeout: the group's timeout
  TensorSpan inputs = {};  // for the profiler and the flight recorder; valid during the call
};

}  // namespace fsccl
