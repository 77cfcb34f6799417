// The collectives of c10d::Backend: each checks its arguments, describes the call and dispatches it
// (dispatch.h).
#include "backend.h"
#include "dispatch.h"
#include "premul.h"

namespace fsccl {
namespace {

using c10d::OpType;

// The tensor whose device decides the path of a call with a list; undefined if the list is empty.
at::Tensor first_of(const std::vector<at::Tensor>& list) {
  return list.empty() ? at::Tensor() : list[0];
}

}  // namespace

WorkPtr TorchBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
  const at::Tensor& t = single_entry(tensors, "broadcast");
  const auto root = static_cast<int>(o.rootRank);
  check_root(root, size_, "broadcast");
  const CollectiveCall call{{OpType::BROADCAST, "fsccl:broadcast", o.asyncOp, o.timeout, t},
                            "broadcast",
                            t,
                            NvlinkOperands{nvlink::Collective::kBroadcast, t, t, nullptr, root},
                            {}};
  return dispatch(
      call, [&](c10d::Backend& b) { return b.broadcast(tensors, o); },
      [&](const Placement& placement) -> PreparedCollective {
        const ContiguousTensor buffer(t, TensorAccess::kReadWrite, placement);
        return {tensors, [buffer, root](Collectives& group, const Deadline& d) {
                  group.broadcast(buffers_of(buffer.get()), root, d);
                  buffer.write_back();
                }};
      });
}

// Returns the reduction of an all_reduce. It is exact unless the settings allow bounded
// all_reduces, which may omit contributions, for this group.
Reduction TorchBackend::all_reduction_of(const at::Tensor& t, const c10d::ReduceOp& op) const {
  Reduction r = reduction_of(t, op, size_);
  r.exact = !group_->config().settings.bounded.applies_to(getGroupDesc());
  return r;
}

WorkPtr TorchBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
  const at::Tensor& t = single_entry(tensors, "all_reduce");
  if (t.layout() != at::kStrided) return allreduce_sparse(tensors, o);
  const CollectiveCall call{{OpType::ALLREDUCE, "fsccl:all_reduce", o.asyncOp, o.timeout, t},
                            "all_reduce",
                            t,
                            NvlinkOperands{nvlink::Collective::kAllReduce, t, t, &o.reduceOp},
                            InPlaceAllReduce{tensors, o.reduceOp}};
  return dispatch(
      call,
      [&](c10d::Backend& b) {
        return with_nccl_premul_in_place(
            tensors, o, [&](auto& options) { return b.allreduce(tensors, options); });
      },
      [&](const Placement& placement) -> PreparedCollective {
        const ContiguousTensor buffer(t, TensorAccess::kReadWrite, placement);
        const Reduction r = all_reduction_of(t, o.reduceOp);
        return {tensors, [buffer, r](Collectives& group, const Deadline& d) {
                  void* const data = buffer.get().data_ptr();
                  group.all_reduce(data, data, elements_of(buffer.get(), r), r, d);
                  buffer.write_back();
                }};
      });
}

WorkPtr TorchBackend::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& o) {
  const at::Tensor first = first_of(tensors);
  const CollectiveCall call{
      {OpType::ALLREDUCE_COALESCED, "fsccl:all_reduce_coalesced", o.asyncOp, o.timeout, tensors},
      "allreduce_coalesced",
      first,
      {},
      InPlaceAllReduce{tensors, o.reduceOp}};
  return dispatch(
      call,
      [&](c10d::Backend& b) {
        return with_nccl_premul_in_place(
            tensors, o, [&](auto& options) { return b.allreduce_coalesced(tensors, options); });
      },
      [&](const Placement& placement) -> PreparedCollective {
        auto buffers = contiguous_tensors(tensors, TensorAccess::kReadWrite, placement);
        std::vector<Reduction> reductions;
        for (const at::Tensor& t : tensors) reductions.push_back(all_reduction_of(t, o.reduceOp));
        return {tensors, all_reduce_each(std::move(buffers), std::move(reductions))};
      });
}

