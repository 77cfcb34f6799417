// all_reduce, reduce and reduce_scatter of the device engine (engine.h), and the exchange of small
// data through the control block.
#include <cstring>

#include "operation.h"

namespace fsccl {
namespace {

// Returns the reduction inside a cluster, whose inputs are already multiplied by PREMUL_SUM's
// factor.
Reduction local_reduction(const Reduction& r) {
  Reduction first = r.first_stage();
  if (first.op == RedOp::kPremulSum) first.op = RedOp::kSum;
  return first;
}

at::Tensor apply_factor(const Reduction& r, const at::Tensor& in) {
  return r.op == RedOp::kPremulSum ? apply_premul_factor(r, in) : in;
}

}  // namespace

// All-gathers a part of each rank through the control block (shared_control_block.h), and returns a
// tensor with all parts, at multiples of `stride` bytes. A rank with an empty part only reads.
at::Tensor DeviceEngine::exchange_tiny(const at::Tensor& part, size_t stride) {
  const size_t n = control_block_->members().size();
  const uint32_t step = ++exchange_step_;
  std::byte* area = control_block_->area(step);
  const auto host_tensor = [](std::byte* data, size_t bytes) {
    return at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte);
  };
  if (part.numel() > 0) {
    host_tensor(area + static_cast<size_t>(rank_) * stride, part.nbytes()).copy_(part, true);
  }
  streams_->write_word(StreamId::kNative, control_block_->posted(rank_), step);
  for (const int p : control_block_->members()) {
    if (p != rank_) streams_->wait_word(StreamId::kNative, control_block_->posted(p), step, p);
  }
  at::Tensor all = scratch_->allocate(static_cast<int64_t>(n * stride), at::kByte);
  return all.copy_(host_tensor(area, n * stride), true);
}

// Splits the result of exchange_tiny() into the first `bytes` of each rank's part.
DeviceEngine::Tensors DeviceEngine::tiny_parts(const at::Tensor& exchanged, size_t stride,
                                               size_t bytes) const {
  Tensors out;
  for (size_t p = 0; p < control_block_->members().size(); ++p) {
    out.push_back(slice(exchanged, p * stride, bytes));
  }
  return out;
}

void DeviceEngine::all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                              const Deadline& d) {
  check_reduction(r);
  if (count == 0) return;
  const auto type = scalar_type(r.dtype);
  run_operation(dense_fingerprint(OpCode::kAllReduce, count * r.width(), r, -1), d,
                [&](const CollectiveFingerprint& fingerprint) {
                  reduce_tensor(wrap_memory(in, count, type), wrap_memory(out, count, type), r, -1,
                                fingerprint);
                });
}

void DeviceEngine::reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
                          const Deadline& d) {
  check_reduction(r);
  if (count == 0) return;
  const auto type = scalar_type(r.dtype);
  run_operation(dense_fingerprint(OpCode::kReduce, count * r.width(), r, root), d,
                [&](const CollectiveFingerprint& fingerprint) {
                  reduce_tensor(wrap_memory(in, count, type), wrap_memory(out, count, type), r,
                                root, fingerprint);
                });
}

// Reduces to all ranks (root -1), or to the root; then only the root's `out` is written.
void DeviceEngine::reduce_tensor(const at::Tensor& in, const at::Tensor& out, const Reduction& r,
                                 int root, const CollectiveFingerprint& fingerprint) {
  const auto n = static_cast<size_t>(in.numel());
  if (root < 0 && run_as_kernel(nvlink::Collective::kAllReduce, {in}, {out}, r, fingerprint)) {
    return;
  }
  if (is_tiny(in.nbytes())) {
    log_algorithm(fingerprint, "through the control block");
    const size_t stride = aligned_stride(in.nbytes());
    const at::Tensor exchanged = exchange_tiny(as_bytes(apply_factor(r, in)), stride);
    Tensors sources;
    for (const at::Tensor& part : tiny_parts(exchanged, stride, in.nbytes())) {
      sources.push_back(part.view(in.scalar_type()));
    }
    if (root < 0 || root == rank_) reduce_tensors(r.last_stage(), sources, out);
    return;
  }
  log_algorithm(fingerprint, "reduce-scatter inside, exchange, all-gather inside, pipelined");
  const size_t chunk = chunk_elements(n, r.width(), smallest_cluster_size());
  const auto chunk_of = [&](const at::Tensor& t, size_t k) {
    return slice(t, k * chunk, std::min(chunk, n - k * chunk));
  };
  const int root_cluster = root < 0 ? -1 : cluster_of(root);
  run_pipelined(
      ceil_div(n, chunk),
      [&](PipelineChunk& c, size_t k) { begin_reduce(c, chunk_of(in, k), r, root_cluster); },
      [&](PipelineChunk& c, size_t k) { end_reduce(c, chunk_of(out, k), r, root); });
}

