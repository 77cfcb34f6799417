#include "pipeline.h"

#include <algorithm>
#include <cstring>

namespace fsccl {
namespace {

// Cuts of blocks lie on cache lines, which hold whole elements of every type.
constexpr size_t kPieceGrain = kCacheLine;

size_t longest_block(const BufferLists& blocks) {
  size_t most = 0;
  for (const BufferList& b : blocks) most = std::max(most, b.bytes());
  return most;
}

}  // namespace

Pipeline::Pipeline(ShmSteps& shm, const Clusters& clusters, const Settings& settings,
                   Channels::MakeSegment make)
    : shm_(shm),
      settings_(settings),
      channels_(shm, static_cast<size_t>(settings.pipeline_k), std::move(make)),
      one_host_(clusters.count() == 1),
      wires_(static_cast<size_t>(settings.pipeline_k)) {
  for (int c = 0; c < clusters.count(); ++c) {
    const auto& members = clusters.ranks[static_cast<size_t>(c)];
    for (size_t i = 0; i < members.size(); ++i) {
      const int at = c == clusters.mine ? static_cast<int>(i) : -1;
      if (at == clusters.index) position_ = places_.size();
      places_.push_back({members[i], at});
    }
  }
}

void Pipeline::all_gather(RequestBatch& x, const BufferLists& buffer, size_t width) {
  Task task;
  task.width = width;
  for (const Neighbour& n : places_) task.out.push_back(buffer[static_cast<size_t>(n.rank)]);
  task.in.resize(places_.size());
  task.in[position_] = task.out[position_];
  run(x, std::move(task), longest_block(buffer));
}

void Pipeline::reduce_scatter(RequestBatch& x, const BufferLists& in, const BufferList& out,
                              const Reduction& r) {
  Task task;
  task.kind = PipelineKind::kReduceScatter;
  task.width = r.width();
  task.reduction = r;
  for (const Neighbour& n : places_) task.in.push_back(in[static_cast<size_t>(n.rank)]);
  task.out.resize(places_.size());
  task.out[position_] = out;
  run(x, std::move(task), longest_block(in));
}

void Pipeline::all_reduce(RequestBatch& x, const void* in, void* out, size_t count,
                          const Reduction& r) {
  Task task;
  task.kind = PipelineKind::kAllReduce;
  task.width = r.width();
  task.reduction = r;
  for (const Interval& b : cut_all(0, count * r.width(), places_.size(), kPieceGrain)) {
    task.in.emplace_back(static_cast<const std::byte*>(in) + b.lo, b.size());
    task.out.emplace_back(static_cast<const std::byte*>(out) + b.lo, b.size());
  }
  const size_t longest = longest_block(task.in);
  run(x, std::move(task), longest);
}

void Pipeline::run(RequestBatch& x, Task task, size_t longest) {
  task.send = settings_.pipeline_nelem * task.width;
  // A step in shared memory: nobody begins, or waits for room, before all have called the same
  // operation.
  shm_.fill();
  shm_.post();
  shm_.await_all();
  channels_.prepare(task.send);
  auto rings = rings_for(task, longest);
  std::vector<int> waits_for(rings.size());
  for (bool busy = true; busy;) {
    const uint32_t seen = channels_.bell();
    bool moved = false;
    busy = false;
    for (size_t c = 0; c < rings.size(); ++c) {
      waits_for[c] = -1;
      if (rings[c].at == rings[c].schedule.steps()) continue;
      busy = true;
      waits_for[c] = advance(x, task, c, rings[c]);
      moved |= waits_for[c] < 0;
    }
    if (busy && !moved) channels_.rest(waits_for, seen);
  }
  finish_sends(x, rings);
}

// The next operation fills their buffers.
void Pipeline::finish_sends(RequestBatch& x, const std::vector<Ring>& rings) {
  std::vector<int> waits_for(rings.size(), -1);
  for (size_t c = 0; c < rings.size(); ++c) {
    for (const RequestPtr& sent : wires_[c].sends) {
      waits_for[c] = rings[c].next.rank;
      for (uint32_t seen = channels_.bell(); sent && !x.over(sent); seen = channels_.bell()) {
        channels_.rest(waits_for, seen);
      }
      waits_for[c] = -1;
    }
  }
}

std::vector<Pipeline::Ring> Pipeline::rings_for(const Task& task, size_t longest) {
  const size_t k = wires_.size(), n = places_.size();
  const size_t windows = windows_for(longest, k, task.send, kPieceGrain);
  std::vector<Ring> out;
  for (const size_t stride : ring_strides(n, k, !one_host_)) {
    Ring ring(Schedule(task.kind, n, position_, stride, windows));
    ring.previous = neighbour(ring.schedule.previous());
    ring.next = neighbour(ring.schedule.next());
    Wire& wire = wires_[out.size()];
    const auto make_room = [&](auto& buffers) {
      for (auto& b : buffers) b.resize(std::max(b.size(), task.send));
    };
    if (!ring.previous.here()) make_room(wire.in);
    if (!ring.next.here()) make_room(wire.out);
    out.push_back(ring);
  }
  return out;
}

int Pipeline::advance(RequestBatch& x, const Task& task, size_t c, Ring& ring) {
  const PipelineStep step = ring.schedule.at(ring.at);
  call_for(x, task, c, ring);
  if (step.receives && !can_take(x, c, ring)) return ring.previous.rank;
  if (step.sends && !can_put(x, c, ring)) return ring.next.rank;
  Wire& wire = wires_[c];
  const std::byte* from = nullptr;
  if (step.receives) {
    from = ring.previous.here() ? channels_.to_read(c, ring.previous.local)
                                : wire.in[ring.received % kDepth].data();
  }
  std::byte* to = nullptr;
  if (step.sends) {
    to = ring.next.here() ? channels_.to_fill(c) : wire.out[ring.sent % kDepth].data();
  }
  const Interval piece = piece_at(task, c, step);
  if (step.reduces) {
    combine(task, step, piece, from, to);
  } else {
    pass_on(task, step, piece, from, to);
  }
  if (step.receives) take(c, ring);
  if (step.sends) put(x, c, ring, piece.size());
  ++ring.at;
  return -1;
}

Interval Pipeline::piece_at(const Task& task, size_t c, const PipelineStep& step) const {
  const size_t bytes = std::max(task.in[step.block].bytes(), task.out[step.block].bytes());
  return piece_of(bytes, wires_.size(), c, step.window, task.send, kPieceGrain);
}

// Messages are called for as soon as there is a buffer for them.
void Pipeline::call_for(RequestBatch& x, const Task& task, size_t c, Ring& ring) {
  if (ring.previous.here()) return;
  const size_t a_window = ring.schedule.per_window() - 1;  // every step but the first receives
  const size_t all = ring.schedule.steps() / ring.schedule.per_window() * a_window;
  for (; ring.called < all && ring.called < ring.received + kDepth; ++ring.called) {
    const size_t i = ring.called / a_window * (a_window + 1) + 1 + ring.called % a_window;
    const Interval piece = piece_at(task, c, ring.schedule.at(i));
    auto& buffer = wires_[c].in[ring.called % kDepth];
    wires_[c].receives[ring.called % kDepth] = x.recv_on(
        c, ring.previous.rank, BufferList(buffer.data(), piece.size()), channels_.bell_ringer());
  }
}

bool Pipeline::can_take(RequestBatch& x, size_t c, const Ring& ring) const {
  if (ring.previous.here()) return !channels_.empty(c, ring.previous.local);
  return x.over(wires_[c].receives[ring.received % kDepth]);
}

bool Pipeline::can_put(RequestBatch& x, size_t c, const Ring& ring) const {
  if (ring.next.here()) return !channels_.full(c, ring.next.local);
  const RequestPtr& before = wires_[c].sends[ring.sent % kDepth];
  return !before || x.over(before);
}

void Pipeline::take(size_t c, Ring& ring) {
  if (ring.previous.here()) return channels_.take(c, ring.previous.local);
  ++ring.received;
}

void Pipeline::put(RequestBatch& x, size_t c, Ring& ring, size_t bytes) {
  if (ring.next.here()) return channels_.post(c, ring.next.local);
  const size_t i = ring.sent++ % kDepth;
  wires_[c].sends[i] = x.send_on(c, ring.next.rank, BufferList(wires_[c].out[i].data(), bytes),
                                 channels_.bell_ringer());
}

void Pipeline::pass_on(const Task& task, const PipelineStep& step, Interval piece,
                       const std::byte* from, std::byte* to) {
  if (step.keeps) task.out[step.block].copy_from(from, piece);
  if (to == nullptr || piece.empty()) return;
  if (from != nullptr) {
    std::memcpy(to, from, piece.size());
  } else {
    task.in[step.block].copy_to(to, piece);
  }
}

// The own input, on top of what came, goes into the slot or the output or both.
void Pipeline::combine(const Task& task, const PipelineStep& step, Interval piece,
                       const std::byte* from, std::byte* to) {
  if (piece.empty()) return;
  const Reduction& r = task.reduction;
  const size_t count = piece.size() / r.width();
  const void* own = task.in[step.block].contiguous(piece);
  if (own == nullptr) {
    own_.resize(task.send);
    task.in[step.block].copy_to(own_.data(), piece);
    own = own_.data();
  }
  std::byte* target = step.keeps ? task.out[step.block].contiguous(piece) : to;
  if (target == nullptr) {
    result_.resize(task.send);
    target = result_.data();
  }
  if (from == nullptr) {
    reduce(r.first_stage(), target, &own, 1, count);
  } else {
    if (r.op == RedOp::kPremulSum) {  // what came has been multiplied already
      own_.resize(task.send);
      reduce(r, own_.data(), &own, 1, count);
      own = own_.data();
    }
    const void* both[] = {from, own};
    reduce(step.keeps ? r.last_stage() : r.first_stage().last_stage(), target, both, 2, count);
  }
  if (target == result_.data()) task.out[step.block].copy_from(target, piece);
  if (step.keeps && to != nullptr) std::memcpy(to, target, piece.size());
}

}  // namespace fsccl
