// Execution of pipelined schedules (schedule.h), over channels between the ranks of a node and over
// messages between nodes. A rank polls its rings, takes every step whose data has arrived and for
// whose send a buffer is free, and sleeps if no ring can take a step.
#pragma once

#include <array>
#include <vector>

#include "channels.h"
#include "request_batch.h"
#include "buffer_list.h"
#include "reduce.h"
#include "schedule.h"
#include "topology.h"

namespace fsccl {

// Pipelined all_gather, reduce_scatter and all_reduce of a group.
class Pipeline {
 public:
  Pipeline(ShmSteps& shm, const RankPartition& nodes, const Settings& settings,
           Channels::MakeSegment make_segment);

  // As the operations of Group, for two ranks and more. `width` is the element size in bytes. One
  // thread at a time calls.
  void all_gather(RequestBatch& requests, const BufferLists& buffer, size_t width);
  void reduce_scatter(RequestBatch& requests, const BufferLists& in, const BufferList& out,
                      const Reduction& r);
  void all_reduce(RequestBatch& requests, const void* in, void* out, size_t count,
                  const Reduction& r);
  // Returns the straggler among the ranks of the node; any thread may call.
  int awaited_rank() const { return channels_.awaited_rank(); }

 private:
  static constexpr size_t kDepth = Channels::kDepth;

  // Parameters and buffers of an operation. `in` and `out` have one block per position. A block
  // that this rank does not contribute is empty in `in`; one that it does not receive is empty in
  // `out`.
  struct Operation {
    PipelineKind kind = PipelineKind::kAllGather;
    size_t width = 1, send_bytes = 0;  // bytes of an element, and of a send
    Reduction reduction;
    BufferLists in, out;
  };
  // A rank next to this one in a ring.
  struct Neighbour {
    int rank = -1;        // in the group
    int local_rank = -1;  // -1 on another node
    bool shares_memory() const { return local_rank >= 0; }
  };
  // State of one ring of the operation in progress.
  struct Ring {
    explicit Ring(const Schedule& s) : schedule(s) {}
    Schedule schedule;
    Neighbour previous, next;
    size_t step = 0;                                             // index of the next step
    size_t receives_posted = 0, received = 0, sends_posted = 0;  // numbers of messages
  };
  // Buffers and requests of a ring whose neighbour is on another node. They are reused by later
  // operations.
  struct RemoteBuffers {
    std::array<std::vector<std::byte>, kDepth> in, out;
    std::array<RequestPtr, kDepth> receives, sends;
  };

  void run(RequestBatch& requests, Operation operation, size_t longest_block_bytes);
  void wait_for_sends(RequestBatch& requests, const std::vector<Ring>& rings);
  std::vector<Ring> make_rings(const Operation& operation, size_t longest_block_bytes);
  // Takes the next step of the ring. Returns -1, or the group rank that the step has to wait for.
  int take_step(RequestBatch& requests, const Operation& operation, size_t c, Ring& ring);
  Interval interval_of(const Operation& operation, size_t c, const PipelineStep& step) const;
  void post_receives(RequestBatch& requests, const Operation& operation, size_t c, Ring& ring);
  bool can_receive(RequestBatch& requests, size_t c, const Ring& ring) const;
  bool can_send(RequestBatch& requests, size_t c, const Ring& ring) const;
  void finish_receive(size_t c, Ring& ring);
  void finish_send(RequestBatch& requests, size_t c, Ring& ring, size_t bytes);
  void forward(const Operation& operation, const PipelineStep& step, Interval piece,
               const std::byte* received_piece, std::byte* send_buffer);
  void reduce_piece(const Operation& operation, const PipelineStep& step, Interval piece,
                    const std::byte* received_piece, std::byte* send_buffer);
  Neighbour neighbour(size_t position) const { return ring_members_[position]; }

  ShmSteps& shm_;
  const Settings& settings_;
  Channels channels_;
  std::vector<Neighbour> ring_members_;  // rank at each position: node after node
  size_t position_ = 0;
  bool is_single_node_;
  std::vector<RemoteBuffers> remote_buffers_;
  // Copies of a piece that is not contiguous in memory.
  std::vector<std::byte> input_copy_, output_copy_;
};

}  // namespace fsccl
