// Collectives over several clusters: shared memory inside, messages between.
//
// A cluster of a ranks cuts a chunk into a intervals; rank i owns interval i. Where cluster A's
// data must reach cluster B, the owner of [x, y) in A sends to the owner of [u, v) in B what the
// two have in common: every byte crosses once, and all connections are used, whatever a and b are.
// Intervals are multiples of kGrain, so that a small message has one owner (the cluster's first
// rank) and crosses in one piece.
//
// Large buffers are cut in chunks of chunk_bytes and pipelined: while chunk k crosses in the
// background, chunk k+1 is reduced and chunk k-kLag is gathered inside the clusters. All ranks of
// a cluster run the same sequence of steps, which is all that shared memory asks for.
//
// Sums: every owner adds the clusters' partial sums in the order of clusters, and what is computed
// in two places is computed from the same bytes: all ranks get the same bits.
//
// Buffers are lists of pieces by group rank. These functions run between ShmTransport::begin and
// the operation's end, on the thread of the operation.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "request_batch.h"
#include "local.h"
#include "topology.h"

namespace fsccl {

class Hierarchy {
 public:
  Hierarchy(Local& local, const Clusters& clusters, size_t chunk_bytes)
      : local_(local), clusters_(clusters), chunk_(chunk_bytes) {}

  void barrier(RequestBatch& x);
  // root >= 0: only the root's `out` is written.
  void all_reduce(RequestBatch& x, const void* in, void* out, size_t count, const Reduction& r,
                  int root);
  // For three clusters and more: 2(C-1)/C of the bytes leave a cluster, and not C-1 times.
  void all_reduce_of_many(RequestBatch& x, const void* in, void* out, size_t count,
                          const Reduction& r);
  void reduce_scatter(RequestBatch& x, const BufferLists& in, const BufferList& out,
                      const Reduction& r);
  void all_gather(RequestBatch& x, const BufferLists& buffer);
  void broadcast(RequestBatch& x, const BufferList& buffer, int root);
  // With every_pair empty messages are sent too, so that a size nobody expects is noticed.
  void all_to_all(RequestBatch& x, const BufferLists& send, const BufferLists& recv,
                  bool every_pair);

 private:
  static constexpr size_t kLag = 2;  // chunks that cross at a time
  // Chunks for which receives are called before this rank comes to them: a message that comes
  // before its receive is kept in memory of its own, and copied.
  static constexpr size_t kAhead = 2;
  static constexpr size_t kGrain = 8192;
  using Requests = RequestBatch::Requests;

  // What one chunk of an all_reduce needs while it is under way.
  struct Stage {
    std::vector<std::byte> partial;                // this cluster's sum of the owned interval,
    const std::byte* sum = nullptr;                // which lies there or in the input
    std::vector<std::vector<std::byte>> received;  // the other clusters'
    Requests sends, receives;
  };

  // What one chunk needs in all_reduce_of_many, where cluster c sums segment c of every chunk.
  struct ManyStage {
    std::vector<std::byte> partial;  // this rank's parts of all segments, summed in the cluster,
    const std::byte* sum = nullptr;  // which lie there or in the input
    std::vector<std::vector<std::byte>> received;  // the other clusters' sums of the own part
    Requests sums_out, sums_in, results_out, results_in;
  };

  size_t size_of(int cluster) const { return clusters_.ranks[static_cast<size_t>(cluster)].size(); }
  int rank_of(int cluster, size_t i) const {
    return clusters_.ranks[static_cast<size_t>(cluster)][i];
  }
  int cluster_of(int rank) const;
  // A cluster of one rank has nothing to sum inside: its sum is its input, and is not copied.
  bool input_is_sum(const Reduction& r) const {
    return size_of(clusters_.mine) == 1 && r.op != RedOp::kPremulSum;
  }
  Interval owned(int cluster, size_t i, Interval chunk) const;
  Interval own(Interval chunk) const {
    return owned(clusters_.mine, static_cast<size_t>(clusters_.index), chunk);
  }
  std::vector<Interval> bounds(int cluster, Interval chunk) const;
  Interval chunk_at(size_t k, size_t total, size_t width, size_t most) const;
  Interval chunk_at(size_t k, size_t total, size_t width) const {
    return chunk_at(k, total, width, chunk_);
  }
  static size_t chunks_in(size_t total, size_t width, size_t most) {
    return ceil_div(total, most / width * width);
  }
  size_t chunks_in(size_t total, size_t width) const { return chunks_in(total, width, chunk_); }
  size_t many_chunk(size_t total) const;
  BufferList join(const BufferLists& by_rank, int cluster) const;
  std::vector<Interval> places(const BufferLists& by_rank, int cluster) const;

  // Has the other clusters' sums of `mine` received, by cluster in `received`; theirs(c, j)
  // is what the j-th rank of cluster c has of them.
  template <class F>
  void receive_sums(RequestBatch& x, Interval mine, F theirs,
                    std::vector<std::vector<std::byte>>* received, Requests* batch) {
    received->resize(static_cast<size_t>(clusters_.count()));
    for (int c = 0; c < clusters_.count(); ++c) {
      if (c == clusters_.mine) continue;
      auto& sum = (*received)[static_cast<size_t>(c)];
      sum.resize(std::max(sum.size(), mine.size()));
      for (size_t j = 0; j < size_of(c); ++j) {
        const Interval both = overlap(mine, theirs(c, j));
        if (both.empty()) continue;
        x.recv(rank_of(c, j), BufferList(sum.data() + (both.lo - mine.lo), both.size()), batch);
      }
    }
  }

  void call(RequestBatch& x, Stage& s, Interval chunk);
  void start(RequestBatch& x, Stage& s, const std::byte* in, Interval chunk, const Reduction& r,
             int to);
  void finish(RequestBatch& x, Stage& s, std::byte* out, Interval chunk, const Reduction& r,
              int root);
  Interval segment(int cluster, Interval chunk) const;
  Interval part(int segment_of, int cut_for, size_t i, Interval chunk) const;
  BufferList by_owner(const std::byte* chunk_data, Interval chunk,
                      std::vector<Interval>* bounds) const;
  void call_for_sums(RequestBatch& x, ManyStage& s, Interval chunk);
  void call_for_results(RequestBatch& x, ManyStage& s, std::byte* out, Interval chunk);
  void sum_inside(RequestBatch& x, ManyStage& s, const std::byte* in, Interval chunk,
                  const Reduction& r);
  void sum_own_segment(RequestBatch& x, ManyStage& s, std::byte* out, Interval chunk,
                       const Reduction& r);
  void spread(RequestBatch& x, ManyStage& s, std::byte* out, Interval chunk);
  void scatter_to(RequestBatch& x, const BufferLists& in, int cluster, const Reduction& r);

  Local& local_;
  const Clusters& clusters_;
  size_t chunk_;
  std::array<Stage, kLag + kAhead + 1> stages_;  // kept between operations: allocating is dear
  std::array<ManyStage, 2 * kLag + 1> many_stages_;
  std::vector<std::byte> scratch_;
};

}  // namespace fsccl