// Reduces a chunk inside the cluster, and sends the interval of the result that this rank owns to
// all other clusters (to_cluster -1) or to one.
void DeviceEngine::begin_reduce(PipelineChunk& c, const at::Tensor& in, const Reduction& r,
                                int to_cluster) {
  const auto n = static_cast<size_t>(in.numel()), ranks = clusters_.own_ranks().size();
  const size_t shard_size = ceil_div(n, ranks);
  const auto type = in.scalar_type();
  at::Tensor source = apply_factor(r, in);
  if (ranks == 1) {
    c.shard = source;
  } else {
    if (n != ranks * shard_size) {
      at::Tensor padded = reserve(*scratch_, c.work, ranks * shard_size, type);
      slice(padded, 0, n).copy_(source);
      source = padded;
    }
    c.shard = reserve(*scratch_, c.shard_memory, shard_size, type);
    local_->reduce_scatter(source, c.shard, local_reduction(r));
  }
  c.native_done = streams_->record(StreamId::kNative);
  streams_->wait_event(StreamId::kToHost, c.native_done);
  const Interval own = equal_part(n, ranks, own_index());
  for (int cluster = 0; cluster < clusters_.count(); ++cluster) {
    if (cluster == clusters_.own_part || (to_cluster >= 0 && to_cluster != cluster)) continue;
    for (size_t j = 0; j < size_of(cluster); ++j) {
      const Interval common = overlap(own, equal_part(n, size_of(cluster), j));
      if (common.empty()) continue;
      send_pipe(rank_of(cluster, j))
          .send(*streams_, as_bytes(slice(c.shard, common.lo - own.lo, common.size())));
    }
  }
  c.sends_done = streams_->record(StreamId::kToHost);
}

// Receives the other clusters' results for the interval that this rank owns, reduces them, and
// gathers the intervals inside the cluster.
void DeviceEngine::end_reduce(PipelineChunk& c, const at::Tensor& out, const Reduction& r,
                              int root) {
  const auto n = static_cast<size_t>(out.numel()), ranks = clusters_.own_ranks().size();
  const size_t shard_size = ceil_div(n, ranks);
  const auto type = out.scalar_type();
  streams_->wait_event(StreamId::kNative, c.sends_done);
  if (root >= 0 && cluster_of(root) != clusters_.own_part) return;
  const Interval own = equal_part(n, ranks, own_index());
  at::Tensor sum = c.shard;
  if (has_other_clusters() || r.op == RedOp::kAvg) {
    sum = reserve(*scratch_, c.sum, shard_size, type);
    c.received.resize(static_cast<size_t>(clusters_.count()));
    Tensors sources;
    streams_->wait_event(StreamId::kFromHost, c.native_done);
    for (int cluster = 0; cluster < clusters_.count(); ++cluster) {
      if (cluster == clusters_.own_part) {
        sources.push_back(slice(c.shard, 0, own.size()));
        continue;
      }
      at::Tensor received =
          reserve(*scratch_, c.received[static_cast<size_t>(cluster)], shard_size, type);
      for (size_t j = 0; j < size_of(cluster); ++j) {
        const Interval common = overlap(own, equal_part(n, size_of(cluster), j));
        if (common.empty()) continue;
        receive_pipe(rank_of(cluster, j))
            .receive(*streams_, as_bytes(slice(received, common.lo - own.lo, common.size())));
      }
      sources.push_back(slice(received, 0, own.size()));
    }
    const StreamScope from_host(*streams_, StreamId::kFromHost);
    if (!own.empty()) reduce_tensors(r.last_stage(), sources, slice(sum, 0, own.size()));
    streams_->wait_event(StreamId::kNative, streams_->record(StreamId::kFromHost));
  }
  const bool needs_result = root < 0 || root == rank_;
  if (needs_result && n == ranks * shard_size) {
    return local_->all_gather(as_bytes(sum), as_bytes(out));
  }
  at::Tensor whole = reserve(*scratch_, c.work, ranks * shard_size, type);
  local_->all_gather(as_bytes(sum), as_bytes(whole));
  if (needs_result) out.copy_(slice(whole, 0, n));
}

void DeviceEngine::reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                                  const Deadline& d) {
  check_reduction(r);
  const size_t bytes = total_bytes(in), width = r.width();
  if (bytes == 0) return;
  const auto body = [&](const CollectiveFingerprint& fingerprint) {
    const auto type = scalar_type(r.dtype);
    const Tensors parts = wrap_buffers(in, type);
    const at::Tensor result = wrap_buffers({out}, type)[0];
    if (run_as_kernel(nvlink::Collective::kReduceScatter, parts, {result}, r, fingerprint)) return;
    if (is_tiny(bytes)) {
      log_algorithm(fingerprint, "through the control block");
      return reduce_scatter_tiny(parts, result, r);
    }
    log_algorithm(fingerprint, "reduce-scatter inside, exchange, pipelined");
    const size_t longest = longest_part_bytes(in) / width;
    const size_t window = chunk_elements(longest, width, 1);
    run_pipelined(
        ceil_div(longest, window),
        [&](PipelineChunk& c, size_t k) { begin_reduce_scatter(c, parts, k * window, window, r); },
        [&](PipelineChunk& c, size_t k) {
          end_reduce_scatter(c, parts, result, k * window, window, r);
        });
  };
  run_operation(dense_fingerprint(OpCode::kReduceScatter, bytes, r, -1, hash_of_sizes(in)), d,
                body);
}

