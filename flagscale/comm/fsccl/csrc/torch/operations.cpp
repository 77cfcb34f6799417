// torch's collectives in the core's words.
#include "backend.h"
#include "devices.h"
#include "premul.h"

namespace fsccl {
namespace {

using c10d::OpType;

BufferLists equal_parts(const at::Tensor& t, int parts) {
  const size_t each = t.nbytes() / static_cast<size_t>(parts);
  const auto* at = static_cast<const std::byte*>(t.const_data_ptr());
  BufferLists out;
  for (int p = 0; p < parts; ++p) out.emplace_back(at + static_cast<size_t>(p) * each, each);
  return out;
}

size_t width_of(const Flat& f) { return static_cast<size_t>(f.get().element_size()); }

// Whose device is that of the operation; undefined where there is none.
at::Tensor first_of(const std::vector<at::Tensor>& list) {
  return list.empty() ? at::Tensor() : list[0];
}

}  // namespace

TorchBackend::WorkPtr TorchBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
  const at::Tensor& t = only(tensors, "broadcast");
  const auto root = static_cast<int>(o.rootRank);
  expect_root(root, size_, "broadcast");
  if (auto w = by_nvlink({OpType::BROADCAST, "fsccl:broadcast", o.asyncOp, o.timeout},
                         nvlink::Collective::kBroadcast, t, t, nullptr, root)) {
    return *w;
  }
  if (auto w = by_native(t, [&](c10d::Backend& b) { return b.broadcast(tensors, o); })) return *w;
  const Site site = site_of(t, "broadcast");
  const Flat flat(t, Flat::kReadWrite, site);
  return run({OpType::BROADCAST, "fsccl:broadcast", o.asyncOp, o.timeout}, site, tensors,
             [flat, root](auto& g, const Deadline& d) {
               g.broadcast(buffers_of(flat.get()), root, d);
               flat.settle();
             });
}

Reduction TorchBackend::all_reduction_of(const at::Tensor& t, const c10d::ReduceOp& op) const {
  Reduction r = reduction_of(t, op, size_);
  r.whole = !group_->config().settings.tail.means(getGroupDesc());
  return r;
}

TorchBackend::WorkPtr TorchBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
  const at::Tensor& t = only(tensors, "all_reduce");
  if (t.layout() != at::kStrided) return allreduce_sparse(tensors, o);
  const Call call{OpType::ALLREDUCE, "fsccl:all_reduce", o.asyncOp, o.timeout};
  if (auto w = in_bounded_time(call, tensors, o.reduceOp)) return *w;
  if (auto w = by_nvlink(call, nvlink::Collective::kAllReduce, t, t, &o.reduceOp)) return *w;
  if (auto w = by_native(t, [&](c10d::Backend& b) {
        return for_nccl_in_place(tensors, o, [&](auto& how) { return b.allreduce(tensors, how); });
      })) {
    return *w;
  }
  const Site site = site_of(t, "all_reduce");
  const Flat flat(t, Flat::kReadWrite, site);
  const Reduction r = all_reduction_of(t, o.reduceOp);
  return run(call, site, tensors, [flat, r](auto& g, const Deadline& d) {
    void* data = flat.get().data_ptr();
    g.all_reduce(data, data, elements_of(flat.get(), r), r, d);
    flat.settle();
  });
}

TorchBackend::WorkPtr TorchBackend::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& o) {
  const at::Tensor first = first_of(tensors);
  const Call call{OpType::ALLREDUCE_COALESCED, "fsccl:all_reduce_coalesced", o.asyncOp, o.timeout};
  if (auto w = in_bounded_time(call, tensors, o.reduceOp)) return *w;
  if (auto w = by_native(first, [&](c10d::Backend& b) {
        return for_nccl_in_place(tensors, o,
                                 [&](auto& how) { return b.allreduce_coalesced(tensors, how); });
      })) {
    return *w;
  }
  const Site site = site_of(first, "allreduce_coalesced");
  auto list = flats(tensors, Flat::kReadWrite, site);
  std::vector<Reduction> how;
  for (const at::Tensor& t : tensors) how.push_back(all_reduction_of(t, o.reduceOp));
  return run(call, site, tensors, all_reduces_of(std::move(list), std::move(how)));
}

