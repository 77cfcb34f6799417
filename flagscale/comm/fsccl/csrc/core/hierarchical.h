// Collectives over several nodes: shared memory inside a node, messages between nodes.
//
// Large buffers are divided into chunks. A node of n ranks divides a chunk into n intervals, and
// rank i of the node owns interval i. To transfer a chunk from node A to node B, each owner in A
// sends to each owner in B the intersection of their intervals. So every byte crosses the network
// once, and all connections are used, also if the nodes have different numbers of ranks. Intervals
// are multiples of kGrain, so that a small message has one owner (the first rank of the node) and
// is sent as a whole.
//
// Reductions and broadcasts follow routes (route.h). Chunks are pipelined: while some chunks are
// transferred in the background, the next one is reduced and an earlier one is gathered inside the
// nodes. All ranks of a node execute the same sequence of steps, as shared memory requires
// (shm_steps.h).
//
// Sums: every hop adds in the order of nodes, and a value that several ranks compute is computed
// from the same bytes. So all ranks get the same bits.
//
// Buffers are lists with one entry per group rank. The functions run on the thread of the
// operation, between ShmSteps::begin() and end().
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "intra_node.h"
#include "request_batch.h"
#include "route.h"
#include "topology.h"

namespace fsccl {

// Collectives of a group that spans several nodes. One thread at a time calls.
class HierarchicalCollectives {
 public:
  HierarchicalCollectives(IntraNodeCollectives& intra_node, const RankPartition& nodes,
                          size_t chunk_bytes)
      : intra_node_(intra_node), nodes_(nodes), chunk_bytes_(chunk_bytes) {}

  void barrier(RequestBatch& requests);
  void all_reduce(RequestBatch& requests, const void* in, void* out, size_t count,
                  const Reduction& r, Algorithm algorithm);
  // Returns the algorithm that Algorithm::kAuto selects for this size in bytes. The result kAuto
  // means the direct exchange (exchange_route()).
  Algorithm best_algorithm(size_t bytes) const;
  // Only the root writes `out`.
  void reduce(RequestBatch& requests, const void* in, void* out, size_t count, const Reduction& r,
              int root);
  void reduce_scatter(RequestBatch& requests, const BufferLists& in, const BufferList& out,
                      const Reduction& r);
  void all_gather(RequestBatch& requests, const BufferLists& buffer);
  void broadcast(RequestBatch& requests, const BufferList& buffer, int root);
  // With every_pair, empty messages are sent as well, so that a size that the receiver does not
  // expect is detected.
  void all_to_all(RequestBatch& requests, const BufferLists& send, const BufferLists& recv,
                  bool every_pair);

 private:
  // Number of chunks whose receives are posted before this rank reaches them. A message that
  // arrives before its receive is buffered and copied.
  static constexpr size_t kReceiveAhead = 2;
  static constexpr size_t kGrain = 8192;  // bytes
  using Requests = RequestBatch::Requests;

  // An operation that follows a route: a reduction of `in` unless that is empty, else a broadcast.
  struct RoutedOperation {
    explicit RoutedOperation(const Route& operation_route) : route(operation_route) {}
    const Route& route;
    BufferList in, out;
    Reduction reduction;
    size_t chunk = 1;       // largest size of a chunk in bytes
    int source_index = -1;  // index in this node of the rank that broadcasts
    bool gathers = true;    // the ranks of this node all-gather the result
  };
  // State of one chunk in progress.
  struct ChunkState {
    std::vector<std::byte> partial;  // this rank's part of all segments, summed inside the node
    // By segment: the address of that part, in partial or in the input.
    std::vector<const std::byte*> own_sums;
    std::vector<std::byte> recv_buffer;   // received data that is to be added
    std::vector<std::byte*> recv_of_hop;  // by hop: where its data begins in recv_buffer
    std::vector<Requests> receives;       // by hop
    Requests sends;
  };

  size_t size_of(int node) const { return nodes_.ranks[static_cast<size_t>(node)].size(); }
  int rank_of(int node, size_t i) const { return nodes_.ranks[static_cast<size_t>(node)][i]; }
  int node_of(int rank) const;
  // Returns whether the sum inside this node is the input itself, because the node has one rank.
  bool input_is_node_sum(const Reduction& r) const {
    return size_of(nodes_.own_part) == 1 && r.op != RedOp::kPremulSum;
  }
  Interval owned_interval(int node, size_t i, Interval chunk) const;
  Interval own_interval(Interval chunk) const {
    return owned_interval(nodes_.own_part, static_cast<size_t>(nodes_.own_index), chunk);
  }
  std::vector<Interval> owned_intervals(int node, Interval chunk) const;
  Interval chunk_at(size_t k, size_t total, size_t width, size_t chunk_bytes) const;
  Interval chunk_at(size_t k, size_t total, size_t width) const {
    return chunk_at(k, total, width, chunk_bytes_);
  }
  static size_t chunk_count(size_t total, size_t width, size_t chunk_bytes) {
    return ceil_div(total, chunk_bytes / width * width);
  }
  size_t chunk_count(size_t total, size_t width) const {
    return chunk_count(total, width, chunk_bytes_);
  }
  BufferList join_node(const BufferLists& by_rank, int node) const;
  std::vector<Interval> offsets_in_node(const BufferLists& by_rank, int node) const;

  const Route& route_for(Algorithm algorithm);
  int index_in_node(int rank, int node) const;
  Interval part_of(const RoutedOperation& op, size_t segment, int node, size_t i,
                   Interval chunk) const;
  Interval own_part_of(const RoutedOperation& op, size_t segment, Interval chunk) const;
  // Returns the chunk ordered by owner; `bounds` receives the interval of each owner.
  BufferList order_by_owner(const RoutedOperation& op, const BufferList& buffer, Interval chunk,
                            std::vector<Interval>* bounds) const;
  void run_route(RequestBatch& requests, const RoutedOperation& op);
  void post_receives(RequestBatch& requests, const RoutedOperation& op, ChunkState& state,
                     Interval chunk);
  void start_chunk(const RoutedOperation& op, ChunkState& state, Interval chunk);
  void reduce_inside_node(const RoutedOperation& op, ChunkState& state, Interval chunk);
  void run_hop(RequestBatch& requests, const RoutedOperation& op, ChunkState& state, size_t hop,
               Interval chunk);
  BufferList sum_hop(const RoutedOperation& op, const ChunkState& state, size_t hop,
                     Interval hop_part) const;
  void finish_chunk(RequestBatch& requests, const RoutedOperation& op, ChunkState& state,
                    Interval chunk);
  void scatter_to_node(RequestBatch& requests, const BufferLists& in, int node, const Reduction& r);

  IntraNodeCollectives& intra_node_;
  const RankPartition& nodes_;
  size_t chunk_bytes_;
  // Reused by later operations, because allocation is expensive.
  std::vector<ChunkState> chunk_states_ = std::vector<ChunkState>(4);
  std::array<std::optional<Route>, 4> routes_;  // of all_reduce, by algorithm
  std::vector<std::byte> scratch_;
};

}  // namespace fsccl
