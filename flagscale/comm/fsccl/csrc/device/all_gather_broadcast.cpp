// all_gather and broadcast of the device engine (engine.h). All ranks know the sizes of all parts.
#include "operation.h"

namespace fsccl {

void DeviceEngine::all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                              size_t /*width*/) {
  const size_t bytes = total_bytes(out), longest = longest_part_bytes(out);
  check_gather_sizes(in, out[static_cast<size_t>(rank_)]);
  if (bytes == 0) return;
  const auto body = [&](const CollectiveFingerprint& fingerprint) {
    const at::Tensor input = wrap_buffers({in}, at::kByte)[0];
    const Tensors outputs = wrap_buffers(out, at::kByte);
    if (run_as_kernel(nvlink::Collective::kAllGather, {input}, outputs, {}, fingerprint)) return;
    if (is_tiny(longest)) {
      log_algorithm(fingerprint, "through the control block");
      const size_t stride = aligned_stride(longest);
      const Tensors parts = tiny_parts(exchange_tiny(input, stride), stride, longest);
      for (size_t p = 0; p < outputs.size(); ++p) {
        outputs[p].copy_(slice(parts[p], 0, outputs[p].nbytes()));
      }
      return;
    }
    log_algorithm(fingerprint, "exchange, all-gather inside, pipelined");
    const at::Tensor& own_output = outputs[static_cast<size_t>(rank_)];
    if (input.data_ptr() != own_output.data_ptr()) own_output.copy_(input);
    const size_t window = chunk_elements(longest, 1, 1);
    run_pipelined(
        ceil_div(longest, window),
        [&](PipelineChunk& c, size_t k) { begin_all_gather(c, outputs, k * window, window); },
        [&](PipelineChunk& c, size_t k) { end_all_gather(c, outputs, k * window, window); });
  };
  run_operation(dense_fingerprint(OpCode::kAllGather, bytes, in.dtype(), -1, hash_of_sizes(out)), d,
                body);
}

// Sends the window [lo, lo + window) of this rank's part to its owners in the other clusters, and
// gathers the windows of this cluster's parts inside this cluster.
void DeviceEngine::begin_all_gather(PipelineChunk& c, const Tensors& out, size_t lo,
                                    size_t window) {
  const size_t ranks = clusters_.own_ranks().size(), total = ranks * window;
  const at::Tensor& part = out[static_cast<size_t>(rank_)];
  const size_t n = length_in_window(part, lo, window);
  const Interval own{own_index() * window, own_index() * window + n};
  for (int cluster = 0; cluster < clusters_.count(); ++cluster) {
    if (cluster == clusters_.own_part) continue;
    for (size_t j = 0; j < size_of(cluster); ++j) {
      const Interval common = overlap(own, equal_part(total, size_of(cluster), j));
      if (common.empty()) continue;
      send_pipe(rank_of(cluster, j))
          .send(*streams_, slice(part, lo + (common.lo - own.lo), common.size()));
    }
  }
  if (ranks > 1) {
    at::Tensor windowed =
        n == window ? slice(part, lo, n) : reserve(*scratch_, c.shard, window, at::kByte);
    if (n > 0 && n < window) slice(windowed, 0, n).copy_(slice(part, lo, n));
    const at::Tensor all = reserve(*scratch_, c.work, total, at::kByte);
    local_->all_gather(windowed, all);
    unpack_window(all, out, clusters_.own_part, lo, window);
  }
  c.native_done = streams_->record(StreamId::kNative);
}

// Receives the interval of the other clusters' windows that this rank owns, and gathers the windows
// inside this cluster.
void DeviceEngine::end_all_gather(PipelineChunk& c, const Tensors& out, size_t lo, size_t window) {
  const size_t ranks = clusters_.own_ranks().size();
  const auto count = static_cast<size_t>(clusters_.count());
  c.received.resize(count);
  c.shards.resize(count);
  streams_->wait_event(StreamId::kFromHost, c.native_done);
  for (int cluster = 0; cluster < clusters_.count(); ++cluster) {
    if (cluster == clusters_.own_part) continue;
    const size_t total = size_of(cluster) * window, shard_size = ceil_div(total, ranks);
    const Interval own = equal_part(total, ranks, own_index());
    at::Tensor received =
        reserve(*scratch_, c.received[static_cast<size_t>(cluster)], shard_size, at::kByte);
    for (size_t i = 0; i < size_of(cluster); ++i) {
      const size_t n = length_in_window(out[static_cast<size_t>(rank_of(cluster, i))], lo, window);
      const Interval common = overlap(own, {i * window, i * window + n});
      if (common.empty()) continue;
      receive_pipe(rank_of(cluster, i))
          .receive(*streams_, slice(received, common.lo - own.lo, common.size()));
    }
    streams_->wait_event(StreamId::kNative, streams_->record(StreamId::kFromHost));
    const at::Tensor all =
        reserve(*scratch_, c.shards[static_cast<size_t>(cluster)], ranks * shard_size, at::kByte);
    local_->all_gather(received, all);
    unpack_window(all, out, cluster, lo, window);
  }
}