TorchBackend::WorkPtr TorchBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
  const at::Tensor& t = only(tensors, "reduce");
  const auto root = static_cast<int>(o.rootRank);
  expect_root(root, size_, "reduce");
  if (auto w = by_native(t, [&](c10d::Backend& b) {
        if (rank_ == root) {
          return for_nccl_in_place(tensors, o, [&](auto& how) { return b.reduce(tensors, how); });
        }
        return for_nccl(tensors, o, [&](Tensors& in, auto& how) { return b.reduce(in, how); });
      })) {
    return *w;
  }
  const Site site = site_of(t, "reduce");
  const Flat flat(t, Flat::kReadWrite, site);
  const Reduction r = reduction_of(t, o.reduceOp, size_);
  return run({OpType::REDUCE, "fsccl:reduce", o.asyncOp, o.timeout}, site, tensors,
             [flat, r, root](auto& g, const Deadline& d) {
               void* data = flat.get().data_ptr();
               g.reduce(data, data, elements_of(flat.get(), r), r, root, d);
               flat.settle();
             });
}

TorchBackend::WorkPtr TorchBackend::allgather(TensorLists& out, Tensors& in,
                                              const c10d::AllgatherOptions& o) {
  Tensors& results = only(out, "all_gather");
  const at::Tensor& own = only(in, "all_gather");
  expect_ranks(results.size(), size_, "all_gather");
  expect_type(results, own, "all_gather");
  expect_own_place(results[static_cast<size_t>(rank_)], own, "all_gather");
  if (auto w = by_native(own, [&](c10d::Backend& b) { return b.allgather(out, in, o); })) return *w;
  const Site site = site_of(own, "all_gather");
  const Flat from(own, Flat::kRead, site);
  const auto to = flats(results, Flat::kWrite, site);
  return run({OpType::ALLGATHER, "fsccl:all_gather", o.asyncOp, o.timeout}, site, results,
             [from, to](auto& g, const Deadline& d) {
               g.all_gather(buffers_of(from.get()), buffers_of(to), d, width_of(from));
               settle(to);
             });
}

TorchBackend::WorkPtr TorchBackend::_allgather_base(at::Tensor& out, at::Tensor& in,
                                                    const c10d::AllgatherOptions& o) {
  Tensors outs{out}, ins{in};
  return allgather_into_tensor_coalesced(outs, ins, o);
}

TorchBackend::WorkPtr TorchBackend::allgather_into_tensor_coalesced(
    Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) {
  TORCH_CHECK_VALUE(out.size() == in.size(), "fsccl: all_gather_into_tensor: ", digits(out.size()),
                    " outputs for ", digits(in.size()), " inputs");
  for (size_t i = 0; i < out.size(); ++i)
    expect_times(out[i], in[i], size_, "all_gather_into_tensor");
  const at::Tensor first = first_of(in);
  const Call call{OpType::_ALLGATHER_BASE, "fsccl:_all_gather_base", o.asyncOp, o.timeout};
  if (in.size() == 1) {
    const auto what = nvlink::Collective::kAllGather;
    if (auto w = by_nvlink(call, what, in[0], out[0], nullptr)) return *w;
  }
  if (auto w = by_native(first, [&](c10d::Backend& b) {
        return in.size() == 1 ? b._allgather_base(out[0], in[0], o)
                              : b.allgather_into_tensor_coalesced(out, in, o);
      })) {
    return *w;
  }
  const Site site = site_of(first, "all_gather_into_tensor");
  const auto from = flats(in, Flat::kRead, site);
  const auto to = flats(out, Flat::kWrite, site);
  return run(call, site, out, [from, to, n = size_](auto& g, const Deadline& d) {
               for (size_t i = 0; i < to.size(); ++i) {
                 g.all_gather(buffers_of(from[i].get()), equal_parts(to[i].get(), n), d,
                              width_of(from[i]));
               }
               settle(to);
             });
}

