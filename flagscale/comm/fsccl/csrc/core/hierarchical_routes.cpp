// Operations of HierarchicalCollectives that follow routes (route.h): all_reduce, reduce,
// broadcast.
//
// The ranks of a node reduce-scatter a chunk, so that each owns a part of every segment. The owners
// execute the hops, each for its part, and an all-gather inside the node completes the chunk. If
// the operation is in place, a received result overwrites the input. That is safe: the result of a
// byte depends on this rank's contribution, which therefore has been sent before.
#include <algorithm>

#include "hierarchical.h"

namespace fsccl {
namespace {

// Returns the stream (request_batch.h) of a segment's messages. Partial sums and results are in
// different streams, because their order between each other may differ between sender and receiver.
size_t stream_of(size_t segment, bool result) { return 1 + 2 * segment + (result ? 1 : 0); }

}  // namespace

int HierarchicalCollectives::index_in_node(int rank, int node) const {
  const auto& members = nodes_.ranks[static_cast<size_t>(node)];
  return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
}

// Returns the part of a segment that rank i of a node owns.
Interval HierarchicalCollectives::part_of(const RoutedOperation& op, size_t segment, int node,
                                          size_t i, Interval chunk) const {
  const Interval s = cut(chunk.size(), op.route.segments, segment, kGrain);
  return owned_interval(node, i, {chunk.lo + s.lo, chunk.lo + s.hi});
}

Interval HierarchicalCollectives::own_part_of(const RoutedOperation& op, size_t segment,
                                              Interval chunk) const {
  return part_of(op, segment, nodes_.own_part, static_cast<size_t>(nodes_.own_index), chunk);
}

// Returns the chunk ordered by owner: all parts of the first rank of the node, then all of the
// second, and so on. `bounds` receives the interval of each rank in this order.
BufferList HierarchicalCollectives::order_by_owner(const RoutedOperation& op,
                                                   const BufferList& buffer, Interval chunk,
                                                   std::vector<Interval>* bounds) const {
  BufferList out;
  for (size_t i = 0; i < size_of(nodes_.own_part); ++i) {
    const size_t from = out.bytes();
    for (size_t s = 0; s < op.route.segments; ++s) {
      buffer.visit(part_of(op, s, nodes_.own_part, i, chunk),
                   [&](std::byte* p, size_t n, size_t) { out.add({p, n}); });
    }
    bounds->push_back({from, out.bytes()});
  }
  return out;
}

Algorithm HierarchicalCollectives::best_algorithm(size_t bytes) const {
  // In the direct exchange, data crosses the network once instead of twice or more. With many
  // nodes, connections between all of them cost more than the longer path through a tree.
  constexpr size_t kMaxExchangedBytes = 512 << 10, kMaxExchangePeers = 15;
  const auto peer_count = static_cast<size_t>(nodes_.count() - 1);
  const bool direct = peer_count == 1 ||
                      (peer_count <= kMaxExchangePeers && bytes * peer_count <= kMaxExchangedBytes);
  if (direct) return Algorithm::kAuto;
  return peer_count > kMaxExchangePeers ? Algorithm::kTree : Algorithm::kTranspose;
}

// Built once per algorithm: the route is the same for every all_reduce.
const Route& HierarchicalCollectives::route_for(Algorithm algorithm) {
  std::optional<Route>& cached = routes_[static_cast<size_t>(algorithm)];
  if (cached) return *cached;
  const int count = nodes_.count(), me = nodes_.own_part;
  switch (algorithm) {
    case Algorithm::kAuto:
      return cached.emplace(exchange_route(count, me));
    case Algorithm::kRing:
      return cached.emplace(ring_route(count, me));
    case Algorithm::kTree:
      return cached.emplace(tree_route(count, me));
    case Algorithm::kTranspose:
      return cached.emplace(transpose_route(count, me));
  }
  fail_usage("no such algorithm");
}

void HierarchicalCollectives::all_reduce(RequestBatch& requests, const void* in, void* out,
                                         size_t count, const Reduction& r, Algorithm algorithm) {
  // A segment is a part of a chunk. Chunks of large buffers are larger, so that segments do not
  // become small. Trees have smaller chunks, because more of them must be in flight, the more the
  // higher the tree is.
  constexpr size_t kMaxChunkFactor = 4, kMinChunks = 8, kMinTreeChunk = 64 << 10;
  const size_t total = count * r.width();
  RoutedOperation op{route_for(algorithm)};
  op.in = BufferList(in, total);
  op.out = BufferList(out, total);
  op.reduction = r;
  op.chunk = std::clamp(total / kMinChunks, chunk_bytes_, kMaxChunkFactor * chunk_bytes_);
  if (algorithm == Algorithm::kAuto) {
    op.chunk = chunk_bytes_;
  } else if (algorithm == Algorithm::kTree) {
    op.chunk =
        std::clamp(total / kMinChunks, std::min(chunk_bytes_ / 2, kMinTreeChunk), chunk_bytes_ / 2);
  }
  run_route(requests, op);
}

void HierarchicalCollectives::reduce(RequestBatch& requests, const void* in, void* out,
                                     size_t count, const Reduction& r, int root) {
  const int root_node = node_of(root);
  const size_t total = count * r.width();
  const Route route = reduce_route(nodes_.count(), nodes_.own_part, root_node);
  RoutedOperation op{route};
  op.in = BufferList(in, total);
  op.reduction = r;
  op.chunk = chunk_bytes_;
  op.gathers = nodes_.own_part == root_node;
  if (op.gathers && index_in_node(root, root_node) == nodes_.own_index) {
    op.out = BufferList(out, total);
  } else if (op.gathers) {
    // All chunks use the same memory: this rank discards the result, and a chunk is finished as
    // soon as it has been summed.
    scratch_.resize(std::max(scratch_.size(), std::min(total, chunk_bytes_)));
    for (size_t k = 0; k < chunk_count(total, r.width()); ++k) {
      op.out.add({scratch_.data(), chunk_at(k, total, r.width()).size()});
    }
  }
  run_route(requests, op);
}

void HierarchicalCollectives::broadcast(RequestBatch& requests, const BufferList& buffer,
                                        int root) {
  const int from = node_of(root);
  const Route route = broadcast_route(nodes_.count(), nodes_.own_part, from);
  RoutedOperation op{route};
  op.out = buffer;
  op.reduction.dtype = DType::kOpaque;
  op.chunk = chunk_bytes_;
  if (from == nodes_.own_part) op.source_index = index_in_node(root, from);
  op.gathers = from != nodes_.own_part;
  run_route(requests, op);
}

void HierarchicalCollectives::run_route(RequestBatch& requests, const RoutedOperation& op) {
  const Route& route = op.route;
  const size_t width = op.reduction.width(), total = std::max(op.in.bytes(), op.out.bytes());
  const size_t chunks = chunk_count(total, width, op.chunk);
  const size_t receive_ahead = std::max(kReceiveAhead, route.stride);
  const size_t chunks_in_flight = (route.end_time + receive_ahead) / route.stride + 2;
  if (chunk_states_.size() < chunks_in_flight) chunk_states_.resize(chunks_in_flight);
  const auto state_of = [&](size_t k) -> ChunkState& {
    return chunk_states_[k % chunks_in_flight];
  };
  const auto chunk = [&](size_t k) { return chunk_at(k, total, width, op.chunk); };
  size_t receives_posted = 0, first_unfinished = 0;  // indices of chunks
  for (size_t time = 0; first_unfinished < chunks; ++time) {
    for (; receives_posted < chunks && receives_posted * route.stride <= time + receive_ahead;
         ++receives_posted) {
      post_receives(requests, op, state_of(receives_posted), chunk(receives_posted));
    }
    for (size_t k = std::min(time / route.stride + 1, chunks); k-- > first_unfinished;) {
      const size_t at = time - k * route.stride;
      if (at == 0) start_chunk(op, state_of(k), chunk(k));
      for (size_t h = 0; h < route.hops.size(); ++h) {
        if (route.hops[h].time == at) run_hop(requests, op, state_of(k), h, chunk(k));
      }
      if (at == route.end_time) finish_chunk(requests, op, state_of(k), chunk(k));
    }
    if (time == first_unfinished * route.stride + route.end_time) ++first_unfinished;
  }
}

// Posts all receives of a chunk: results directly into the output, partial sums one after the other
// into recv_buffer.
void HierarchicalCollectives::post_receives(RequestBatch& requests, const RoutedOperation& op,
                                            ChunkState& state, Interval chunk) {
  const std::vector<Hop>& hops = op.route.hops;
  std::vector<size_t> offsets;
  size_t recv_bytes = 0;
  for (const Hop& hop : hops) {
    offsets.push_back(recv_bytes);
    if (hop.adds_own_data)
      recv_bytes += hop.sources.size() * own_part_of(op, hop.segment, chunk).size();
  }
  state.recv_buffer.resize(std::max(state.recv_buffer.size(), recv_bytes));
  state.recv_of_hop.resize(hops.size());
  state.receives.resize(std::max(state.receives.size(), hops.size()));
  for (size_t h = 0; h < hops.size(); ++h) {
    const Hop& hop = hops[h];
    const Interval own_range = own_part_of(op, hop.segment, chunk);
    std::byte* received = state.recv_of_hop[h] = state.recv_buffer.data() + offsets[h];
    for (const int c : hop.sources) {
      const BufferList target =
          hop.adds_own_data ? BufferList(received, own_range.size()) : op.out.slice(own_range);
      received += own_range.size();
      for (size_t i = 0; i < size_of(c); ++i) {
        const Interval common = overlap(own_range, part_of(op, hop.segment, c, i, chunk));
        if (common.empty()) continue;
        requests.recv(rank_of(c, i),
                      target.slice({common.lo - own_range.lo, common.hi - own_range.lo}),
                      &state.receives[h], stream_of(hop.segment, !hop.adds_own_data));
      }
    }
  }
}

void HierarchicalCollectives::start_chunk(const RoutedOperation& op, ChunkState& state,
                                          Interval chunk) {
  if (op.in.bytes() > 0) reduce_inside_node(op, state, chunk);
  if (op.source_index >= 0) intra_node_.broadcast(op.out.slice(chunk), op.source_index);
}

void HierarchicalCollectives::reduce_inside_node(const RoutedOperation& op, ChunkState& state,
                                                 Interval chunk) {
  state.own_sums.resize(op.route.segments);
  if (input_is_node_sum(op.reduction)) {
    for (size_t i = 0; i < state.own_sums.size(); ++i)
      state.own_sums[i] = op.in.contiguous(own_part_of(op, i, chunk));
    return;
  }
  std::vector<Interval> bounds;
  const BufferList source = order_by_owner(op, op.in, chunk, &bounds);
  const size_t bytes = bounds[static_cast<size_t>(nodes_.own_index)].size();
  state.partial.resize(std::max(state.partial.size(), bytes));
  intra_node_.reduce_scatter(source, bounds, BufferList(state.partial.data(), bytes),
                             op.reduction.first_stage());
  const std::byte* at = state.partial.data();
  for (size_t i = 0; i < state.own_sums.size(); ++i) {
    state.own_sums[i] = at;
    at += own_part_of(op, i, chunk).size();
  }
}

void HierarchicalCollectives::run_hop(RequestBatch& requests, const RoutedOperation& op,
                                      ChunkState& state, size_t hop, Interval chunk) {
  const Hop& h = op.route.hops[hop];
  const Interval own_range = own_part_of(op, h.segment, chunk);
  if (own_range.empty()) return;
  requests.wait(&state.receives[hop]);
  // The sum may overwrite this rank's input, from which earlier hops send.
  if (h.adds_own_data && h.is_result && h.targets.empty()) requests.wait(&state.sends);
  const BufferList data =
      h.adds_own_data ? sum_hop(op, state, hop, own_range) : op.out.slice(own_range);
  for (const int c : h.targets) {
    for (size_t i = 0; i < size_of(c); ++i) {
      const Interval common = overlap(own_range, part_of(op, h.segment, c, i, chunk));
      if (common.empty()) continue;
      requests.send(rank_of(c, i), data.slice({common.lo - own_range.lo, common.hi - own_range.lo}),
                    &state.sends, stream_of(h.segment, h.is_result));
    }
  }
}

// Returns the sum of the received data and of this node, added in the order of nodes.
BufferList HierarchicalCollectives::sum_hop(const RoutedOperation& op, const ChunkState& state,
                                            size_t hop, Interval own_range) const {
  const Hop& h = op.route.hops[hop];
  if (h.sources.empty()) return {state.own_sums[h.segment], own_range.size()};
  std::vector<const void*> sources;
  for (size_t i = 0; i < h.sources.size(); ++i)
    sources.push_back(state.recv_of_hop[hop] + i * own_range.size());
  const auto own_position = std::lower_bound(h.sources.begin(), h.sources.end(), nodes_.own_part);
  sources.insert(sources.begin() + (own_position - h.sources.begin()), state.own_sums[h.segment]);
  const Reduction& r = op.reduction;
  std::byte* const target = h.is_result ? op.out.contiguous(own_range) : state.recv_of_hop[hop];
  fsccl::reduce(h.is_result ? r.last_stage() : r.first_stage().last_stage(), target, sources.data(),
                static_cast<int>(sources.size()), own_range.size() / r.width());
  return {target, own_range.size()};
}

void HierarchicalCollectives::finish_chunk(RequestBatch& requests, const RoutedOperation& op,
                                           ChunkState& state, Interval chunk) {
  if (op.gathers) {
    std::vector<Interval> bounds;
    const BufferList whole = order_by_owner(op, op.out, chunk, &bounds);
    intra_node_.all_gather(whole, bounds);
  }
  requests.wait(&state.sends);
}

}  // namespace fsccl
