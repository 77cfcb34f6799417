#include "mates.h"

#include <c10/util/Exception.h>
#include <sched.h>

#include <thread>

#include "combine.h"

namespace fsccl {
namespace {

bool native_type(DType t) {
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

// Where every library does the same. AVG and PREMUL_SUM are sums by the time they come here.
bool native_reduction(const Reduction& r) {
  return native_type(r.dtype) && (r.op == RedOp::kSum || r.op == RedOp::kProduct);
}

}  // namespace

template <class F>
void Mates::call(const char* what, F&& f) {
  hooks_.note(true);
  try {
    finish(f(/*async=*/static_cast<bool>(hooks_.look)));
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& e) {
    throw Error(Fault::kSystem, -1,
                std::string(what) + " of " + who_ + ": " + e.what_without_backtrace());
  } catch (const std::exception& e) {
    throw Error(Fault::kSystem, -1, std::string(what) + " of " + who_ + ": " + e.what());
  }
  hooks_.note(false);
}

// gloo's works throw when a wait with a limit is over, which takes long: glance in place of
// waiting.
void Mates::finish(const c10::intrusive_ptr<c10d::Work>& work) {
  constexpr int kYields = 200, kGlancesALook = 500;
  constexpr std::chrono::microseconds kGlance(200);
  if (!work) return;
  for (int i = 0; hooks_.look && !work->isCompleted(); ++i) {
    if (i < kYields) {
      sched_yield();
      continue;
    }
    std::this_thread::sleep_for(kGlance);
    if (i % kGlancesALook != 0) continue;
    try {
      hooks_.look();
    } catch (const Error&) {
      abandoned_ = !work->isCompleted();
      throw;
    }
  }
  work->wait();  // throws what went wrong
}

void Mates::reduce_scatter(const at::Tensor& in, const at::Tensor& out, const Reduction& r) {
  if (size_ == 1) {
    out.copy_(in, true);
    return;
  }
  if (!hooks_.look && native_reduction(r)) {
    c10d::ReduceScatterOptions o;
    o.reduceOp = r.op == RedOp::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::PRODUCT;
    at::Tensor from = in, to = out;
    return call("reduce_scatter", [&](bool async) {
      o.asyncOp = async;
      return native_->_reduce_scatter_base(to, from, o);
    });
  }
  const at::Tensor rows = at::empty({size_, out.numel()}, out.options());
  const std::vector<int64_t> sizes(static_cast<size_t>(size_), static_cast<int64_t>(out.nbytes()));
  all_to_all(in.view(at::kByte), sizes, rows.view(-1).view(at::kByte), sizes);
  combine(r, rows.unbind(0), out);
}

void Mates::all_gather(const at::Tensor& in, const at::Tensor& out) {
  if (size_ == 1) {
    if (in.data_ptr() != out.data_ptr()) out.copy_(in, true);
    return;
  }
  c10d::AllgatherOptions o;
  at::Tensor from = in, to = out;
  call("all_gather", [&](bool async) {
    o.asyncOp = async;
    return native_->_allgather_base(to, from, o);
  });
}

void Mates::broadcast(const at::Tensor& bytes, int root) {
  if (size_ == 1) return;
  c10d::BroadcastOptions o;
  o.rootRank = root;
  std::vector<at::Tensor> list{bytes};
  call("broadcast", [&](bool async) {
    o.asyncOp = async;
    return native_->broadcast(list, o);
  });
}

void Mates::all_to_all(const at::Tensor& in, const std::vector<int64_t>& in_sizes,
                       const at::Tensor& out, const std::vector<int64_t>& out_sizes) {
  if (size_ == 1) {
    out.copy_(in, true);
    return;
  }
  c10d::AllToAllOptions o;
  at::Tensor from = in, to = out;
  std::vector<int64_t> sent = in_sizes, received = out_sizes;
  call("all_to_all", [&](bool async) {
    o.asyncOp = async;
    return native_->alltoall_base(to, from, received, sent, o);
  });
}

void Mates::abort() {
  if (native_) native_->abort();
}

// A library that was given up may wait for its calls when it ends: it stays.
void Mates::shutdown() {
  if (abandoned_) {
    static auto* const kept = new std::vector<Backend>;
    kept->push_back(std::move(native_));
  } else if (native_) {
    native_->shutdown();
  }
}

}  // namespace fsccl