WorkPtr TorchBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
  const at::Tensor& t = single_entry(tensors, "reduce");
  const auto root = static_cast<int>(o.rootRank);
  check_root(root, size_, "reduce");
  const CollectiveCall call{
      {OpType::REDUCE, "fsccl:reduce", o.asyncOp, o.timeout, t}, "reduce", t, {}, {}};
  return dispatch(
      call,
      [&](c10d::Backend& b) {
        if (rank_ == root) {
          return with_nccl_premul_in_place(
              tensors, o, [&](auto& options) { return b.reduce(tensors, options); });
        }
        return with_nccl_premul(
            tensors, o, [&](Tensors& inputs, auto& options) { return b.reduce(inputs, options); });
      },
      [&](const Placement& placement) -> PreparedCollective {
        const ContiguousTensor buffer(t, TensorAccess::kReadWrite, placement);
        const Reduction r = reduction_of(t, o.reduceOp, size_);
        return {tensors, [buffer, r, root](Collectives& group, const Deadline& d) {
                  void* const data = buffer.get().data_ptr();
                  group.reduce(data, data, elements_of(buffer.get(), r), r, root, d);
                  buffer.write_back();
                }};
      });
}

WorkPtr TorchBackend::allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) {
  Tensors& outputs = single_entry(out, "all_gather");
  const at::Tensor& input = single_entry(in, "all_gather");
  check_rank_count(outputs.size(), size_, "all_gather");
  check_same_dtype(outputs, input, "all_gather");
  check_own_output(outputs[static_cast<size_t>(rank_)], input, "all_gather");
  const CollectiveCall call{
      {OpType::ALLGATHER, "fsccl:all_gather", o.asyncOp, o.timeout, input}, "all_gather", input, {}, {}};
  return dispatch(
      call, [&](c10d::Backend& b) { return b.allgather(out, in, o); },
      [&](const Placement& placement) -> PreparedCollective {
        const ContiguousTensor input_buffer(input, TensorAccess::kRead, placement);
        const auto output_buffer = contiguous_tensors(outputs, TensorAccess::kWrite, placement);
        return {outputs, [input_buffer, output_buffer](Collectives& group, const Deadline& d) {
                  group.all_gather(buffers_of(input_buffer.get()), buffers_of(output_buffer), d,
                                   element_size_of(input_buffer.get()));
                  write_back(output_buffer);
                }};
      });
}

WorkPtr TorchBackend::_allgather_base(at::Tensor& out, at::Tensor& in,
                                      const c10d::AllgatherOptions& o) {
  Tensors outputs{out}, inputs{in};
  return allgather_into_tensor_coalesced(outputs, inputs, o);
}

WorkPtr TorchBackend::allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                      const c10d::AllgatherOptions& o) {
  TORCH_CHECK_VALUE(out.size() == in.size(), "fsccl: all_gather_into_tensor: ", digits(out.size()),
                    " outputs for ", digits(in.size()), " inputs");
  for (size_t i = 0; i < out.size(); ++i) {
    check_whole_and_part(out[i], in[i], size_, "all_gather_into_tensor");
  }
  const at::Tensor first = first_of(in);
  std::optional<NvlinkOperands> nvlink;
  if (in.size() == 1) nvlink.emplace(NvlinkOperands{nvlink::Collective::kAllGather, in[0], out[0]});
  const CollectiveCall call{
      {OpType::_ALLGATHER_BASE, "fsccl:_all_gather_base", o.asyncOp, o.timeout, in},
      "all_gather_into_tensor",
      first,
      nvlink,
      {}};
  return dispatch(
      call,
      [&](c10d::Backend& b) {
        return in.size() == 1 ? b._allgather_base(out[0], in[0], o)
                              : b.allgather_into_tensor_coalesced(out, in, o);
      },
      [&](const Placement& placement) -> PreparedCollective {
        const auto input_buffer = contiguous_tensors(in, TensorAccess::kRead, placement);
        const auto output_buffer = contiguous_tensors(out, TensorAccess::kWrite, placement);
        return {out, [input_buffer, output_buffer, ranks = size_](Collectives& group,
                                                                  const Deadline& d) {
                  for (size_t i = 0; i < output_buffer.size(); ++i) {
                    group.all_gather(buffers_of(input_buffer[i].get()),
                                     equal_parts(output_buffer[i].get(), ranks), d,
                                     element_size_of(input_buffer[i].get()));
                  }
                  write_back(output_buffer);
                }};
      });
}

