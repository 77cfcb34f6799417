#include "hierarchy.h"

#include <algorithm>
#include <cstring>

namespace fsccl {

int Hierarchy::cluster_of(int rank) const {
  for (int c = 0; c < clusters_.count(); ++c) {
    const auto& members = clusters_.ranks[static_cast<size_t>(c)];
    if (std::find(members.begin(), members.end(), rank) != members.end()) return c;
  }
  return -1;
}

Interval Hierarchy::owned(int cluster, size_t i, Interval chunk) const {
  const Interval part = cut(chunk.size(), size_of(cluster), i, kGrain);
  return {chunk.lo + part.lo, chunk.lo + part.hi};
}

std::vector<Interval> Hierarchy::bounds(int cluster, Interval chunk) const {
  return cut_all(chunk.lo, chunk.size(), size_of(cluster), kGrain);
}

Interval Hierarchy::chunk_at(size_t k, size_t total, size_t width, size_t most) const {
  const size_t step = most / width * width;
  return {std::min(k * step, total), std::min((k + 1) * step, total)};
}

// All that belongs to the ranks of a cluster, one after the other.
BufferList Hierarchy::join(const BufferLists& by_rank, int cluster) const {
  BufferList out;
  for (const int r : clusters_.ranks[static_cast<size_t>(cluster)]) {
    for (const Buffer& p : by_rank[static_cast<size_t>(r)].list()) out.add(p);
  }
  return out;
}

// Where each rank's part lies in join().
std::vector<Interval> Hierarchy::places(const BufferLists& by_rank, int cluster) const {
  std::vector<Interval> out;
  size_t at = 0;
  for (const int r : clusters_.ranks[static_cast<size_t>(cluster)]) {
    const size_t n = by_rank[static_cast<size_t>(r)].bytes();
    out.push_back({at, at + n});
    at += n;
  }
  return out;
}

void Hierarchy::barrier(RequestBatch& x) {
  local_.barrier();
  if (clusters_.index == 0) {
    // By then this rank has heard, at first or second hand, of the `d` clusters before its own.
    const int count = clusters_.count();
    for (int d = 1; d < count; d *= 2) {
      Requests batch;
      x.send(rank_of((clusters_.mine + d) % count, 0), BufferList(), &batch);
      x.recv(rank_of((clusters_.mine + count - d) % count, 0), BufferList(), &batch);
      x.wait(&batch);
    }
  }
  local_.barrier();
}

// In reduce_scatter and all_gather ranks bring lists of sizes. Ranks of two clusters compare no
// cards, only messages: between a cluster's first rank and every rank of another there is always
// one, if an empty one, so that ranks that disagree notice it.

// The partial sums of what belongs to another cluster, each interval sent to its owners there.
void Hierarchy::scatter_to(RequestBatch& x, const BufferLists& in, int cluster,
                           const Reduction& r) {
  const BufferList theirs = join(in, cluster);
  const auto owners = places(in, cluster);
  const size_t width = r.width();
  const size_t chunks = std::max<size_t>(chunks_in(theirs.bytes(), width), 1);
  for (size_t k = 0; k < chunks; ++k) {
    Stage& s = stages_[k % stages_.size()];
    x.wait(&s.sends);
    const Interval chunk = chunk_at(k, theirs.bytes(), width), mine = own(chunk);
    s.partial.resize(std::max(s.partial.size(), mine.size()));
    local_.reduce_scatter(theirs, bounds(clusters_.mine, chunk),
                          BufferList(s.partial.data(), mine.size()), r.first_stage());
    for (size_t j = 0; j < owners.size(); ++j) {
      const Interval both = overlap(mine, owners[j]);
      if (!both.empty()) {
        x.send(rank_of(cluster, j), BufferList(s.partial.data() + (both.lo - mine.lo), both.size()),
               &s.sends);
      } else if (k == 0 && clusters_.index == 0) {
        x.send(rank_of(cluster, j), BufferList(), &s.sends);
      }
    }
  }
  for (Stage& s : stages_) x.wait(&s.sends);
}

void Hierarchy::reduce_scatter(RequestBatch& x, const BufferLists& in, const BufferList& out,
                               const Reduction& r) {
  const size_t n = out.bytes(), width = r.width(), count = static_cast<size_t>(clusters_.count());
  const auto own_places = places(in, clusters_.mine);
  const Interval wanted = own_places[static_cast<size_t>(clusters_.index)];
  const size_t cluster_bytes = own_places.back().hi;
  const size_t chunks = std::max<size_t>(chunks_in(cluster_bytes, width), 1);
  // One partial sum a cluster, in the order of clusters; the own one comes last in time.
  scratch_.resize(std::max(scratch_.size(), count * n));
  Requests receives;
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine) continue;
    std::byte* to = scratch_.data() + static_cast<size_t>(c) * n;
    for (size_t k = 0; k < chunks; ++k) {
      const Interval chunk = chunk_at(k, cluster_bytes, width);
      for (size_t j = 0; j < size_of(c); ++j) {
        const Interval both = overlap(wanted, owned(c, j, chunk));
        if (!both.empty()) {
          x.recv(rank_of(c, j), BufferList(to + (both.lo - wanted.lo), both.size()), &receives);
        } else if (k == 0 && j == 0) {
          x.recv(rank_of(c, j), BufferList(), &receives);
        }
      }
    }
  }
  for (int d = 1; d < clusters_.count(); ++d) {
    scatter_to(x, in, (clusters_.mine + d) % clusters_.count(), r);
  }
  std::byte* own_sum = scratch_.data() + static_cast<size_t>(clusters_.mine) * n;
  local_.reduce_scatter(join(in, clusters_.mine), own_places, BufferList(own_sum, n),
                        r.first_stage());
  x.wait(&receives);
  std::vector<const void*> sources(count);
  for (size_t c = 0; c < count; ++c) sources[c] = scratch_.data() + c * n;
  fsccl::reduce(r.last_stage(), own_sum, sources.data(), clusters_.count(), n / width);
  out.copy_from(own_sum, {0, n});
}

