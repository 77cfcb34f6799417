// Operations that take routes (route.h): all_reduce, reduce, broadcast.
//
// The ranks of a cluster reduce-scatter a chunk so that each owns a part of every segment; the
// owners take the hops, each for its part, and an all-gather inside ends it. A receive that brings
// a result may write to the input, where that is the output too: what comes for a byte was made of
// what this rank has sent of it.
#include <algorithm>

#include "hierarchy.h"

namespace fsccl {
namespace {

// Of the cluster's two kinds of messages for a segment, each comes in an order of its own.
size_t stream_of(size_t segment, bool result) { return 1 + 2 * segment + (result ? 1 : 0); }

}  // namespace

int Hierarchy::place_of(int rank, int cluster) const {
  const auto& members = clusters_.ranks[static_cast<size_t>(cluster)];
  return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
}

// What rank i of a cluster owns of a segment.
Interval Hierarchy::part(const Journey& j, size_t segment, int cluster, size_t i,
                         Interval chunk) const {
  const Interval s = cut(chunk.size(), j.route.segments, segment, kGrain);
  return owned(cluster, i, {chunk.lo + s.lo, chunk.lo + s.hi});
}

Interval Hierarchy::own_part(const Journey& j, size_t segment, Interval chunk) const {
  return part(j, segment, clusters_.mine, static_cast<size_t>(clusters_.index), chunk);
}

// The chunk in another order: all parts of the cluster's first rank, then all of its second, ...
// `bounds` says where each rank's lie.
BufferList Hierarchy::by_owner(const Journey& j, const BufferList& buffer, Interval chunk,
                               std::vector<Interval>* bounds) const {
  BufferList out;
  for (size_t i = 0; i < size_of(clusters_.mine); ++i) {
    const size_t from = out.bytes();
    for (size_t s = 0; s < j.route.segments; ++s) {
      buffer.visit(part(j, s, clusters_.mine, i, chunk),
                   [&](std::byte* p, size_t n, size_t) { out.add({p, n}); });
    }
    bounds->push_back({from, out.bytes()});
  }
  return out;
}

Algorithm Hierarchy::best_for(size_t bytes) const {
  // That everyone sends all to all others is one crossing in place of two or more. Among many
  // clusters connections between all of them cost more than the ways of a tree.
  constexpr size_t kMostExchanged = 512 << 10, kMostOthers = 15;
  const auto others = static_cast<size_t>(clusters_.count() - 1);
  const bool direct = others == 1 || (others <= kMostOthers && bytes * others <= kMostExchanged);
  if (direct) return Algorithm::kAuto;
  return others > kMostOthers ? Algorithm::kTree : Algorithm::kTranspose;
}

// Made once: it is the same for every all_reduce.
const Route& Hierarchy::route_of(Algorithm algorithm) {
  std::optional<Route>& known = routes_[static_cast<size_t>(algorithm)];
  if (known) return *known;
  const int count = clusters_.count(), me = clusters_.mine;
  switch (algorithm) {
    case Algorithm::kAuto:
      return known.emplace(exchange_route(count, me));
    case Algorithm::kRing:
      return known.emplace(ring_route(count, me));
    case Algorithm::kTree:
      return known.emplace(tree_route(count, me));
    case Algorithm::kTranspose:
      return known.emplace(transpose_route(count, me));
  }
  fail_usage("no such algorithm");
}

void Hierarchy::all_reduce(RequestBatch& x, const void* in, void* out, size_t count,
                           const Reduction& r, Algorithm algorithm) {
  // A segment is a part of a chunk: chunks of large buffers are longer, so that segments are not
  // short. Trees have more of them under way, the more the higher they are.
  constexpr size_t kLonger = 4, kLeast = 8, kShortest = 64 << 10;
  const size_t total = count * r.width();
  Journey j{route_of(algorithm)};
  j.in = BufferList(in, total);
  j.out = BufferList(out, total);
  j.reduction = r;
  j.chunk = std::clamp(total / kLeast, chunk_, kLonger * chunk_);
  if (algorithm == Algorithm::kAuto) {
    j.chunk = chunk_;
  } else if (algorithm == Algorithm::kTree) {
    j.chunk = std::clamp(total / kLeast, std::min(chunk_ / 2, kShortest), chunk_ / 2);
  }
  travel(x, j);
}

void Hierarchy::reduce(RequestBatch& x, const void* in, void* out, size_t count,
                       const Reduction& r, int root) {
  const int to = cluster_of(root);
  const size_t total = count * r.width();
  const Route route = reduce_route(clusters_.count(), clusters_.mine, to);
  Journey j{route};
  j.in = BufferList(in, total);
  j.reduction = r;
  j.chunk = chunk_;
  j.gathers = clusters_.mine == to;
  if (j.gathers && place_of(root, to) == clusters_.index) {
    j.out = BufferList(out, total);
  } else if (j.gathers) {  // one place for all chunks: each ends when it is summed
    scratch_.resize(std::max(scratch_.size(), std::min(total, chunk_)));
    for (size_t k = 0; k < chunks_in(total, r.width()); ++k) {
      j.out.add({scratch_.data(), chunk_at(k, total, r.width()).size()});
    }
  }
  travel(x, j);
}

void Hierarchy::broadcast(RequestBatch& x, const BufferList& buffer, int root) {
  const int from = cluster_of(root);
  const Route route = broadcast_route(clusters_.count(), clusters_.mine, from);
  Journey j{route};
  j.out = buffer;
  j.reduction.dtype = DType::kOpaque;
  j.chunk = chunk_;
  if (from == clusters_.mine) j.source = place_of(root, from);
  j.gathers = from != clusters_.mine;
  travel(x, j);
}

void Hierarchy::travel(RequestBatch& x, const Journey& j) {
  const Route& route = j.route;
  const size_t width = j.reduction.width(), total = std::max(j.in.bytes(), j.out.bytes());
  const size_t chunks = chunks_in(total, width, j.chunk);
  const size_t ahead = std::max(kAhead, route.stride);
  const size_t under_way = (route.end + ahead) / route.stride + 2;
  if (stages_.size() < under_way) stages_.resize(under_way);
  const auto stage = [&](size_t k) -> Stage& { return stages_[k % under_way]; };
  const auto chunk = [&](size_t k) { return chunk_at(k, total, width, j.chunk); };
  size_t called = 0, first = 0;  // chunks
  for (size_t now = 0; first < chunks; ++now) {
    for (; called < chunks && called * route.stride <= now + ahead; ++called) {
      call(x, j, stage(called), chunk(called));
    }
    for (size_t k = std::min(now / route.stride + 1, chunks); k-- > first;) {
      const size_t at = now - k * route.stride;
      if (at == 0) begin(j, stage(k), chunk(k));
      for (size_t h = 0; h < route.hops.size(); ++h) {
        if (route.hops[h].at == at) take(x, j, stage(k), h, chunk(k));
      }
      if (at == route.end) end(x, j, stage(k), chunk(k));
    }
    if (now == first * route.stride + route.end) ++first;
  }
}

// Has all that comes for a chunk received: results in their places, sums beside each other.
void Hierarchy::call(RequestBatch& x, const Journey& j, Stage& s, Interval chunk) {
  const std::vector<Hop>& hops = j.route.hops;
  std::vector<size_t> places;
  size_t room = 0;
  for (const Hop& hop : hops) {
    places.push_back(room);
    if (hop.adds) room += hop.from.size() * own_part(j, hop.segment, chunk).size();
  }
  s.room.resize(std::max(s.room.size(), room));
  s.come.resize(hops.size());
  s.receives.resize(std::max(s.receives.size(), hops.size()));
  for (size_t h = 0; h < hops.size(); ++h) {
    const Hop& hop = hops[h];
    const Interval mine = own_part(j, hop.segment, chunk);
    std::byte* to = s.come[h] = s.room.data() + places[h];
    for (const int c : hop.from) {
      const BufferList target = hop.adds ? BufferList(to, mine.size()) : j.out.slice(mine);
      to += mine.size();
      for (size_t i = 0; i < size_of(c); ++i) {
        const Interval both = overlap(mine, part(j, hop.segment, c, i, chunk));
        if (both.empty()) continue;
        x.recv(rank_of(c, i), target.slice({both.lo - mine.lo, both.hi - mine.lo}),
               &s.receives[h], stream_of(hop.segment, !hop.adds));
      }
    }
  }
}

void Hierarchy::begin(const Journey& j, Stage& s, Interval chunk) {
  if (j.in.bytes() > 0) sum_inside(j, s, chunk);
  if (j.source >= 0) local_.broadcast(j.out.slice(chunk), j.source);
}

void Hierarchy::sum_inside(const Journey& j, Stage& s, Interval chunk) {
  s.own.resize(j.route.segments);
  if (input_is_sum(j.reduction)) {
    for (size_t i = 0; i < s.own.size(); ++i) s.own[i] = j.in.contiguous(own_part(j, i, chunk));
    return;
  }
  std::vector<Interval> bounds;
  const BufferList source = by_owner(j, j.in, chunk, &bounds);
  const size_t bytes = bounds[static_cast<size_t>(clusters_.index)].size();
  s.partial.resize(std::max(s.partial.size(), bytes));
  local_.reduce_scatter(source, bounds, BufferList(s.partial.data(), bytes),
                        j.reduction.first_stage());
  const std::byte* at = s.partial.data();
  for (size_t i = 0; i < s.own.size(); ++i) {
    s.own[i] = at;
    at += own_part(j, i, chunk).size();
  }
}

void Hierarchy::take(RequestBatch& x, const Journey& j, Stage& s, size_t hop, Interval chunk) {
  const Hop& h = j.route.hops[hop];
  const Interval mine = own_part(j, h.segment, chunk);
  if (mine.empty()) return;
  x.wait(&s.receives[hop]);
  // What has been sent is the own data, in whose place the sum may go.
  if (h.adds && h.ends && h.to.empty()) x.wait(&s.sends);
  const BufferList what = h.adds ? sum_of(j, s, hop, mine) : j.out.slice(mine);
  for (const int c : h.to) {
    for (size_t i = 0; i < size_of(c); ++i) {
      const Interval both = overlap(mine, part(j, h.segment, c, i, chunk));
      if (both.empty()) continue;
      x.send(rank_of(c, i), what.slice({both.lo - mine.lo, both.hi - mine.lo}), &s.sends,
             stream_of(h.segment, h.ends));
    }
  }
}

// What has come and the own sum, added up in the order of clusters.
BufferList Hierarchy::sum_of(const Journey& j, const Stage& s, size_t hop, Interval mine) const {
  const Hop& h = j.route.hops[hop];
  if (h.from.empty()) return {s.own[h.segment], mine.size()};
  std::vector<const void*> sources;
  for (size_t i = 0; i < h.from.size(); ++i) sources.push_back(s.come[hop] + i * mine.size());
  const auto before = std::lower_bound(h.from.begin(), h.from.end(), clusters_.mine);
  sources.insert(sources.begin() + (before - h.from.begin()), s.own[h.segment]);
  const Reduction& r = j.reduction;
  std::byte* const to = h.ends ? j.out.contiguous(mine) : s.come[hop];
  fsccl::reduce(h.ends ? r.last_stage() : r.first_stage().last_stage(), to, sources.data(),
                static_cast<int>(sources.size()), mine.size() / r.width());
  return {to, mine.size()};
}

void Hierarchy::end(RequestBatch& x, const Journey& j, Stage& s, Interval chunk) {
  if (j.gathers) {
    std::vector<Interval> bounds;
    const BufferList whole = by_owner(j, j.out, chunk, &bounds);
    local_.all_gather(whole, bounds);
  }
  x.wait(&s.sends);
}

}  // namespace fsccl