// out[rank][i] is in[i] of that rank.
TorchBackend::WorkPtr TorchBackend::allgather_coalesced(TensorLists& out, Tensors& in,
                                                        const c10d::AllgatherOptions& o) {
  expect_ranks(out.size(), size_, "all_gather_coalesced");
  for (const Tensors& of_rank : out) {
    TORCH_CHECK_VALUE(of_rank.size() == in.size(), "fsccl: all_gather_coalesced: lists of ",
                      digits(of_rank.size()), " and of ", digits(in.size()), " tensors");
    for (size_t i = 0; i < in.size(); ++i) expect_type({of_rank[i]}, in[i], "all_gather_coalesced");
  }
  for (size_t i = 0; i < in.size(); ++i) {
    expect_own_place(out[static_cast<size_t>(rank_)][i], in[i], "all_gather_coalesced");
  }
  const at::Tensor first = first_of(in);
  if (auto w =
          by_native(first, [&](c10d::Backend& b) { return b.allgather_coalesced(out, in, o); })) {
    return *w;
  }
  const Site site = site_of(first, "all_gather_coalesced");
  const auto from = flats(in, Flat::kRead, site);
  std::vector<std::vector<Flat>> to(in.size());
  Tensors all;
  for (const Tensors& of_rank : out) {
    for (size_t i = 0; i < in.size(); ++i) {
      to[i].emplace_back(of_rank[i], Flat::kWrite, site);
      all.push_back(of_rank[i]);
    }
  }
  return run({OpType::ALLGATHER_COALESCED, "fsccl:all_gather_coalesced", o.asyncOp, o.timeout},
             site, all, [from, to](auto& g, const Deadline& d) {
               for (size_t i = 0; i < from.size(); ++i) {
                 g.all_gather(buffers_of(from[i].get()), buffers_of(to[i]), d, width_of(from[i]));
                 settle(to[i]);
               }
             });
}

TorchBackend::WorkPtr TorchBackend::gather(TensorLists& out, Tensors& in,
                                           const c10d::GatherOptions& o) {
  const at::Tensor& own = only(in, "gather");
  const auto root = static_cast<int>(o.rootRank);
  expect_root(root, size_, "gather");
  Tensors results;
  if (rank_ == root) {
    results = only(out, "gather");
    expect_ranks(results.size(), size_, "gather");
    expect_type(results, own, "gather");
  }
  if (auto w = by_native(own, [&](c10d::Backend& b) { return b.gather(out, in, o); })) return *w;
  const Site site = site_of(own, "gather");
  const Flat from(own, Flat::kRead, site);
  const auto to = flats(results, Flat::kWrite, site);
  return run({OpType::GATHER, "fsccl:gather", o.asyncOp, o.timeout}, site, results,
             [from, to, root](auto& g, const Deadline& d) {
               g.gather(buffers_of(from.get()), buffers_of(to), root, d);
               settle(to);
             });
}

TorchBackend::WorkPtr TorchBackend::scatter(Tensors& out, TensorLists& in,
                                            const c10d::ScatterOptions& o) {
  const at::Tensor& own = only(out, "scatter");
  const auto root = static_cast<int>(o.rootRank);
  expect_root(root, size_, "scatter");
  Tensors parts;
  if (rank_ == root) {
    parts = only(in, "scatter");
    expect_ranks(parts.size(), size_, "scatter");
    expect_type(parts, own, "scatter");
  }
  if (auto w = by_native(own, [&](c10d::Backend& b) { return b.scatter(out, in, o); })) return *w;
  const Site site = site_of(own, "scatter");
  const auto from = flats(parts, Flat::kRead, site);
  const Flat to(own, Flat::kWrite, site);
  return run({OpType::SCATTER, "fsccl:scatter", o.asyncOp, o.timeout}, site, out,
             [from, to, root](auto& g, const Deadline& d) {
               g.scatter(buffers_of(from), buffers_of(to.get()), root, d);
               to.settle();
             });
}