// out[rank][i] is in[i] of that rank.
WorkPtr TorchBackend::allgather_coalesced(TensorLists& out, Tensors& in,
                                          const c10d::AllgatherOptions& o) {
  check_rank_count(out.size(), size_, "all_gather_coalesced");
  for (const Tensors& rank_outputs : out) {
    TORCH_CHECK_VALUE(rank_outputs.size() == in.size(), "fsccl: all_gather_coalesced: lists of ",
                      digits(rank_outputs.size()), " and of ", digits(in.size()), " tensors");
    for (size_t i = 0; i < in.size(); ++i) {
      check_same_dtype({rank_outputs[i]}, in[i], "all_gather_coalesced");
    }
  }
  for (size_t i = 0; i < in.size(); ++i) {
    check_own_output(out[static_cast<size_t>(rank_)][i], in[i], "all_gather_coalesced");
  }
  const at::Tensor first = first_of(in);
  const CollectiveCall call{
      {OpType::ALLGATHER_COALESCED, "fsccl:all_gather_coalesced", o.asyncOp, o.timeout, in},
      "all_gather_coalesced",
      first,
      {},
      {}};
  return dispatch(
      call, [&](c10d::Backend& b) { return b.allgather_coalesced(out, in, o); },
      [&](const Placement& placement) -> PreparedCollective {
        const auto input_buffer = contiguous_tensors(in, TensorAccess::kRead, placement);
        std::vector<ContiguousTensors> output_buffer(in.size());  // by input
        Tensors outputs;
        for (const Tensors& rank_outputs : out) {
          for (size_t i = 0; i < in.size(); ++i) {
            output_buffer[i].emplace_back(rank_outputs[i], TensorAccess::kWrite, placement);
            outputs.push_back(rank_outputs[i]);
          }
        }
        return {std::move(outputs),
                [input_buffer, output_buffer](Collectives& group, const Deadline& d) {
                  for (size_t i = 0; i < input_buffer.size(); ++i) {
                    group.all_gather(buffers_of(input_buffer[i].get()),
                                     buffers_of(output_buffer[i]), d,
                                     element_size_of(input_buffer[i].get()));
                    write_back(output_buffer[i]);
                  }
                }};
      });
}

WorkPtr TorchBackend::gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) {
  const at::Tensor& input = single_entry(in, "gather");
  const auto root = static_cast<int>(o.rootRank);
  check_root(root, size_, "gather");
  Tensors outputs;
  if (rank_ == root) {
    outputs = single_entry(out, "gather");
    check_rank_count(outputs.size(), size_, "gather");
    check_same_dtype(outputs, input, "gather");
  }
  const CollectiveCall call{
      {OpType::GATHER, "fsccl:gather", o.asyncOp, o.timeout, input}, "gather", input, {}, {}};
  return dispatch(
      call, [&](c10d::Backend& b) { return b.gather(out, in, o); },
      [&](const Placement& placement) -> PreparedCollective {
        const ContiguousTensor input_buffer(input, TensorAccess::kRead, placement);
        const auto output_buffer = contiguous_tensors(outputs, TensorAccess::kWrite, placement);
        return {outputs,
                [input_buffer, output_buffer, root](Collectives& group, const Deadline& d) {
                  group.gather(buffers_of(input_buffer.get()), buffers_of(output_buffer), root, d);
                  write_back(output_buffer);
                }};
      });
}

WorkPtr TorchBackend::scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) {
  const at::Tensor& output = single_entry(out, "scatter");
  const auto root = static_cast<int>(o.rootRank);
  check_root(root, size_, "scatter");
  Tensors inputs;
  if (rank_ == root) {
    inputs = single_entry(in, "scatter");
    check_rank_count(inputs.size(), size_, "scatter");
    check_same_dtype(inputs, output, "scatter");
  }
  const CollectiveCall call{
      {OpType::SCATTER, "fsccl:scatter", o.asyncOp, o.timeout, inputs}, "scatter", output, {}, {}};
  return dispatch(
      call, [&](c10d::Backend& b) { return b.scatter(out, in, o); },
      [&](const Placement& placement) -> PreparedCollective {
        const auto input_buffer = contiguous_tensors(inputs, TensorAccess::kRead, placement);
        const ContiguousTensor output_buffer(output, TensorAccess::kWrite, placement);
        return {out, [input_buffer, output_buffer, root](Collectives& group, const Deadline& d) {
                  group.scatter(buffers_of(input_buffer), buffers_of(output_buffer.get()), root, d);
                  output_buffer.write_back();
                }};
      });
}

