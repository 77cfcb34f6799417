// Reductions, and what tiny operations share.
#include <cstring>

#include "operation.h"

namespace fsccl {
namespace {

// The sum inside a cluster, of inputs that are multiplied already.
Reduction inside_stage(const Reduction& r) {
  Reduction first = r.first_stage();
  if (first.op == RedOp::kPremulSum) first.op = RedOp::kSum;
  return first;
}

at::Tensor given(const Reduction& r, const at::Tensor& in) {
  return r.op == RedOp::kPremulSum ? premultiplied(r, in) : in;
}

}  // namespace

// Everyone's part of a tiny operation, one after the other. An empty part writes nothing.
at::Tensor Engine::share(const at::Tensor& part, size_t stride) {
  const size_t n = board_->members().size();
  const uint32_t step = ++step_;
  std::byte* area = board_->area(step);
  const auto host = [](std::byte* at, size_t bytes) {
    return at::from_blob(at, {static_cast<int64_t>(bytes)}, at::kByte);
  };
  if (part.numel() > 0) {
    host(area + static_cast<size_t>(rank_) * stride, part.nbytes()).copy_(part, true);
  }
  tracks_->signal(Track::kNative, board_->posted(rank_), step);
  for (const int p : board_->members()) {
    if (p != rank_) tracks_->await(Track::kNative, board_->posted(p), step, p);
  }
  at::Tensor all = arena_->take(static_cast<int64_t>(n * stride), at::kByte);
  return all.copy_(host(area, n * stride), true);
}

Engine::Tensors Engine::rows(const at::Tensor& shared, size_t stride, size_t bytes) const {
  Tensors out;
  for (size_t p = 0; p < board_->members().size(); ++p) {
    out.push_back(slice(shared, p * stride, bytes));
  }
  return out;
}

void Engine::all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                        const Deadline& d) {
  check_reduction(r);
  if (count == 0) return;
  const auto type = scalar_type(r.dtype);
  operation(dense_card(OpCode::kAllReduce, count * r.width(), &r, -1), d, [&](const OpCard& card) {
    reduce_over(memory(in, count, type), memory(out, count, type), r, -1, card);
  });
}

void Engine::reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
                    const Deadline& d) {
  check_reduction(r);
  if (count == 0) return;
  const auto type = scalar_type(r.dtype);
  operation(dense_card(OpCode::kReduce, count * r.width(), &r, root), d, [&](const OpCard& card) {
    reduce_over(memory(in, count, type), memory(out, count, type), r, root, card);
  });
}

// root >= 0: only the root's `out` is written.
void Engine::reduce_over(const at::Tensor& in, const at::Tensor& out, const Reduction& r, int root,
                         const OpCard& card) {
  const auto n = static_cast<size_t>(in.numel());
  if (root < 0 && by_kernel(nvlink::Collective::kAllReduce, {in}, {out}, r, card)) return;
  if (tiny(in.nbytes())) {
    log(card, "everyone's part on the board");
    const size_t stride = stride_for(in.nbytes());
    const at::Tensor shared = share(bytes_of(given(r, in)), stride);
    Tensors sources;
    for (const at::Tensor& row : rows(shared, stride, in.nbytes())) {
      sources.push_back(row.view(in.scalar_type()));
    }
    if (root < 0 || root == rank_) combine(r.last_stage(), sources, out);
    return;
  }
  log(card, "reduce-scatter inside, exchange, all-gather inside, pipelined");
  const size_t chunk = chunk_of(n, r.width(), smallest_cluster());
  const auto piece = [&](const at::Tensor& t, size_t k) {
    return slice(t, k * chunk, std::min(chunk, n - k * chunk));
  };
  const int to = root < 0 ? -1 : cluster_of(root);
  pipeline(
      ceil_div(n, chunk), [&](Stage& s, size_t k) { reduce_begin(s, piece(in, k), r, to); },
      [&](Stage& s, size_t k) { reduce_end(s, piece(out, k), r, root); });
}

