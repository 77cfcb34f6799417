// Pipelined schedules (schedule.h) at work: channels between the ranks of a host, messages between
// others. A rank goes round its rings, takes every step whose data has come and for whose send
// there is room, and rests when there is none.
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

class Pipeline {
 public:
  Pipeline(ShmSteps& shm, const Clusters& clusters, const Settings& settings,
           Channels::MakeSegment make);

  // As Group's operations, for two ranks and more. `width` is the size of an element.
  void all_gather(RequestBatch& x, const BufferLists& buffer, size_t width);
  void reduce_scatter(RequestBatch& x, const BufferLists& in, const BufferList& out,
                      const Reduction& r);
  void all_reduce(RequestBatch& x, const void* in, void* out, size_t count, const Reduction& r);
  // Whom this rank waits for; any thread may call.
  int awaited() const { return channels_.awaited(); }

 private:
  static constexpr size_t kDepth = Channels::kDepth;

  // The buffers of an operation: `in` and `out` have a block a position. A block that this rank
  // does not give or keep may be empty in one of them.
  struct Task {
    PipelineKind kind = PipelineKind::kAllGather;
    size_t width = 1, send = 0;
    Reduction reduction;
    BufferLists in, out;
  };
  struct Neighbour {
    int rank = -1;   // in the group
    int local = -1;  // -1 on another host
    bool here() const { return local >= 0; }
  };
  // One ring of the operation under way.
  struct Ring {
    explicit Ring(const Schedule& s) : schedule(s) {}
    Schedule schedule;
    Neighbour previous, next;
    size_t at = 0;                              // the next step
    size_t called = 0, received = 0, sent = 0;  // messages
  };
  // What is kept between operations, of a ring whose neighbour is on another host.
  struct Wire {
    std::array<std::vector<std::byte>, kDepth> in, out;
    std::array<RequestPtr, kDepth> receives, sends;
  };

  void run(RequestBatch& x, Task task, size_t longest);
  void finish_sends(RequestBatch& x, const std::vector<Ring>& rings);
  std::vector<Ring> rings_for(const Task& task, size_t longest);
  // Takes the ring's next step; if it cannot, tells whom it waits for, else -1.
  int advance(RequestBatch& x, const Task& task, size_t c, Ring& ring);
  Interval piece_at(const Task& task, size_t c, const PipelineStep& step) const;
  void call_for(RequestBatch& x, const Task& task, size_t c, Ring& ring);
  bool can_take(RequestBatch& x, size_t c, const Ring& ring) const;
  bool can_put(RequestBatch& x, size_t c, const Ring& ring) const;
  void take(size_t c, Ring& ring);
  void put(RequestBatch& x, size_t c, Ring& ring, size_t bytes);
  void pass_on(const Task& task, const PipelineStep& step, Interval piece, const std::byte* from,
               std::byte* to);
  void combine(const Task& task, const PipelineStep& step, Interval piece, const std::byte* from,
               std::byte* to);
  Neighbour neighbour(size_t position) const { return places_[position]; }

  ShmSteps& shm_;
  const Settings& settings_;
  Channels channels_;
  std::vector<Neighbour> places_;  // who is at each position: cluster after cluster
  size_t position_ = 0;
  bool one_host_;
  std::vector<Wire> wires_;
  std::vector<std::byte> own_, result_;  // a piece that does not lie in one run
};

}  // namespace fsccl
