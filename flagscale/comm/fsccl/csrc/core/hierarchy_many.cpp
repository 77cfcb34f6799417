// all_reduce over three clusters and more.
//
// A chunk is cut in one segment a cluster. The ranks of every cluster reduce-scatter the chunk so
// that each owns a part of every segment; what belongs to segment c is sent to the owners in
// cluster c, who add the clusters' sums in the order of clusters and send the result to the owners
// in all others; an all-gather inside ends it. Chunk k's sums cross while chunk k-2's results do,
// chunk k+1 is reduced and chunk k-4 is gathered inside: all at once.
//
// Messages of a pair come in the order in which they were sent. All ranks take the three stages of
// their chunks in the same order, and call their receives in it too, some chunks ahead, so the two
// kinds of messages never meet the other's receives.
#include <algorithm>

#include "hierarchy.h"

namespace fsccl {

Interval Hierarchy::segment(int cluster, Interval chunk) const {
  const Interval s = cut(chunk.size(), static_cast<size_t>(clusters_.count()),
                         static_cast<size_t>(cluster), kGrain);
  return {chunk.lo + s.lo, chunk.lo + s.hi};
}

// The part of segment `segment_of` that rank i of the cluster `cut_for` owns.
Interval Hierarchy::part(int segment_of, int cut_for, size_t i, Interval chunk) const {
  return owned(cut_for, i, segment(segment_of, chunk));
}

// The chunk in another order: all parts of the cluster's first rank, then all of its second, ...
// `bounds` says where each rank's lie.
BufferList Hierarchy::by_owner(const std::byte* chunk_data, Interval chunk,
                               std::vector<Interval>* bounds) const {
  BufferList out;
  for (size_t i = 0; i < size_of(clusters_.mine); ++i) {
    const size_t from = out.bytes();
    for (int c = 0; c < clusters_.count(); ++c) {
      const Interval p = part(c, clusters_.mine, i, chunk);
      out.add(buffer_of(chunk_data + (p.lo - chunk.lo), p.size()));
    }
    bounds->push_back({from, out.bytes()});
  }
  return out;
}

// A segment is a part of a chunk: chunks of large buffers are longer, so that segments are not
// short.
size_t Hierarchy::many_chunk(size_t total) const {
  constexpr size_t kLonger = 4, kLeast = 8;  // chunks, for those that cross at a time to be many
  return std::clamp(total / kLeast, chunk_, kLonger * chunk_);
}

void Hierarchy::all_reduce_of_many(RequestBatch& x, const void* in, void* out, size_t count,
                                   const Reduction& r) {
  const size_t width = r.width(), total = count * width, most = many_chunk(total);
  const size_t chunks = chunks_in(total, width, most);
  auto* to = static_cast<std::byte*>(out);
  const auto stage = [this](size_t k) -> ManyStage& {
    return many_stages_[k % many_stages_.size()];
  };
  const auto chunk = [&](size_t k) { return chunk_at(k, total, width, most); };
  for (size_t k = 0, called = 0; k < chunks + 2 * kLag; ++k) {
    for (; called < chunks + kLag && called <= k + kAhead; ++called) {  // in the order of sending
      if (called < chunks) call_for_sums(x, stage(called), chunk(called));
      if (called >= kLag) call_for_results(x, stage(called - kLag), to, chunk(called - kLag));
    }
    if (k < chunks) sum_inside(x, stage(k), static_cast<const std::byte*>(in), chunk(k), r);
    if (k >= kLag && k - kLag < chunks) {
      sum_own_segment(x, stage(k - kLag), to, chunk(k - kLag), r);
    }
    if (k >= 2 * kLag) spread(x, stage(k - 2 * kLag), to, chunk(k - 2 * kLag));
  }
}

// Has the other clusters' sums of the own part received.
void Hierarchy::call_for_sums(RequestBatch& x, ManyStage& s, Interval chunk) {
  const auto me = static_cast<size_t>(clusters_.index);
  const Interval mine = part(clusters_.mine, clusters_.mine, me, chunk);
  const auto theirs = [&](int c, size_t j) { return part(clusters_.mine, c, j, chunk); };
  receive_sums(x, mine, theirs, &s.received, &s.sums_in);
}

// Has the results of all other segments received, in their places. They may be those of the input
// too: what comes for a byte was made of what this rank has sent of it.
void Hierarchy::call_for_results(RequestBatch& x, ManyStage& s, std::byte* out, Interval chunk) {
  const auto me = static_cast<size_t>(clusters_.index);
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine) continue;
    const Interval theirs = part(c, clusters_.mine, me, chunk);
    for (size_t j = 0; j < size_of(c); ++j) {
      const Interval come = overlap(theirs, part(c, c, j, chunk));
      if (come.empty()) continue;
      x.recv(rank_of(c, j), BufferList(out + come.lo, come.size()), &s.results_in);
    }
  }
}