TorchBackend::WorkPtr TorchBackend::reduce_scatter(Tensors& out, TensorLists& in,
                                                   const c10d::ReduceScatterOptions& o) {
  const at::Tensor& own = only(out, "reduce_scatter");
  const Tensors& parts = only(in, "reduce_scatter");
  expect_ranks(parts.size(), size_, "reduce_scatter");
  expect_type(parts, own, "reduce_scatter");
  TORCH_CHECK_VALUE(parts[static_cast<size_t>(rank_)].numel() == own.numel(),
                    "fsccl: reduce_scatter: the output has ", digits(own.numel()), " elements for ",
                    digits(parts[static_cast<size_t>(rank_)].numel()));
  if (auto w = by_native(own, [&](c10d::Backend& b) {
        return for_nccl(parts, o, [&](Tensors& given, auto& how) {
          TensorLists lists{given};
          return b.reduce_scatter(out, lists, how);
        });
      })) {
    return *w;
  }
  const Site site = site_of(own, "reduce_scatter");
  const auto from = flats(parts, Flat::kRead, site);
  const Flat to(own, Flat::kWrite, site);
  const Reduction r = reduction_of(own, o.reduceOp, size_);
  return run({OpType::REDUCE_SCATTER, "fsccl:reduce_scatter", o.asyncOp, o.timeout}, site, out,
             [from, to, r](auto& g, const Deadline& d) {
               g.reduce_scatter(buffers_of(from), buffers_of(to.get()), r, d);
               to.settle();
             });
}

TorchBackend::WorkPtr TorchBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                         const c10d::ReduceScatterOptions& o) {
  Tensors outs{out}, ins{in};
  return reduce_scatter_tensor_coalesced(outs, ins, o);
}

TorchBackend::WorkPtr TorchBackend::reduce_scatter_tensor_coalesced(
    Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) {
  TORCH_CHECK_VALUE(out.size() == in.size(), "fsccl: reduce_scatter_tensor: ", digits(out.size()),
                    " outputs for ", digits(in.size()), " inputs");
  for (size_t i = 0; i < out.size(); ++i) {
    expect_times(in[i], out[i], size_, "reduce_scatter_tensor");
  }
  const at::Tensor first = first_of(in);
  const Call call{OpType::_REDUCE_SCATTER_BASE, "fsccl:_reduce_scatter_base", o.asyncOp, o.timeout};
  if (in.size() == 1) {
    const auto what = nvlink::Collective::kReduceScatter;
    if (auto w = by_nvlink(call, what, in[0], out[0], &o.reduceOp)) return *w;
  }
  if (auto w = by_native(first, [&](c10d::Backend& b) {
        return for_nccl(in, o, [&](Tensors& given, auto& how) {
          return given.size() == 1 ? b._reduce_scatter_base(out[0], given[0], how)
                                   : b.reduce_scatter_tensor_coalesced(out, given, how);
        });
      })) {
    return *w;
  }
  const Site site = site_of(first, "reduce_scatter_tensor");
  const auto from = flats(in, Flat::kRead, site);
  const auto to = flats(out, Flat::kWrite, site);
  std::vector<Reduction> how;
  for (const at::Tensor& t : out) how.push_back(reduction_of(t, o.reduceOp, size_));
  return run(call, site, out, [from, to, how, n = size_](auto& g, const Deadline& d) {
               for (size_t i = 0; i < to.size(); ++i) {
                 g.reduce_scatter(equal_parts(from[i].get(), n), buffers_of(to[i].get()), how[i], d);
               }
               settle(to);
             });
}

