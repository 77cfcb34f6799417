#include "local_communicator.h"

#include <c10/util/Exception.h>
#include <sched.h>

#include <thread>

#include "tensor_reduce.h"

namespace fsccl {
namespace {

// Returns whether every native library can reduce this type.
bool is_native_type(DType t) {
  switch (t) {
    case DType::kU8:
    case DType::kI8:
    case DType::kI32:
    case DType::kI64:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
      return true;
    default:
      return false;
  }
}

// Returns whether every native library computes this reduction as fsccl specifies it. Callers have
// already replaced AVG and PREMUL_SUM by SUM.
bool is_native_reduction(const Reduction& r) {
  return is_native_type(r.dtype) && (r.op == RedOp::kSum || r.op == RedOp::kProduct);
}

}  // namespace

template <class F>
void LocalCommunicator::call_library(const char* op, F&& start_call) {
  hooks_.on_call(true);
  try {
    wait_for(start_call(/*async=*/static_cast<bool>(hooks_.check_group)));
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& e) {
    throw Error(Fault::kSystem, -1,
                std::string(op) + " of " + description_ + ": " + e.what_without_backtrace());
  } catch (const std::exception& e) {
    throw Error(Fault::kSystem, -1, std::string(op) + " of " + description_ + ": " + e.what());
  }
  hooks_.on_call(false);
}

// Polls instead of waiting with a timeout, because a work of gloo whose wait times out throws,
// which takes long.
void LocalCommunicator::wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  constexpr int kYields = 200, kPollsPerCheck = 500;
  constexpr std::chrono::microseconds kPollInterval(200);
  if (!work) return;
  for (int i = 0; hooks_.check_group && !work->isCompleted(); ++i) {
    if (i < kYields) {
      sched_yield();
      continue;
    }
    std::this_thread::sleep_for(kPollInterval);
    if (i % kPollsPerCheck != 0) continue;
    try {
      hooks_.check_group();
    } catch (const Error&) {
      abandoned_ = !work->isCompleted();
      throw;
    }
  }
  work->wait();  // throws the error of the operation
}

void LocalCommunicator::reduce_scatter(const at::Tensor& in, const at::Tensor& out,
                                       const Reduction& r) {
  if (size_ == 1) {
    out.copy_(in, true);
    return;
  }
  if (!hooks_.check_group && is_native_reduction(r)) {
    c10d::ReduceScatterOptions o;
    o.reduceOp = r.op == RedOp::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::PRODUCT;
    at::Tensor from = in, to = out;
    return call_library("reduce_scatter", [&](bool async) {
      o.asyncOp = async;
      return native_->_reduce_scatter_base(to, from, o);
    });
  }
  const at::Tensor parts = at::empty({size_, out.numel()}, out.options());
  const std::vector<int64_t> sizes(static_cast<size_t>(size_), static_cast<int64_t>(out.nbytes()));
  all_to_all(in.view(at::kByte), sizes, parts.view(-1).view(at::kByte), sizes);
  reduce_tensors(r, parts.unbind(0), out);
}

void LocalCommunicator::all_gather(const at::Tensor& in, const at::Tensor& out) {
  if (size_ == 1) {
    if (in.data_ptr() != out.data_ptr()) out.copy_(in, true);
    return;
  }
  c10d::AllgatherOptions o;
  at::Tensor from = in, to = out;
  call_library("all_gather", [&](bool async) {
    o.asyncOp = async;
    return native_->_allgather_base(to, from, o);
  });
}

void LocalCommunicator::broadcast(const at::Tensor& bytes, int root) {
  if (size_ == 1) return;
  c10d::BroadcastOptions o;
  o.rootRank = root;
  std::vector<at::Tensor> list{bytes};
  call_library("broadcast", [&](bool async) {
    o.asyncOp = async;
    return native_->broadcast(list, o);
  });
}

void LocalCommunicator::all_to_all(const at::Tensor& in, const std::vector<int64_t>& in_sizes,
                                   const at::Tensor& out, const std::vector<int64_t>& out_sizes) {
  if (size_ == 1) {
    out.copy_(in, true);
    return;
  }
  c10d::AllToAllOptions o;
  at::Tensor from = in, to = out;
  std::vector<int64_t> send_sizes = in_sizes, recv_sizes = out_sizes;
  call_library("all_to_all", [&](bool async) {
    o.asyncOp = async;
    return native_->alltoall_base(to, from, recv_sizes, send_sizes, o);
  });
}

void LocalCommunicator::abort() {
  if (native_) native_->abort();
}

// The destructor of a backend with an abandoned call may wait for it, so such a backend is leaked.
void LocalCommunicator::shutdown() {
  if (abandoned_) {
    static auto* const leaked = new std::vector<Backend>;
    leaked->push_back(std::move(native_));
  } else if (native_) {
    native_->shutdown();
  }
}

}  // namespace fsccl
