#include "hierarchical.h"

#include <algorithm>
#include <cstring>

namespace fsccl {

int HierarchicalCollectives::node_of(int rank) const {
  for (int c = 0; c < nodes_.count(); ++c) {
    const auto& members = nodes_.ranks[static_cast<size_t>(c)];
    if (std::find(members.begin(), members.end(), rank) != members.end()) return c;
  }
  return -1;
}

Interval HierarchicalCollectives::owned_interval(int node, size_t i, Interval chunk) const {
  const Interval own_range = cut(chunk.size(), size_of(node), i, kGrain);
  return {chunk.lo + own_range.lo, chunk.lo + own_range.hi};
}

std::vector<Interval> HierarchicalCollectives::owned_intervals(int node, Interval chunk) const {
  return cut_all(chunk.lo, chunk.size(), size_of(node), kGrain);
}

Interval HierarchicalCollectives::chunk_at(size_t k, size_t total, size_t width,
                                           size_t chunk_bytes) const {
  const size_t step = chunk_bytes / width * width;
  return {std::min(k * step, total), std::min((k + 1) * step, total)};
}

// Concatenates the buffers of all ranks of a node.
BufferList HierarchicalCollectives::join_node(const BufferLists& by_rank, int node) const {
  BufferList out;
  for (const int r : nodes_.ranks[static_cast<size_t>(node)]) {
    for (const Buffer& p : by_rank[static_cast<size_t>(r)].buffers()) out.add(p);
  }
  return out;
}

// Returns the interval of each rank's buffer in the result of join_node().
std::vector<Interval> HierarchicalCollectives::offsets_in_node(const BufferLists& by_rank,
                                                               int node) const {
  std::vector<Interval> out;
  size_t at = 0;
  for (const int r : nodes_.ranks[static_cast<size_t>(node)]) {
    const size_t n = by_rank[static_cast<size_t>(r)].bytes();
    out.push_back({at, at + n});
    at += n;
  }
  return out;
}

void HierarchicalCollectives::barrier(RequestBatch& requests) {
  intra_node_.barrier();
  if (nodes_.own_index == 0) {
    // Dissemination barrier: before a round, this rank has waited, directly or indirectly, for the
    // d - 1 nodes before its own.
    const int count = nodes_.count();
    for (int d = 1; d < count; d *= 2) {
      Requests pending;
      requests.send(rank_of((nodes_.own_part + d) % count, 0), BufferList(), &pending);
      requests.recv(rank_of((nodes_.own_part + count - d) % count, 0), BufferList(), &pending);
      requests.wait(&pending);
    }
  }
  intra_node_.barrier();
}

// In reduce_scatter and all_gather, ranks pass lists of sizes. Ranks of different nodes compare
// only the fingerprints of messages. Therefore there is always a message, possibly an empty one,
// between the first rank of a node and every rank of another node, so that ranks that passed
// different sizes detect it.

// Sums inside this node the data that belongs to another node, and sends each interval to its
// owners there.
void HierarchicalCollectives::scatter_to_node(RequestBatch& requests, const BufferLists& in,
                                              int node, const Reduction& r) {
  const BufferList node_data = join_node(in, node);
  const auto owners = offsets_in_node(in, node);
  const size_t width = r.width();
  const size_t chunks = std::max<size_t>(chunk_count(node_data.bytes(), width), 1);
  for (size_t k = 0; k < chunks; ++k) {
    ChunkState& state = chunk_states_[k % chunk_states_.size()];
    requests.wait(&state.sends);
    const Interval chunk = chunk_at(k, node_data.bytes(), width),
                   own_chunk_range = own_interval(chunk);
    state.partial.resize(std::max(state.partial.size(), own_chunk_range.size()));
    intra_node_.reduce_scatter(node_data, owned_intervals(nodes_.own_part, chunk),
                               BufferList(state.partial.data(), own_chunk_range.size()),
                               r.first_stage());
    for (size_t j = 0; j < owners.size(); ++j) {
      const Interval common = overlap(own_chunk_range, owners[j]);
      if (!common.empty()) {
        requests.send(
            rank_of(node, j),
            BufferList(state.partial.data() + (common.lo - own_chunk_range.lo), common.size()),
            &state.sends);
      } else if (k == 0 && nodes_.own_index == 0) {
        requests.send(rank_of(node, j), BufferList(), &state.sends);
      }
    }
  }
  for (ChunkState& state : chunk_states_) requests.wait(&state.sends);
}

void HierarchicalCollectives::reduce_scatter(RequestBatch& requests, const BufferLists& in,
                                             const BufferList& out, const Reduction& r) {
  const size_t n = out.bytes(), width = r.width(), count = static_cast<size_t>(nodes_.count());
  const auto own_offsets = offsets_in_node(in, nodes_.own_part);
  const Interval own_range = own_offsets[static_cast<size_t>(nodes_.own_index)];
  const size_t node_bytes = own_offsets.back().hi;
  const size_t chunks = std::max<size_t>(chunk_count(node_bytes, width), 1);
  // One partial sum per node, in the order of nodes; that of this node is computed last.
  scratch_.resize(std::max(scratch_.size(), count * n));
  Requests receives;
  for (int c = 0; c < nodes_.count(); ++c) {
    if (c == nodes_.own_part) continue;
    std::byte* target = scratch_.data() + static_cast<size_t>(c) * n;
    for (size_t k = 0; k < chunks; ++k) {
      const Interval chunk = chunk_at(k, node_bytes, width);
      for (size_t j = 0; j < size_of(c); ++j) {
        const Interval common = overlap(own_range, owned_interval(c, j, chunk));
        if (!common.empty()) {
          requests.recv(rank_of(c, j),
                        BufferList(target + (common.lo - own_range.lo), common.size()), &receives);
        } else if (k == 0 && j == 0) {
          requests.recv(rank_of(c, j), BufferList(), &receives);
        }
      }
    }
  }
  for (int d = 1; d < nodes_.count(); ++d) {
    scatter_to_node(requests, in, (nodes_.own_part + d) % nodes_.count(), r);
  }
  std::byte* own_sum = scratch_.data() + static_cast<size_t>(nodes_.own_part) * n;
  intra_node_.reduce_scatter(join_node(in, nodes_.own_part), own_offsets, BufferList(own_sum, n),
                             r.first_stage());
  requests.wait(&receives);
  std::vector<const void*> sources(count);
  for (size_t c = 0; c < count; ++c) sources[c] = scratch_.data() + c * n;
  fsccl::reduce(r.last_stage(), own_sum, sources.data(), nodes_.count(), n / width);
  out.copy_from(own_sum, {0, n});
}

// Every rank sends its part to the owners in all other nodes at once. Received chunks are then
// gathered inside the node, one after the other.
void HierarchicalCollectives::all_gather(RequestBatch& requests, const BufferLists& buffer) {
  std::vector<std::vector<Requests>> receives(static_cast<size_t>(nodes_.count()));
  for (int c = 0; c < nodes_.count(); ++c) {
    if (c == nodes_.own_part) continue;
    const BufferList node_data = join_node(buffer, c);
    const auto owners = offsets_in_node(buffer, c);
    auto& by_chunk = receives[static_cast<size_t>(c)];
    by_chunk.resize(std::max<size_t>(chunk_count(node_data.bytes(), 1), 1));
    for (size_t k = 0; k < by_chunk.size(); ++k) {
      const Interval own_chunk_range = own_interval(chunk_at(k, node_data.bytes(), 1));
      const bool may_be_empty = k == 0 && nodes_.own_index == 0;
      for (size_t i = 0; i < owners.size(); ++i) {
        const Interval common = overlap(own_chunk_range, owners[i]);
        if (may_be_empty || !common.empty())
          requests.recv(rank_of(c, i), node_data.slice(common), &by_chunk[k]);
      }
    }
  }
  const auto own_offsets = offsets_in_node(buffer, nodes_.own_part);
  const Interval own_range = own_offsets[static_cast<size_t>(nodes_.own_index)];
  const BufferList own_buffer = join_node(buffer, nodes_.own_part);
  Requests sends;
  for (int c = 0; c < nodes_.count(); ++c) {
    if (c == nodes_.own_part) continue;
    for (size_t k = 0; k < std::max<size_t>(chunk_count(own_buffer.bytes(), 1), 1); ++k) {
      const Interval chunk = chunk_at(k, own_buffer.bytes(), 1);
      for (size_t j = 0; j < size_of(c); ++j) {
        const Interval common = overlap(own_range, owned_interval(c, j, chunk));
        const bool may_be_empty = k == 0 && j == 0;
        if (may_be_empty || !common.empty())
          requests.send(rank_of(c, j), own_buffer.slice(common), &sends);
      }
    }
  }
  intra_node_.all_gather(own_buffer, own_offsets);
  for (int c = 0; c < nodes_.count(); ++c) {
    if (c == nodes_.own_part) continue;
    const BufferList node_data = join_node(buffer, c);
    auto& by_chunk = receives[static_cast<size_t>(c)];
    for (size_t k = 0; k < by_chunk.size(); ++k) {
      requests.wait(&by_chunk[k]);
      intra_node_.all_gather(node_data,
                             owned_intervals(nodes_.own_part, chunk_at(k, node_data.bytes(), 1)));
    }
  }
  requests.wait(&sends);
}

// Pairs in different nodes exchange messages, while pairs inside a node use shared memory.
void HierarchicalCollectives::all_to_all(RequestBatch& requests, const BufferLists& send,
                                         const BufferLists& recv, bool every_pair) {
  Requests pending;
  for (int d = 1; d < nodes_.count(); ++d) {
    const int c = (nodes_.own_part + d) % nodes_.count();
    for (const int r : nodes_.ranks[static_cast<size_t>(c)]) {
      const auto p = static_cast<size_t>(r);
      if (every_pair || recv[p].bytes() > 0) requests.recv(r, recv[p], &pending);
      if (every_pair || send[p].bytes() > 0) requests.send(r, send[p], &pending);
    }
  }
  BufferLists out, in;
  for (const int r : nodes_.own_ranks()) {
    out.push_back(send[static_cast<size_t>(r)]);
    in.push_back(recv[static_cast<size_t>(r)]);
  }
  const size_t longest = intra_node_.exchange_sizes(out, in);
  intra_node_.all_to_all(out, in, longest);
  requests.wait(&pending);
}

}  // namespace fsccl
