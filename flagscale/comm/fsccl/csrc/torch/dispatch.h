// Description of a collective call for the paths that may run it.
//
// Every collective of the backend proceeds in the same way: its function in operations.cpp checks
// the arguments and describes the call; TorchBackend::dispatch() offers the call to the paths in
// turn and returns the work of the first one that accepts it:
//
//   1. bounded   all_reduces in bounded time in groups with devices (bounded_path.h)
//   2. NVLink    one kernel of the NVLink engine (nvlink_path.h)
//   3. native    the native library, such as NCCL, if all ranks of the group use the same one
//   4. general   the core Group or the device engine, which share an interface (core/collectives.h)
//
// Paths 1 to 3 accept any tensors; only the last one needs contiguous ones (`prepare`).
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

// The operation itself; it is called with the core Group or the device engine.
using CollectiveBody = std::function<void(Collectives&, const Deadline&)>;

struct PreparedCollective {
  Tensors outputs;  // result of the c10d::Work
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

// Operands of an all_reduce in place, which may run in bounded time.
struct InPlaceAllReduce {
  Tensors& tensors;
  const c10d::ReduceOp& reduce_op;
};

struct CollectiveCall {
  OperationInfo info;
  const char* op;               // in error messages: "all_reduce"
  const at::Tensor& reference;  // its device decides the path; undefined: the call has no tensor
  std::optional<NvlinkOperands> nvlink;      // unset: the NVLink engine has no kernel for it
  std::optional<InPlaceAllReduce> in_place;  // unset: never runs in bounded time
};

// Passes the whole call to a native library.
using NativeCall = c10::function_ref<WorkPtr(c10d::Backend&)>;
// Makes the tensors contiguous on the device of a placement, and creates the body.
using Prepare = c10::function_ref<PreparedCollective(const Placement&)>;

}  // namespace fsccl