TorchBackend::WorkPtr TorchBackend::alltoall_base(at::Tensor& out, at::Tensor& in,
                                                  std::vector<int64_t>& out_rows,
                                                  std::vector<int64_t>& in_rows,
                                                  const c10d::AllToAllOptions& o) {
  expect_type({out}, in, "all_to_all_single");
  // Only who passes no sizes knows that all ranks have equal parts.
  if (out_rows.empty() && in_rows.empty()) {
    TORCH_CHECK_VALUE(in.numel() == out.numel() && in.numel() % size_ == 0,
                      "fsccl: all_to_all_single: ", digits(in.numel()), " elements for ",
                      digits(out.numel()), " are not equal parts of ", digits(size_), " ranks");
    const Call call{OpType::ALLTOALL_BASE, "fsccl:all_to_all", o.asyncOp, o.timeout};
    if (auto w = by_nvlink(call, nvlink::Collective::kAllToAll, in, out, nullptr)) return *w;
  }
  if (auto w = by_native(
          in, [&](c10d::Backend& b) { return b.alltoall_base(out, in, out_rows, in_rows, o); })) {
    return *w;
  }
  const Site site = site_of(in, "all_to_all_single");
  const Flat from(in, Flat::kRead, site), to(out, Flat::kWrite, site);
  const auto send = split_rows(from.get(), in_rows, size_, "all_to_all_single");
  const auto recv = split_rows(to.get(), out_rows, size_, "all_to_all_single");
  return run({OpType::ALLTOALL_BASE, "fsccl:all_to_all", o.asyncOp, o.timeout}, site, {out},
             [from, to, send, recv](auto& g, const Deadline& d) {
               g.all_to_all(send, recv, d);
               to.settle();
             });
}

TorchBackend::WorkPtr TorchBackend::alltoall(Tensors& out, Tensors& in,
                                             const c10d::AllToAllOptions& o) {
  expect_ranks(out.size(), size_, "all_to_all");
  expect_ranks(in.size(), size_, "all_to_all");
  expect_type(in, in[0], "all_to_all");
  expect_type(out, in[0], "all_to_all");
  if (auto w = by_native(in[0], [&](c10d::Backend& b) { return b.alltoall(out, in, o); })) {
    return *w;
  }
  const Site site = site_of(in[0], "all_to_all");
  const auto from = flats(in, Flat::kRead, site);
  const auto to = flats(out, Flat::kWrite, site);
  return run({OpType::ALLTOALL, "fsccl:all_to_all", o.asyncOp, o.timeout}, site, out,
             [from, to](auto& g, const Deadline& d) {
               g.all_to_all(buffers_of(from), buffers_of(to), d);
               settle(to);
             });
}

// Of the ranks' hosts. What their devices were told to do before is over then, as with NCCL.
TorchBackend::WorkPtr TorchBackend::barrier(const c10d::BarrierOptions& o) {
  wait_for_device();
  // In the order of all other operations where that can be, so that ranks that call others are told.
  if (home_.native.device == "cpu") {
    const at::Tensor none = at::empty({0});
    if (auto w = by_native(none, [&](c10d::Backend& b) { return b.barrier(o); })) return *w;
  }
  return run_on_host({OpType::BARRIER, "fsccl:barrier", o.asyncOp, o.timeout}, {},
                     [this](Group& g, const Deadline& d) {
                       Engine* const engine = engine_of_hosts() ? host_engine(d) : nullptr;
                       if (engine == nullptr) return g.barrier(d);
                       engine->barrier(d);
                     });
}

// Ranks that are late cost no more time than one: `wait_all_ranks` makes no difference.
void TorchBackend::monitoredBarrier(const c10d::BarrierOptions& o, bool /*wait_all_ranks*/) {
  wait_for_device();
  if (home_.native.device == "cpu") {
    if (const NativePtr native = whole_native(at::empty({0}))) {
      return native->monitoredBarrier(o, true);
    }
  }
  run_on_host({OpType::BARRIER, "fsccl:monitored_barrier", false, o.timeout}, {},
              [](Group& g, const Deadline& d) { g.monitored_barrier(d); })
      ->wait(kNoTimeout);
}

}  // namespace fsccl