WorkPtr TorchBackend::reduce_scatter(Tensors& out, TensorLists& in,
                                     const c10d::ReduceScatterOptions& o) {
  const at::Tensor& output = single_entry(out, "reduce_scatter");
  const Tensors& inputs = single_entry(in, "reduce_scatter");
  check_rank_count(inputs.size(), size_, "reduce_scatter");
  check_same_dtype(inputs, output, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs[static_cast<size_t>(rank_)].numel() == output.numel(),
                    "fsccl: reduce_scatter: the output has ", digits(output.numel()),
                    " elements for ", digits(inputs[static_cast<size_t>(rank_)].numel()));
  const CollectiveCall call{{OpType::REDUCE_SCATTER, "fsccl:reduce_scatter", o.asyncOp, o.timeout, inputs},
                            "reduce_scatter",
                            output,
                            {},
                            {}};
  return dispatch(
      call,
      [&](c10d::Backend& b) {
        return with_nccl_premul(inputs, o, [&](Tensors& multiplied, auto& options) {
          TensorLists lists{multiplied};
          return b.reduce_scatter(out, lists, options);
        });
      },
      [&](const Placement& placement) -> PreparedCollective {
        const auto input_buffer = contiguous_tensors(inputs, TensorAccess::kRead, placement);
        const ContiguousTensor output_buffer(output, TensorAccess::kWrite, placement);
        const Reduction r = reduction_of(output, o.reduceOp, size_);
        return {out, [input_buffer, output_buffer, r](Collectives& group, const Deadline& d) {
                  group.reduce_scatter(buffers_of(input_buffer), buffers_of(output_buffer.get()), r,
                                       d);
                  output_buffer.write_back();
                }};
      });
}

WorkPtr TorchBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                           const c10d::ReduceScatterOptions& o) {
  Tensors outputs{out}, inputs{in};
  return reduce_scatter_tensor_coalesced(outputs, inputs, o);
}

WorkPtr TorchBackend::reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                      const c10d::ReduceScatterOptions& o) {
  TORCH_CHECK_VALUE(out.size() == in.size(), "fsccl: reduce_scatter_tensor: ", digits(out.size()),
                    " outputs for ", digits(in.size()), " inputs");
  for (size_t i = 0; i < out.size(); ++i) {
    check_whole_and_part(in[i], out[i], size_, "reduce_scatter_tensor");
  }
  const at::Tensor first = first_of(in);
  std::optional<NvlinkOperands> nvlink;
  if (in.size() == 1) {
    nvlink.emplace(NvlinkOperands{nvlink::Collective::kReduceScatter, in[0], out[0], &o.reduceOp});
  }
  const CollectiveCall call{
      {OpType::_REDUCE_SCATTER_BASE, "fsccl:_reduce_scatter_base", o.asyncOp, o.timeout, in},
      "reduce_scatter_tensor",
      first,
      nvlink,
      {}};
  return dispatch(
      call,
      [&](c10d::Backend& b) {
        return with_nccl_premul(in, o, [&](Tensors& inputs, auto& options) {
          return inputs.size() == 1 ? b._reduce_scatter_base(out[0], inputs[0], options)
                                    : b.reduce_scatter_tensor_coalesced(out, inputs, options);
        });
      },
      [&](const Placement& placement) -> PreparedCollective {
        const auto input_buffer = contiguous_tensors(in, TensorAccess::kRead, placement);
        const auto output_buffer = contiguous_tensors(out, TensorAccess::kWrite, placement);
        std::vector<Reduction> reductions;
        for (const at::Tensor& t : out) reductions.push_back(reduction_of(t, o.reduceOp, size_));
        return {out, [input_buffer, output_buffer, reductions, ranks = size_](Collectives& group,
                                                                              const Deadline& d) {
                  for (size_t i = 0; i < output_buffer.size(); ++i) {
                    group.reduce_scatter(equal_parts(input_buffer[i].get(), ranks),
                                         buffers_of(output_buffer[i].get()), reductions[i], d);
                  }
                  write_back(output_buffer);
                }};
      });
}