// Copies the windows of a cluster's parts from `packed`, where they are consecutive, to the
// outputs. This rank's own output is already complete.
void DeviceEngine::unpack_window(const at::Tensor& packed, const Tensors& out, int cluster,
                                 size_t lo, size_t window) {
  for (size_t i = 0; i < size_of(cluster); ++i) {
    const int r = rank_of(cluster, i);
    const at::Tensor& part = out[static_cast<size_t>(r)];
    const size_t n = length_in_window(part, lo, window);
    if (r != rank_ && n > 0) slice(part, lo, n).copy_(slice(packed, i * window, n));
  }
}

void DeviceEngine::broadcast(const BufferList& buffer, int root, const Deadline& d) {
  if (buffer.bytes() == 0) return;
  const auto body = [&](const CollectiveFingerprint& fingerprint) {
    const at::Tensor whole = wrap_buffers({buffer}, at::kByte)[0];
    if (run_as_kernel(nvlink::Collective::kBroadcast, {whole}, {whole}, {}, fingerprint, root)) {
      return;
    }
    if (is_tiny(buffer.bytes())) {
      log_algorithm(fingerprint, "through the control block");
      const size_t stride = aligned_stride(buffer.bytes());
      const at::Tensor empty = slice(whole, 0, 0);
      const at::Tensor exchanged = exchange_tiny(root == rank_ ? whole : empty, stride);
      if (root != rank_) {
        whole.copy_(slice(exchanged, static_cast<size_t>(root) * stride, buffer.bytes()));
      }
      return;
    }
    log_algorithm(fingerprint,
                  "broadcast inside, sent by the root to owners, all-gather inside, pipelined");
    broadcast_pipelined(whole, root);
  };
  run_operation(dense_fingerprint(OpCode::kBroadcast, buffer.bytes(), buffer.dtype(), root), d, body);
}

void DeviceEngine::broadcast_pipelined(const at::Tensor& buffer, int root) {
  const auto total = static_cast<size_t>(buffer.numel());
  const size_t chunk = chunk_elements(total, 1, smallest_cluster_size());
  const size_t ranks = clusters_.own_ranks().size();
  const int root_cluster = cluster_of(root);
  const auto& root_members = clusters_.ranks[static_cast<size_t>(root_cluster)];
  const auto root_index =
      std::find(root_members.begin(), root_members.end(), root) - root_members.begin();
  const auto chunk_of = [&](size_t k) {
    return slice(buffer, k * chunk, std::min(chunk, total - k * chunk));
  };
  const auto begin = [&](PipelineChunk& c, size_t k) {
    const at::Tensor data = chunk_of(k);
    for (int cluster = 0; cluster < clusters_.count() && rank_ == root; ++cluster) {
      for (size_t j = 0; cluster != root_cluster && j < size_of(cluster); ++j) {
        const Interval interval = equal_part(data.nbytes(), size_of(cluster), j);
        if (!interval.empty()) {
          send_pipe(rank_of(cluster, j)).send(*streams_, slice(data, interval.lo, interval.size()));
        }
      }
    }
    if (root_cluster == clusters_.own_part) local_->broadcast(data, static_cast<int>(root_index));
    c.native_done = streams_->record(StreamId::kNative);
  };
  const auto end = [&](PipelineChunk& c, size_t k) {
    if (root_cluster == clusters_.own_part) return;
    const at::Tensor data = chunk_of(k);
    const size_t shard_size = ceil_div(data.nbytes(), ranks);
    const Interval own = equal_part(data.nbytes(), ranks, own_index());
    const at::Tensor received = reserve(*scratch_, c.shard, shard_size, at::kByte);
    streams_->wait_event(StreamId::kFromHost, c.native_done);
    if (!own.empty()) receive_pipe(root).receive(*streams_, slice(received, 0, own.size()));
    streams_->wait_event(StreamId::kNative, streams_->record(StreamId::kFromHost));
    if (data.nbytes() == ranks * shard_size) return local_->all_gather(received, data);
    const at::Tensor all = reserve(*scratch_, c.work, ranks * shard_size, at::kByte);
    local_->all_gather(received, all);
    data.copy_(slice(all, 0, data.nbytes()));
  };
  run_pipelined(ceil_div(total, chunk), begin, end);
}

}  // namespace fsccl