// Sums a chunk inside the cluster, and sends the owned interval of the sum to all clusters or one.
void Engine::reduce_begin(Stage& s, const at::Tensor& in, const Reduction& r, int to) {
  const auto n = static_cast<size_t>(in.numel()), ranks = clusters_.own().size();
  const size_t each = ceil_div(n, ranks);
  const auto type = in.scalar_type();
  at::Tensor source = given(r, in);
  if (ranks == 1) {
    s.shard = source;
  } else {
    if (n != ranks * each) {
      at::Tensor padded = fit(*arena_, s.work, ranks * each, type);
      slice(padded, 0, n).copy_(source);
      source = padded;
    }
    s.shard = fit(*arena_, s.shard_memory, each, type);
    mates_->reduce_scatter(source, s.shard, inside_stage(r));
  }
  s.native = tracks_->mark(Track::kNative);
  tracks_->wait(Track::kOut, s.native);
  const Interval own = part_of(n, ranks, mine());
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine || (to >= 0 && to != c)) continue;
    for (size_t j = 0; j < size_of(c); ++j) {
      const Interval both = overlap(own, part_of(n, size_of(c), j));
      if (both.empty()) continue;
      this->to(rank_of(c, j))
          .put(*tracks_, bytes_of(slice(s.shard, both.lo - own.lo, both.size())));
    }
  }
  s.out = tracks_->mark(Track::kOut);
}

// Takes the other clusters' sums of the owned interval, adds, and spreads the result inside.
void Engine::reduce_end(Stage& s, const at::Tensor& out, const Reduction& r, int root) {
  const auto n = static_cast<size_t>(out.numel()), ranks = clusters_.own().size();
  const size_t each = ceil_div(n, ranks);
  const auto type = out.scalar_type();
  tracks_->wait(Track::kNative, s.out);
  if (root >= 0 && cluster_of(root) != clusters_.mine) return;
  const Interval own = part_of(n, ranks, mine());
  at::Tensor sum = s.shard;
  if (bridged() || r.op == RedOp::kAvg) {
    sum = fit(*arena_, s.sum, each, type);
    s.received.resize(static_cast<size_t>(clusters_.count()));
    Tensors sources;
    tracks_->wait(Track::kIn, s.native);
    for (int c = 0; c < clusters_.count(); ++c) {
      if (c == clusters_.mine) {
        sources.push_back(slice(s.shard, 0, own.size()));
        continue;
      }
      at::Tensor theirs = fit(*arena_, s.received[static_cast<size_t>(c)], each, type);
      for (size_t j = 0; j < size_of(c); ++j) {
        const Interval both = overlap(own, part_of(n, size_of(c), j));
        if (both.empty()) continue;
        from(rank_of(c, j)).take(*tracks_, bytes_of(slice(theirs, both.lo - own.lo, both.size())));
      }
      sources.push_back(slice(theirs, 0, own.size()));
    }
    const OnTrack in(*tracks_, Track::kIn);
    if (!own.empty()) combine(r.last_stage(), sources, slice(sum, 0, own.size()));
    tracks_->wait(Track::kNative, tracks_->mark(Track::kIn));
  }
  const bool wanted = root < 0 || root == rank_;
  if (wanted && n == ranks * each) return mates_->all_gather(bytes_of(sum), bytes_of(out));
  at::Tensor whole = fit(*arena_, s.work, ranks * each, type);
  mates_->all_gather(bytes_of(sum), bytes_of(whole));
  if (wanted) out.copy_(slice(whole, 0, n));
}

void Engine::reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                            const Deadline& d) {
  check_reduction(r);
  const size_t bytes = sum_of(in), width = r.width();
  if (bytes == 0) return;
  const OpCard what = dense_card(OpCode::kReduceScatter, bytes, &r, -1, layout_of(in));
  operation(what, d, [&](const OpCard& card) {
    const auto type = scalar_type(r.dtype);
    const Tensors parts = memories(in, type);
    const at::Tensor result = memories({out}, type)[0];
    if (by_kernel(nvlink::Collective::kReduceScatter, parts, {result}, r, card)) return;
    if (tiny(bytes)) {
      log(card, "everyone's part on the board");
      return reduce_scatter_tiny(parts, result, r);
    }
    log(card, "reduce-scatter inside, exchange, pipelined");
    const size_t longest = longest_part(in) / width, window = chunk_of(longest, width, 1);
    pipeline(
        ceil_div(longest, window),
        [&](Stage& s, size_t k) { scatter_begin(s, parts, k * window, window, r); },
        [&](Stage& s, size_t k) { scatter_end(s, parts, result, k * window, window, r); });
  });
}