WorkPtr TorchBackend::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_rows,
                                    std::vector<int64_t>& in_rows, const c10d::AllToAllOptions& o) {
  check_same_dtype({out}, in, "all_to_all_single");
  std::optional<NvlinkOperands> nvlink;
  // Only a call without split sizes guarantees that all ranks have equal parts.
  if (out_rows.empty() && in_rows.empty()) {
    TORCH_CHECK_VALUE(in.numel() == out.numel() && in.numel() % size_ == 0,
                      "fsccl: all_to_all_single: ", digits(in.numel()), " elements for ",
                      digits(out.numel()), " are not equal parts of ", digits(size_), " ranks");
    nvlink.emplace(NvlinkOperands{nvlink::Collective::kAllToAll, in, out});
  }
  const CollectiveCall call{{OpType::ALLTOALL_BASE, "fsccl:all_to_all", o.asyncOp, o.timeout, in},
                            "all_to_all_single",
                            in,
                            nvlink,
                            {}};
  return dispatch(
      call, [&](c10d::Backend& b) { return b.alltoall_base(out, in, out_rows, in_rows, o); },
      [&](const Placement& placement) -> PreparedCollective {
        const ContiguousTensor input_buffer(in, TensorAccess::kRead, placement);
        const ContiguousTensor output_buffer(out, TensorAccess::kWrite, placement);
        const auto send = split_rows(input_buffer.get(), in_rows, size_, "all_to_all_single");
        const auto recv = split_rows(output_buffer.get(), out_rows, size_, "all_to_all_single");
        // Buffers hold no reference: the tensors keep them alive.
        return {{out},
                [input_buffer, output_buffer, send, recv](Collectives& group, const Deadline& d) {
                  group.all_to_all(send, recv, d);
                  output_buffer.write_back();
                }};
      });
}

WorkPtr TorchBackend::alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) {
  check_rank_count(out.size(), size_, "all_to_all");
  check_rank_count(in.size(), size_, "all_to_all");
  check_same_dtype(in, in[0], "all_to_all");
  check_same_dtype(out, in[0], "all_to_all");
  const CollectiveCall call{
      {OpType::ALLTOALL, "fsccl:all_to_all", o.asyncOp, o.timeout, in}, "all_to_all", in[0], {}, {}};
  return dispatch(
      call, [&](c10d::Backend& b) { return b.alltoall(out, in, o); },
      [&](const Placement& placement) -> PreparedCollective {
        const auto input_buffer = contiguous_tensors(in, TensorAccess::kRead, placement);
        const auto output_buffer = contiguous_tensors(out, TensorAccess::kWrite, placement);
        return {out, [input_buffer, output_buffer](Collectives& group, const Deadline& d) {
                  group.all_to_all(buffers_of(input_buffer), buffers_of(output_buffer), d);
                  write_back(output_buffer);
                }};
      });
}

// A barrier synchronizes the host threads of the ranks. As with NCCL, when it ends all work that
// the ranks had enqueued on their devices' current streams before it has ended, too.
WorkPtr TorchBackend::barrier(const c10d::BarrierOptions& o) {
  router_.synchronize_device();
  // Runs in order with all other operations if possible, so that ranks that call another operation
  // instead get a mismatch error.
  if (router_.on_host()) {
    const at::Tensor empty = at::empty({0});
    if (auto work = run_natively(empty, [&](c10d::Backend& b) { return b.barrier(o); })) {
      return *work;
    }
  }
  return queue_.run({OpType::BARRIER, "fsccl:barrier", o.asyncOp, o.timeout}, {},
                    [this](Group& group, const Deadline& d) {
                      DeviceEngine* const engine =
                          router_.is_engine_of_hosts() ? router_.host_engine(d) : nullptr;
                      if (engine == nullptr) return group.barrier(d);
                      engine->barrier(d);
                    });
}

// `wait_all_ranks` makes no difference: the error always names all ranks that did not come, and
// waiting for several costs no more time than for one.
void TorchBackend::monitoredBarrier(const c10d::BarrierOptions& o, bool /*wait_all_ranks*/) {
  router_.synchronize_device();
  if (router_.on_host()) {
    if (const NativePtr native = router_.group_native(at::empty({0}))) {
      return native->monitoredBarrier(o, true);
    }
  }
  queue_
      .run({OpType::BARRIER, "fsccl:monitored_barrier", false, o.timeout}, {},
           [](Group& g, const Deadline& d) { g.monitored_barrier(d); })
      ->wait(kNoTimeout);
}

}  // namespace fsccl