void DeviceEngine::reduce_scatter_tiny(const Tensors& parts, const at::Tensor& out,
                                       const Reduction& r) {
  const at::Tensor whole = apply_factor(r, at::cat(parts));
  size_t offset = 0;
  for (int p = 0; p < rank_; ++p) offset += parts[static_cast<size_t>(p)].nbytes();
  const size_t stride = aligned_stride(whole.nbytes());
  const at::Tensor exchanged = exchange_tiny(as_bytes(whole), stride);
  Tensors sources;
  for (const at::Tensor& part : tiny_parts(exchanged, stride, whole.nbytes())) {
    sources.push_back(slice(part, offset, out.nbytes()).view(out.scalar_type()));
  }
  if (out.numel() > 0) reduce_tensors(r.last_stage(), sources, out);
}

// For each cluster: reduces the window [lo, lo + window) of the parts for that cluster's ranks
// inside this cluster, and sends the interval of the result that this rank owns to those ranks.
void DeviceEngine::begin_reduce_scatter(PipelineChunk& c, const Tensors& in, size_t lo,
                                        size_t window, const Reduction& r) {
  const size_t ranks = clusters_.own_ranks().size();
  const auto count = static_cast<size_t>(clusters_.count());
  const auto type = in[0].scalar_type();
  c.shards.resize(count);
  c.shard_memories.resize(count);
  for (int d = 1; d <= clusters_.count(); ++d) {
    const int cluster = (clusters_.own_part + d) % clusters_.count();
    const size_t total = size_of(cluster) * window, shard_size = ceil_div(total, ranks);
    at::Tensor packed = reserve(*scratch_, c.work, ranks * shard_size, type);
    for (size_t j = 0; j < size_of(cluster); ++j) {
      const at::Tensor& part = in[static_cast<size_t>(rank_of(cluster, j))];
      const size_t n = length_in_window(part, lo, window);
      if (n > 0) slice(packed, j * window, n).copy_(apply_factor(r, slice(part, lo, n)));
    }
    at::Tensor& shard = c.shards[static_cast<size_t>(cluster)];
    shard = reserve(*scratch_, c.shard_memories[static_cast<size_t>(cluster)], shard_size, type);
    local_->reduce_scatter(packed, shard, local_reduction(r));
    if (cluster == clusters_.own_part) continue;
    streams_->wait_event(StreamId::kToHost, streams_->record(StreamId::kNative));
    const Interval own = equal_part(total, ranks, own_index());
    for (size_t j = 0; j < size_of(cluster); ++j) {
      const size_t n = length_in_window(in[static_cast<size_t>(rank_of(cluster, j))], lo, window);
      const Interval common = overlap(own, {j * window, j * window + n});
      if (common.empty()) continue;
      send_pipe(rank_of(cluster, j))
          .send(*streams_, as_bytes(slice(shard, common.lo - own.lo, common.size())));
    }
  }
  c.native_done = streams_->record(StreamId::kNative);
  c.sends_done = streams_->record(StreamId::kToHost);
}

void DeviceEngine::end_reduce_scatter(PipelineChunk& c, const Tensors& in, const at::Tensor& out,
                                      size_t lo, size_t window, const Reduction& r) {
  const size_t ranks = clusters_.own_ranks().size(), total = ranks * window;
  const size_t n = length_in_window(in[static_cast<size_t>(rank_)], lo, window);
  const Interval own{own_index() * window, own_index() * window + n};
  c.received.resize(static_cast<size_t>(clusters_.count()));
  Tensors sources;
  streams_->wait_event(StreamId::kNative, c.sends_done);
  streams_->wait_event(StreamId::kFromHost, c.native_done);
  for (int cluster = 0; cluster < clusters_.count(); ++cluster) {
    if (cluster == clusters_.own_part) {
      sources.push_back(slice(c.shards[static_cast<size_t>(cluster)], 0, n));
      continue;
    }
    at::Tensor received =
        reserve(*scratch_, c.received[static_cast<size_t>(cluster)], window, out.scalar_type());
    for (size_t i = 0; i < size_of(cluster); ++i) {
      const Interval common = overlap(own, equal_part(total, size_of(cluster), i));
      if (common.empty()) continue;
      receive_pipe(rank_of(cluster, i))
          .receive(*streams_, as_bytes(slice(received, common.lo - own.lo, common.size())));
    }
    sources.push_back(slice(received, 0, n));
  }
  const StreamScope from_host(*streams_, StreamId::kFromHost);
  if (n > 0) reduce_tensors(r.last_stage(), sources, slice(out, lo, n));
  streams_->wait_event(StreamId::kNative, streams_->record(StreamId::kFromHost));
}

}  // namespace fsccl