// Every rank sends its part to the owners in the other clusters at once; chunk by chunk, what came
// is then spread inside.
void Hierarchy::all_gather(RequestBatch& x, const BufferLists& buffer) {
  std::vector<std::vector<Requests>> receives(static_cast<size_t>(clusters_.count()));
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine) continue;
    const BufferList theirs = join(buffer, c);
    const auto owners = places(buffer, c);
    auto& by_chunk = receives[static_cast<size_t>(c)];
    by_chunk.resize(std::max<size_t>(chunks_in(theirs.bytes(), 1), 1));
    for (size_t k = 0; k < by_chunk.size(); ++k) {
      const Interval mine = own(chunk_at(k, theirs.bytes(), 1));
      const bool always = k == 0 && clusters_.index == 0;
      for (size_t i = 0; i < owners.size(); ++i) {
        const Interval both = overlap(mine, owners[i]);
        if (always || !both.empty()) x.recv(rank_of(c, i), theirs.slice(both), &by_chunk[k]);
      }
    }
  }
  const auto own_places = places(buffer, clusters_.mine);
  const Interval part = own_places[static_cast<size_t>(clusters_.index)];
  const BufferList own_buffer = join(buffer, clusters_.mine);
  Requests sends;
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine) continue;
    for (size_t k = 0; k < std::max<size_t>(chunks_in(own_buffer.bytes(), 1), 1); ++k) {
      const Interval chunk = chunk_at(k, own_buffer.bytes(), 1);
      for (size_t j = 0; j < size_of(c); ++j) {
        const Interval both = overlap(part, owned(c, j, chunk));
        const bool always = k == 0 && j == 0;
        if (always || !both.empty()) x.send(rank_of(c, j), own_buffer.slice(both), &sends);
      }
    }
  }
  local_.all_gather(own_buffer, own_places);
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine) continue;
    const BufferList theirs = join(buffer, c);
    auto& by_chunk = receives[static_cast<size_t>(c)];
    for (size_t k = 0; k < by_chunk.size(); ++k) {
      x.wait(&by_chunk[k]);
      local_.all_gather(theirs, bounds(clusters_.mine, chunk_at(k, theirs.bytes(), 1)));
    }
  }
  x.wait(&sends);
}

// Pairs in different clusters exchange messages while those inside use shared memory.
void Hierarchy::all_to_all(RequestBatch& x, const BufferLists& send, const BufferLists& recv,
                           bool every_pair) {
  Requests batch;
  for (int d = 1; d < clusters_.count(); ++d) {
    const int c = (clusters_.mine + d) % clusters_.count();
    for (const int r : clusters_.ranks[static_cast<size_t>(c)]) {
      const auto p = static_cast<size_t>(r);
      if (every_pair || recv[p].bytes() > 0) x.recv(r, recv[p], &batch);
      if (every_pair || send[p].bytes() > 0) x.send(r, send[p], &batch);
    }
  }
  BufferLists out, in;
  for (const int r : clusters_.own()) {
    out.push_back(send[static_cast<size_t>(r)]);
    in.push_back(recv[static_cast<size_t>(r)]);
  }
  const size_t longest = local_.agree_on_sizes(out, in);
  local_.all_to_all(out, in, longest);
  x.wait(&batch);
}

}  // namespace fsccl
