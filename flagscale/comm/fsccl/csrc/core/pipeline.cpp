#include "pipeline.h"

#include <algorithm>
#include <cstring>

namespace fsccl {
namespace {

// Blocks are cut at cache lines, which hold whole elements of every type.
constexpr size_t kPieceGrain = kCacheLine;

size_t longest_block(const BufferLists& blocks) {
  size_t longest = 0;
  for (const BufferList& b : blocks) longest = std::max(longest, b.bytes());
  return longest;
}

}  // namespace

Pipeline::Pipeline(ShmSteps& shm, const RankPartition& nodes, const Settings& settings,
                   Channels::MakeSegment make_segment)
    : shm_(shm),
      settings_(settings),
      channels_(shm, static_cast<size_t>(settings.pipeline_k), std::move(make_segment)),
      is_single_node_(nodes.count() == 1),
      remote_buffers_(static_cast<size_t>(settings.pipeline_k)) {
  for (int c = 0; c < nodes.count(); ++c) {
    const auto& members = nodes.ranks[static_cast<size_t>(c)];
    for (size_t i = 0; i < members.size(); ++i) {
      const int step = c == nodes.own_part ? static_cast<int>(i) : -1;
      if (step == nodes.own_index) position_ = ring_members_.size();
      ring_members_.push_back({members[i], step});
    }
  }
}

void Pipeline::all_gather(RequestBatch& requests, const BufferLists& buffer, size_t width) {
  Operation operation;
  operation.width = width;
  for (const Neighbour& n : ring_members_)
    operation.out.push_back(buffer[static_cast<size_t>(n.rank)]);
  operation.in.resize(ring_members_.size());
  operation.in[position_] = operation.out[position_];
  run(requests, std::move(operation), longest_block(buffer));
}

void Pipeline::reduce_scatter(RequestBatch& requests, const BufferLists& in, const BufferList& out,
                              const Reduction& r) {
  Operation operation;
  operation.kind = PipelineKind::kReduceScatter;
  operation.width = r.width();
  operation.reduction = r;
  for (const Neighbour& n : ring_members_) operation.in.push_back(in[static_cast<size_t>(n.rank)]);
  operation.out.resize(ring_members_.size());
  operation.out[position_] = out;
  run(requests, std::move(operation), longest_block(in));
}

void Pipeline::all_reduce(RequestBatch& requests, const void* in, void* out, size_t count,
                          const Reduction& r) {
  Operation operation;
  operation.kind = PipelineKind::kAllReduce;
  operation.width = r.width();
  operation.reduction = r;
  for (const Interval& b : cut_all(0, count * r.width(), ring_members_.size(), kPieceGrain)) {
    operation.in.emplace_back(static_cast<const std::byte*>(in) + b.lo, b.size());
    operation.out.emplace_back(static_cast<const std::byte*>(out) + b.lo, b.size());
  }
  const size_t longest_block_bytes = longest_block(operation.in);
  run(requests, std::move(operation), longest_block_bytes);
}

void Pipeline::run(RequestBatch& requests, Operation operation, size_t longest_block_bytes) {
  operation.send_bytes = settings_.pipeline_nelem * operation.width;
  // A step in shared memory compares the fingerprints: no rank uses a channel before all ranks of
  // the node have called the same operation.
  shm_.acquire_slot();
  shm_.post();
  shm_.wait_for_all_peers();
  channels_.reserve_slots(operation.send_bytes);
  auto rings = make_rings(operation, longest_block_bytes);
  std::vector<int> awaited_ranks(rings.size());
  for (bool is_unfinished = true; is_unfinished;) {
    const uint32_t doorbell = channels_.doorbell();
    bool progressed = false;
    is_unfinished = false;
    for (size_t c = 0; c < rings.size(); ++c) {
      awaited_ranks[c] = -1;
      if (rings[c].step == rings[c].schedule.step_count()) continue;
      is_unfinished = true;
      awaited_ranks[c] = take_step(requests, operation, c, rings[c]);
      progressed |= awaited_ranks[c] < 0;
    }
    if (is_unfinished && !progressed) channels_.wait_for_progress(awaited_ranks, doorbell);
  }
  wait_for_sends(requests, rings);
}

// Waits until all messages have been sent, because the next operation overwrites their buffers.
void Pipeline::wait_for_sends(RequestBatch& requests, const std::vector<Ring>& rings) {
  std::vector<int> awaited_ranks(rings.size(), -1);
  for (size_t c = 0; c < rings.size(); ++c) {
    for (const RequestPtr& request : remote_buffers_[c].sends) {
      awaited_ranks[c] = rings[c].next.rank;
      for (uint32_t doorbell = channels_.doorbell(); request && !requests.has_finished(request);
           doorbell = channels_.doorbell()) {
        channels_.wait_for_progress(awaited_ranks, doorbell);
      }
      awaited_ranks[c] = -1;
    }
  }
}

std::vector<Pipeline::Ring> Pipeline::make_rings(const Operation& operation,
                                                 size_t longest_block_bytes) {
  const size_t k = remote_buffers_.size(), n = ring_members_.size();
  const size_t windows = window_count(longest_block_bytes, k, operation.send_bytes, kPieceGrain);
  std::vector<Ring> out;
  for (const size_t stride : ring_strides(n, k, !is_single_node_)) {
    Ring ring(Schedule(operation.kind, n, position_, stride, windows));
    ring.previous = neighbour(ring.schedule.previous());
    ring.next = neighbour(ring.schedule.next());
    RemoteBuffers& buffers = remote_buffers_[out.size()];
    const auto resize_all = [&](auto& list) {
      for (auto& buffer : list) buffer.resize(std::max(buffer.size(), operation.send_bytes));
    };
    if (!ring.previous.shares_memory()) resize_all(buffers.in);
    if (!ring.next.shares_memory()) resize_all(buffers.out);
    out.push_back(ring);
  }
  return out;
}

int Pipeline::take_step(RequestBatch& requests, const Operation& operation, size_t c, Ring& ring) {
  const PipelineStep current_step = ring.schedule.step(ring.step);
  post_receives(requests, operation, c, ring);
  if (current_step.receives && !can_receive(requests, c, ring)) return ring.previous.rank;
  if (current_step.sends && !can_send(requests, c, ring)) return ring.next.rank;
  RemoteBuffers& buffers = remote_buffers_[c];
  const std::byte* received_piece = nullptr;
  if (current_step.receives) {
    received_piece = ring.previous.shares_memory()
                         ? channels_.recv_slot(c, ring.previous.local_rank)
                         : buffers.in[ring.received % kDepth].data();
  }
  std::byte* send_buffer = nullptr;
  if (current_step.sends) {
    send_buffer = ring.next.shares_memory() ? channels_.send_slot(c)
                                            : buffers.out[ring.sends_posted % kDepth].data();
  }
  const Interval piece = interval_of(operation, c, current_step);
  if (current_step.reduces) {
    reduce_piece(operation, current_step, piece, received_piece, send_buffer);
  } else {
    forward(operation, current_step, piece, received_piece, send_buffer);
  }
  if (current_step.receives) finish_receive(c, ring);
  if (current_step.sends) finish_send(requests, c, ring, piece.size());
  ++ring.step;
  return -1;
}

Interval Pipeline::interval_of(const Operation& operation, size_t c,
                               const PipelineStep& step) const {
  const size_t bytes =
      std::max(operation.in[step.block].bytes(), operation.out[step.block].bytes());
  return interval_of_send(bytes, remote_buffers_.size(), c, step.window, operation.send_bytes,
                          kPieceGrain);
}

// Posts receives of messages for all free buffers of a ring.
void Pipeline::post_receives(RequestBatch& requests, const Operation& operation, size_t c,
                             Ring& ring) {
  if (ring.previous.shares_memory()) return;
  // Every step of a window but the first receives.
  const size_t receives_per_window = ring.schedule.steps_per_window() - 1;
  const size_t total_receives =
      ring.schedule.step_count() / ring.schedule.steps_per_window() * receives_per_window;
  for (; ring.receives_posted < total_receives && ring.receives_posted < ring.received + kDepth;
       ++ring.receives_posted) {
    const size_t i = ring.receives_posted / receives_per_window * (receives_per_window + 1) + 1 +
                     ring.receives_posted % receives_per_window;
    const Interval piece = interval_of(operation, c, ring.schedule.step(i));
    auto& buffer = remote_buffers_[c].in[ring.receives_posted % kDepth];
    remote_buffers_[c].receives[ring.receives_posted % kDepth] =
        requests.recv_on(c, ring.previous.rank, BufferList(buffer.data(), piece.size()),
                         channels_.doorbell_callback());
  }
}

bool Pipeline::can_receive(RequestBatch& requests, size_t c, const Ring& ring) const {
  if (ring.previous.shares_memory()) return !channels_.is_recv_empty(c, ring.previous.local_rank);
  return requests.has_finished(remote_buffers_[c].receives[ring.received % kDepth]);
}

bool Pipeline::can_send(RequestBatch& requests, size_t c, const Ring& ring) const {
  if (ring.next.shares_memory()) return !channels_.is_send_full(c, ring.next.local_rank);
  const RequestPtr& previous_send = remote_buffers_[c].sends[ring.sends_posted % kDepth];
  return !previous_send || requests.has_finished(previous_send);
}

void Pipeline::finish_receive(size_t c, Ring& ring) {
  if (ring.previous.shares_memory()) return channels_.release(c, ring.previous.local_rank);
  ++ring.received;
}

void Pipeline::finish_send(RequestBatch& requests, size_t c, Ring& ring, size_t bytes) {
  if (ring.next.shares_memory()) return channels_.post(c, ring.next.local_rank);
  const size_t i = ring.sends_posted++ % kDepth;
  remote_buffers_[c].sends[i] =
      requests.send_on(c, ring.next.rank, BufferList(remote_buffers_[c].out[i].data(), bytes),
                       channels_.doorbell_callback());
}

// Copies the received piece, or this rank's input if nothing is received, into the output, the send
// buffer, or both.
void Pipeline::forward(const Operation& operation, const PipelineStep& step, Interval piece,
                       const std::byte* received_piece, std::byte* send_buffer) {
  if (step.stores) operation.out[step.block].copy_from(received_piece, piece);
  if (send_buffer == nullptr || piece.empty()) return;
  if (received_piece != nullptr) {
    std::memcpy(send_buffer, received_piece, piece.size());
  } else {
    operation.in[step.block].copy_to(send_buffer, piece);
  }
}

// Reduces the received piece and this rank's input into the output, the send buffer, or both.
void Pipeline::reduce_piece(const Operation& operation, const PipelineStep& step, Interval piece,
                            const std::byte* received_piece, std::byte* send_buffer) {
  if (piece.empty()) return;
  const Reduction& r = operation.reduction;
  const size_t count = piece.size() / r.width();
  const void* input = operation.in[step.block].contiguous(piece);
  if (input == nullptr) {
    input_copy_.resize(operation.send_bytes);
    operation.in[step.block].copy_to(input_copy_.data(), piece);
    input = input_copy_.data();
  }
  std::byte* target = step.stores ? operation.out[step.block].contiguous(piece) : send_buffer;
  if (target == nullptr) {
    output_copy_.resize(operation.send_bytes);
    target = output_copy_.data();
  }
  if (received_piece == nullptr) {
    reduce(r.first_stage(), target, &input, 1, count);
  } else {
    if (r.op == RedOp::kPremulSum) {  // the received piece has been multiplied already
      input_copy_.resize(operation.send_bytes);
      reduce(r, input_copy_.data(), &input, 1, count);
      input = input_copy_.data();
    }
    const void* both[] = {received_piece, input};
    reduce(step.stores ? r.last_stage() : r.first_stage().last_stage(), target, both, 2, count);
  }
  if (target == output_copy_.data()) operation.out[step.block].copy_from(target, piece);
  if (step.stores && send_buffer != nullptr) std::memcpy(send_buffer, target, piece.size());
}

}  // namespace fsccl
