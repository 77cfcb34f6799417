// Collectives over several clusters: shared memory inside, messages between.
//
// A cluster of a ranks cuts a chunk into a intervals; rank i owns interval i. Where cluster A's
// data must reach cluster B, the owner of [x, y) in A sends to the owner of [u, v) in B what the
// two have in common: every byte crosses once, and all connections are used, whatever a and b are.
// Intervals are multiples of kGrain, so that a small message has one owner (the cluster's first
// rank) and crosses in one piece.
//
// Reductions and broadcasts take routes (route.h). Large buffers are cut in chunks and pipelined:
// while some chunks are on their way in the background, the next is reduced and an earlier one is
// gathered inside the clusters. All ranks of a cluster run the same sequence of steps, which is all
// that shared memory asks for.
//
// Sums: every hop adds what it has in the order of clusters, and what is computed in two places is
// computed from the same bytes: all ranks get the same bits.
//
// Buffers are lists of pieces by group rank. These functions run between ShmSteps::begin and
// the operation's end, on the thread of the operation.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "local.h"
#include "request_batch.h"
#include "route.h"
#include "topology.h"

namespace fsccl {

class Hierarchy {
 public:
  Hierarchy(Local& local, const Clusters& clusters, size_t chunk_bytes)
      : local_(local), clusters_(clusters), chunk_(chunk_bytes) {}

  void barrier(RequestBatch& x);
  void all_reduce(RequestBatch& x, const void* in, void* out, size_t count, const Reduction& r,
                  Algorithm algorithm);
  // What kAuto stands for; kAuto itself is the direct exchange.
  Algorithm best_for(size_t bytes) const;
  // Only the root's `out` is written.
  void reduce(RequestBatch& x, const void* in, void* out, size_t count, const Reduction& r,
              int root);
  void reduce_scatter(RequestBatch& x, const BufferLists& in, const BufferList& out,
                      const Reduction& r);
  void all_gather(RequestBatch& x, const BufferLists& buffer);
  void broadcast(RequestBatch& x, const BufferList& buffer, int root);
  // With every_pair empty messages are sent too, so that a size nobody expects is noticed.
  void all_to_all(RequestBatch& x, const BufferLists& send, const BufferLists& recv,
                  bool every_pair);

 private:
  // Chunks for which receives are called before this rank comes to them: a message that comes
  // before its receive is kept in memory of its own, and copied.
  static constexpr size_t kAhead = 2;
  static constexpr size_t kGrain = 8192;
  using Requests = RequestBatch::Requests;

  // An operation that takes a route. `in` is what the ranks add up, if they do.
  struct Journey {
    explicit Journey(const Route& way) : route(way) {}
    const Route& route;
    BufferList in, out;
    Reduction reduction;
    size_t chunk = 1;     // the longest
    int source = -1;      // the place in this cluster of who broadcasts
    bool gathers = true;  // all ranks of this cluster get the result
  };
  // What one chunk needs while it is under way.
  struct Stage {
    std::vector<std::byte> partial;     // this rank's part of all segments, summed in the cluster,
    std::vector<const std::byte*> own;  // which lie there or in the input; by segment
    std::vector<std::byte> room;        // what comes to be added
    std::vector<std::byte*> come;       // and where that of a hop lies, one after the other
    std::vector<Requests> receives;     // by hop
    Requests sends;
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
  BufferList join(const BufferLists& by_rank, int cluster) const;
  std::vector<Interval> places(const BufferLists& by_rank, int cluster) const;

  const Route& route_of(Algorithm algorithm);
  int place_of(int rank, int cluster) const;
  Interval part(const Journey& j, size_t segment, int cluster, size_t i, Interval chunk) const;
  Interval own_part(const Journey& j, size_t segment, Interval chunk) const;
  BufferList by_owner(const Journey& j, const BufferList& buffer, Interval chunk,
                      std::vector<Interval>* bounds) const;
  void travel(RequestBatch& x, const Journey& j);
  void call(RequestBatch& x, const Journey& j, Stage& s, Interval chunk);
  void begin(const Journey& j, Stage& s, Interval chunk);
  void sum_inside(const Journey& j, Stage& s, Interval chunk);
  void take(RequestBatch& x, const Journey& j, Stage& s, size_t hop, Interval chunk);
  BufferList sum_of(const Journey& j, const Stage& s, size_t hop, Interval mine) const;
  void end(RequestBatch& x, const Journey& j, Stage& s, Interval chunk);
  void scatter_to(RequestBatch& x, const BufferLists& in, int cluster, const Reduction& r);

  Local& local_;
  const Clusters& clusters_;
  size_t chunk_;
  // Kept between operations: allocating is dear.
  std::vector<Stage> stages_ = std::vector<Stage>(4);
  std::array<std::optional<Route>, 4> routes_;  // of all_reduces, by algorithm
  std::vector<std::byte> scratch_;
};

}  // namespace fsccl