void Engine::reduce_scatter_tiny(const Tensors& parts, const at::Tensor& out, const Reduction& r) {
  const at::Tensor whole = given(r, at::cat(parts));
  size_t at = 0;
  for (int p = 0; p < rank_; ++p) at += parts[static_cast<size_t>(p)].nbytes();
  const size_t stride = stride_for(whole.nbytes());
  Tensors sources;
  for (const at::Tensor& row : rows(share(bytes_of(whole), stride), stride, whole.nbytes())) {
    sources.push_back(slice(row, at, out.nbytes()).view(out.scalar_type()));
  }
  if (out.numel() > 0) combine(r.last_stage(), sources, out);
}

// Of each cluster's ranks' parts the same window: sums them inside this cluster, and sends what it
// owns of the sum to the ranks whose parts they are.
void Engine::scatter_begin(Stage& s, const Tensors& in, size_t lo, size_t window,
                           const Reduction& r) {
  const size_t ranks = clusters_.own().size(), count = static_cast<size_t>(clusters_.count());
  const auto type = in[0].scalar_type();
  s.shards.resize(count);
  s.shard_memories.resize(count);
  for (int d = 1; d <= clusters_.count(); ++d) {
    const int c = (clusters_.mine + d) % clusters_.count();
    const size_t total = size_of(c) * window, each = ceil_div(total, ranks);
    at::Tensor packed = fit(*arena_, s.work, ranks * each, type);
    for (size_t j = 0; j < size_of(c); ++j) {
      const at::Tensor& part = in[static_cast<size_t>(rank_of(c, j))];
      const size_t n = inside(part, lo, window);
      if (n > 0) slice(packed, j * window, n).copy_(given(r, slice(part, lo, n)));
    }
    at::Tensor& shard = s.shards[static_cast<size_t>(c)];
    shard = fit(*arena_, s.shard_memories[static_cast<size_t>(c)], each, type);
    mates_->reduce_scatter(packed, shard, inside_stage(r));
    if (c == clusters_.mine) continue;
    tracks_->wait(Track::kOut, tracks_->mark(Track::kNative));
    const Interval own = part_of(total, ranks, mine());
    for (size_t j = 0; j < size_of(c); ++j) {
      const size_t n = inside(in[static_cast<size_t>(rank_of(c, j))], lo, window);
      const Interval both = overlap(own, {j * window, j * window + n});
      if (both.empty()) continue;
      to(rank_of(c, j)).put(*tracks_, bytes_of(slice(shard, both.lo - own.lo, both.size())));
    }
  }
  s.native = tracks_->mark(Track::kNative);
  s.out = tracks_->mark(Track::kOut);
}

void Engine::scatter_end(Stage& s, const Tensors& in, const at::Tensor& out, size_t lo,
                         size_t window, const Reduction& r) {
  const size_t ranks = clusters_.own().size(), total = ranks * window;
  const size_t n = inside(in[static_cast<size_t>(rank_)], lo, window);
  const Interval wanted{mine() * window, mine() * window + n};
  s.received.resize(static_cast<size_t>(clusters_.count()));
  Tensors sources;
  tracks_->wait(Track::kNative, s.out);
  tracks_->wait(Track::kIn, s.native);
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine) {
      sources.push_back(slice(s.shards[static_cast<size_t>(c)], 0, n));
      continue;
    }
    at::Tensor theirs = fit(*arena_, s.received[static_cast<size_t>(c)], window, out.scalar_type());
    for (size_t i = 0; i < size_of(c); ++i) {
      const Interval both = overlap(wanted, part_of(total, size_of(c), i));
      if (both.empty()) continue;
      from(rank_of(c, i)).take(*tracks_, bytes_of(slice(theirs, both.lo - wanted.lo, both.size())));
    }
    sources.push_back(slice(theirs, 0, n));
  }
  const OnTrack in_track(*tracks_, Track::kIn);
  if (n > 0) combine(r.last_stage(), sources, slice(out, lo, n));
  tracks_->wait(Track::kNative, tracks_->mark(Track::kIn));
}

}  // namespace fsccl