// First stage: this cluster's sums of all segments, on their way to the clusters that sum them.
void Hierarchy::sum_inside(RequestBatch& x, ManyStage& s, const std::byte* in, Interval chunk,
                           const Reduction& r) {
  std::vector<Interval> bounds;
  const BufferList source = by_owner(in + chunk.lo, chunk, &bounds);
  const auto me = static_cast<size_t>(clusters_.index);
  s.sum = in + chunk.lo;  // of one rank by_owner() keeps the order
  if (!input_is_sum(r)) {
    s.partial.resize(std::max(s.partial.size(), bounds[me].size()));
    s.sum = s.partial.data();
    local_.reduce_scatter(source, bounds, BufferList(s.sum, bounds[me].size()), r.first_stage());
  }
  size_t at = 0;  // of segment c's part in `sum`
  for (int c = 0; c < clusters_.count(); ++c) {
    const Interval theirs = part(c, clusters_.mine, me, chunk);
    for (size_t j = 0; j < size_of(c) && c != clusters_.mine; ++j) {
      const Interval go = overlap(theirs, part(c, c, j, chunk));
      if (go.empty()) continue;
      x.send(rank_of(c, j), BufferList(s.sum + at + (go.lo - theirs.lo), go.size()), &s.sums_out);
    }
    at += theirs.size();
  }
}

// Second stage: the sum over clusters of the own part of the own segment, on its way to all others.
void Hierarchy::sum_own_segment(RequestBatch& x, ManyStage& s, std::byte* out, Interval chunk,
                                const Reduction& r) {
  const auto me = static_cast<size_t>(clusters_.index);
  const Interval mine = part(clusters_.mine, clusters_.mine, me, chunk);
  size_t at = 0;
  for (int c = 0; c < clusters_.mine; ++c) at += part(c, clusters_.mine, me, chunk).size();
  x.wait(&s.sums_in);
  std::vector<const void*> sources;
  for (int c = 0; c < clusters_.count(); ++c) {
    sources.push_back(c == clusters_.mine ? s.sum + at : s.received[static_cast<size_t>(c)].data());
  }
  fsccl::reduce(r.last_stage(), out + mine.lo, sources.data(), clusters_.count(),
                mine.size() / r.width());
  for (int c = 0; c < clusters_.count(); ++c) {
    for (size_t j = 0; j < size_of(c) && c != clusters_.mine; ++j) {
      const Interval go = overlap(mine, part(clusters_.mine, c, j, chunk));
      if (!go.empty()) x.send(rank_of(c, j), BufferList(out + go.lo, go.size()), &s.results_out);
    }
  }
  x.wait(&s.sums_out);
}

// Third stage: everyone in the cluster gets all segments.
void Hierarchy::spread(RequestBatch& x, ManyStage& s, std::byte* out, Interval chunk) {
  x.wait(&s.results_in);
  std::vector<Interval> bounds;
  const BufferList whole = by_owner(out + chunk.lo, chunk, &bounds);
  local_.all_gather(whole, bounds);
  x.wait(&s.results_out);
}

}  // namespace fsccl
