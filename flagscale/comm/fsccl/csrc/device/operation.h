// What the engine's operations share. Included by their sources alone.
#pragma once

#include <array>

#include "combine.h"
#include "engine.h"

namespace fsccl {

// A chunk under way. Its memory is used again kLag + 1 chunks later: what is enqueued for that
// chunk waits for the marks of this one.
struct Engine::Stage {
  at::Tensor work, shard, shard_memory, sum;
  Tensors shards, shard_memories, received;  // by cluster
  Mark native;                               // what this chunk needs of kNative is there
  Mark out;                                  // what leaves of this chunk has left
};

template <class F>
void Engine::operation(OpCard card, const Deadline& d, F&& body) {
  card.sequence = ++sequence_;
  deadline_ = d;
  const at::NoGradGuard no_grad;
  const OnTrack native(*tracks_, Track::kNative);
  try {
    if (left_) throw Error(Fault::kAborted, rank_, "the group has been shut down");
    look();
    board_->begin(card);
    courier_->begin(card);
    arena_->reset();
    body(card);
  } catch (const Error& e) {
    if (e.fault == Fault::kUsage) throw;
    fail(name_of(card.op), card.sequence, e);
  } catch (const std::exception& e) {  // such as no memory, while others wait for this rank
    const auto* const torchs = dynamic_cast<const c10::Error*>(&e);
    const std::string why = torchs != nullptr ? torchs->what_without_backtrace() : e.what();
    fail(name_of(card.op), card.sequence,
         Error(Fault::kSystem, rank_, group_->name(rank_) + ": " + why));
  }
}

template <class Begin, class End>
void Engine::pipeline(size_t chunks, Begin&& begin, End&& end) {
  std::array<Stage, kLag + 1> stages;
  tracks_->fork();
  for (size_t k = 0; k < chunks + kLag; ++k) {
    if (k < chunks) begin(stages[k % stages.size()], k);
    if (k >= kLag && k - kLag < chunks) end(stages[(k - kLag) % stages.size()], k - kLag);
  }
  tracks_->join();
}

// The i-th of `parts` equal parts of [0, n), of which the last may be short or empty.
inline Interval part_of(size_t n, size_t parts, size_t i) {
  const size_t each = ceil_div(n, parts);
  return {std::min(i * each, n), std::min((i + 1) * each, n)};
}

inline at::Tensor slice(const at::Tensor& t, size_t lo, size_t n) {
  return t.narrow(0, static_cast<int64_t>(lo), static_cast<int64_t>(n));
}

inline at::Tensor bytes_of(const at::Tensor& t) { return t.view(at::kByte); }

// How much of a window lies inside a part.
inline size_t inside(const at::Tensor& part, size_t lo, size_t window) {
  const auto n = static_cast<size_t>(part.numel());
  return n > lo ? std::min(n - lo, window) : 0;
}

// The first `n` elements of memory that is made when it is first asked for.
inline at::Tensor fit(Arena& arena, at::Tensor& memory, size_t n, at::ScalarType type) {
  if (!memory.defined() || static_cast<size_t>(memory.numel()) < n) {
    memory = arena.take(static_cast<int64_t>(n), type);
  }
  return slice(memory, 0, n);
}

// What ranks that know all sizes compare.
inline OpCard dense_card(OpCode op, size_t bytes, const Reduction* r, int root,
                         uint64_t layout = 0) {
  OpCard c;
  c.op = op;
  c.bytes = bytes;
  c.root = root;
  c.layout = layout;
  if (r != nullptr) {
    c.dtype = r->dtype;
    c.red = r->op;
  }
  return c;
}

inline size_t sum_of(const BufferLists& list) {
  size_t n = 0;
  for (const BufferList& p : list) n += p.bytes();
  return n;
}

inline size_t longest_part(const BufferLists& list) {
  size_t n = 0;
  for (const BufferList& p : list) n = std::max(n, p.bytes());
  return n;
}

inline size_t stride_for(size_t bytes) { return ceil_div(bytes, kCacheLine) * kCacheLine; }

}  // namespace fsccl
