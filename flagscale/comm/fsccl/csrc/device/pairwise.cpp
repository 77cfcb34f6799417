// gather, scatter and all_to_all of the device engine (engine.h). A rank knows only the sizes of
// the parts that it sends and receives itself.
#include "operation.h"

namespace fsccl {
namespace {

CollectiveFingerprint pairwise_fingerprint(OpCode op, DType dtype, int root) {
  CollectiveFingerprint fingerprint;
  fingerprint.op = op;
  fingerprint.dtype = dtype;
  fingerprint.root = root;
  return fingerprint;
}

}  // namespace

void DeviceEngine::gather(const BufferList& in, const BufferLists& out, int root,
                          const Deadline& d) {
  const auto n = static_cast<size_t>(group_->size());
  BufferLists send(n), recv = out;
  send[static_cast<size_t>(root)] = in;
  recv.resize(n);
  exchange_pairs(pairwise_fingerprint(OpCode::kGather, in.dtype(), root), send, recv, d);
}

void DeviceEngine::scatter(const BufferLists& in, const BufferList& out, int root,
                           const Deadline& d) {
  const auto n = static_cast<size_t>(group_->size());
  BufferLists send = in, recv(n);
  send.resize(n);
  recv[static_cast<size_t>(root)] = out;
  exchange_pairs(pairwise_fingerprint(OpCode::kScatter, out.dtype(), root), send, recv, d);
}

void DeviceEngine::all_to_all(const BufferLists& send, const BufferLists& recv, const Deadline& d) {
  exchange_pairs(pairwise_fingerprint(OpCode::kAllToAll, recv[0].dtype(), -1), send, recv, d);
}

void DeviceEngine::exchange_pairs(const CollectiveFingerprint& operation, const BufferLists& send,
                                  const BufferLists& recv, const Deadline& d) {
  run_operation(operation, d, [&](const CollectiveFingerprint& fingerprint) {
    log_algorithm(fingerprint, "native library inside, pipes between clusters");
    check_own_part(send[static_cast<size_t>(rank_)], recv[static_cast<size_t>(rank_)]);
    const Tensors from = wrap_buffers(send, at::kByte), to = wrap_buffers(recv, at::kByte);
    streams_->fork();
    if (has_other_clusters()) exchange_across_clusters(from, to);
    exchange_within_cluster(from, to);
    streams_->join();
  });
}

void DeviceEngine::check_own_part(const BufferList& send, const BufferList& recv) const {
  if (send.bytes() == recv.bytes()) return;
  throw Error(Fault::kMismatch, rank_,
              group_->name(rank_) + " sends itself " + std::to_string(send.bytes()) +
                  " bytes and expects " + std::to_string(recv.bytes()));
}

void DeviceEngine::exchange_within_cluster(const Tensors& send, const Tensors& recv) {
  std::vector<int64_t> send_sizes, recv_sizes;
  Tensors parts;
  int64_t total = 0;
  for (const int r : clusters_.own_ranks()) {
    parts.push_back(send[static_cast<size_t>(r)]);
    send_sizes.push_back(parts.back().numel());
    recv_sizes.push_back(recv[static_cast<size_t>(r)].numel());
    total += recv_sizes.back();
  }
  const at::Tensor received = scratch_->allocate(total, at::kByte);
  local_->all_to_all(at::cat(parts), send_sizes, received, recv_sizes);
  size_t offset = 0;
  for (const int r : clusters_.own_ranks()) {
    const at::Tensor& output = recv[static_cast<size_t>(r)];
    if (output.numel() > 0) output.copy_(slice(received, offset, output.nbytes()));
    offset += output.nbytes();
  }
}

// Exchanges parts in rounds: in each, this rank sends at most one slot to every rank of the other
// clusters, and receives at most one from each.
void DeviceEngine::exchange_across_clusters(const Tensors& send, const Tensors& recv) {
  const size_t slot_bytes = config_.pipe_bytes;
  std::vector<int> peers;
  size_t longest = 0;
  for (int d = 1; d < clusters_.count(); ++d) {
    const int cluster = (clusters_.own_part + d) % clusters_.count();
    for (size_t j = 0; j < size_of(cluster); ++j) {
      // Ranks of a cluster begin with different peers.
      const int peer = rank_of(cluster, (j + own_index()) % size_of(cluster));
      peers.push_back(peer);
      longest = std::max({longest, send[static_cast<size_t>(peer)].nbytes(),
                          recv[static_cast<size_t>(peer)].nbytes()});
    }
  }
  for (size_t lo = 0; lo < longest; lo += slot_bytes) {
    for (const int peer : peers) {
      const at::Tensor& part = send[static_cast<size_t>(peer)];
      const size_t n = length_in_window(part, lo, slot_bytes);
      if (n > 0) send_pipe(peer).send(*streams_, slice(part, lo, n));
    }
    for (const int peer : peers) {
      const at::Tensor& part = recv[static_cast<size_t>(peer)];
      const size_t n = length_in_window(part, lo, slot_bytes);
      if (n > 0) receive_pipe(peer).receive(*streams_, slice(part, lo, n));
    }
  }
}

}  // namespace fsccl
