// How the backend does operations on devices: templates of operations.cpp.
#pragma once

#include "backend.h"

namespace fsccl {

// all_reduces of several tensors in place, by a Group or an Engine.
inline auto all_reduces_of(std::vector<Flat> list, std::vector<Reduction> how) {
  return [list = std::move(list), how = std::move(how)](auto& g, const Deadline& d) {
    for (size_t i = 0; i < list.size(); ++i) {
      void* const data = list[i].get().data_ptr();
      g.all_reduce(data, data, elements_of(list[i].get(), how[i]), how[i], d);
    }
    settle(list);
  };
}

template <class F>
TorchBackend::WorkPtr TorchBackend::run(const Call& call, const Site& site, Tensors outputs,
                                        F body) {
  if (!site.device.is_cpu()) return run_on_device(call, site, std::move(outputs), std::move(body));
  return run_on_host(call, std::move(outputs), [this, body](Group& group, const Deadline& d) {
    Engine* const engine = host_engine(d);
    if (engine == nullptr) return body(group, d);
    try {
      body(*engine, d);
    } catch (const Error&) {
      if (engine->abandoned()) new F(body);  // has the tensors, which are still written to
      throw;
    }
  });
}

// The library is told of coalescing by the first of its calls: the others are not its own.
template <class F>
TorchBackend::WorkPtr TorchBackend::call_native(const NativePtr& native, F&& call) {
  if (!coalescing_) return call(*native);
  if (!coalescing_native_) {
    native->startCoalescing();
    coalescing_native_ = native;
  }
  return call(*native);
}

template <class F>
std::optional<TorchBackend::WorkPtr> TorchBackend::by_native(const at::Tensor& t, F&& call) {
  const NativePtr native = whole_native(t);
  if (!native) return std::nullopt;
  check_kernels("a collective");
  group_->took(home_.native.library.c_str());
  return call_native(native, std::forward<F>(call));
}

}  // namespace fsccl
