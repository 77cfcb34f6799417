// One collective call, as the paths that may carry it out need it.
//
// Every collective of the backend has the same course: its function in operations.cpp checks the
// arguments and describes the call; TorchBackend::dispatch() offers it to the paths in turn and
// returns the work of the first that takes it:
//
//   1. bounded   all_reduces in bounded time of groups with devices (bounded_path.h)
//   2. NVLink    one kernel of the NVLink engine (nvlink_path.h)
//   3. native    the native library, where it joins all ranks
//   4. general   the core Group or the device engine, whose operations have one interface
//                (core/collectives.h)
//
// Paths 1 to 3 take the tensors as they are; only the last needs contiguous ones (`prepare`).
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <optional>

#include "../core/collectives.h"
#include "../nvlink/kernel_plan.h"
#include "convert.h"
#include "operation_queue.h"

namespace fsccl {

// The operation itself, for whichever of Group and device engine does it.
using CollectiveBody = std::function<void(Collectives&, const Deadline&)>;

struct PreparedCollective {
  Tensors outputs;  // of the work
  CollectiveBody body;
};

// A collective that has a kernel of the NVLink engine, and its operands.
struct NvlinkOperands {
  nvlink::Collective collective;
  const at::Tensor& in;
  const at::Tensor& out;
  const c10d::ReduceOp* reduce_op = nullptr;  // null: no reduction
  int root = 0;                               // of a broadcast
};

// An all_reduce in place that settings may put under a bound of time.
struct InPlaceAllReduce {
  Tensors& tensors;
  const c10d::ReduceOp& reduce_op;
};

struct CollectiveCall {
  OperationInfo info;
  const char* op;               // in error messages: "all_reduce"
  const at::Tensor& reference;  // its device decides the path; undefined: the call has no tensor
  std::optional<NvlinkOperands> nvlink;      // unset: no kernel does it
  std::optional<InPlaceAllReduce> in_place;  // unset: never in bounded time
};

// Hands the whole call to a native library.
using NativeCall = c10::function_ref<WorkPtr(c10d::Backend&)>;
// Makes the tensors contiguous at a placement, and the body.
using Prepare = c10::function_ref<PreparedCollective(const Placement&)>;

}  // namespace fsccl
