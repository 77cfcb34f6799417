// Operations that only spread data, of sizes that every rank knows.
#include "operation.h"

namespace fsccl {

void Engine::all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                        size_t /*width*/) {
  const size_t bytes = sum_of(out), longest = longest_part(out);
  expect_place(in, out[static_cast<size_t>(rank_)]);
  if (bytes == 0) return;
  const OpCard what = dense_card(OpCode::kAllGather, bytes, nullptr, -1, layout_of(out));
  operation(what, d, [&](const OpCard& card) {
    const at::Tensor own = memories({in}, at::kByte)[0];
    const Tensors results = memories(out, at::kByte);
    if (by_kernel(nvlink::Collective::kAllGather, {own}, results, {}, card)) return;
    if (tiny(longest)) {
      log(card, "everyone's part on the board");
      const size_t stride = stride_for(longest);
      const Tensors parts = rows(share(own, stride), stride, longest);
      for (size_t p = 0; p < results.size(); ++p) {
        results[p].copy_(slice(parts[p], 0, results[p].nbytes()));
      }
      return;
    }
    log(card, "exchange, all-gather inside, pipelined");
    const at::Tensor& place = results[static_cast<size_t>(rank_)];
    if (own.data_ptr() != place.data_ptr()) place.copy_(own);
    const size_t window = chunk_of(longest, 1, 1);
    pipeline(
        ceil_div(longest, window),
        [&](Stage& s, size_t k) { gather_begin(s, results, k * window, window); },
        [&](Stage& s, size_t k) { gather_end(s, results, k * window, window); });
  });
}

// Sends a window of the own part to its owners in the other clusters, and spreads it inside.
void Engine::gather_begin(Stage& s, const Tensors& out, size_t lo, size_t window) {
  const size_t ranks = clusters_.own().size(), total = ranks * window;
  const at::Tensor& part = out[static_cast<size_t>(rank_)];
  const size_t n = inside(part, lo, window);
  const Interval own{mine() * window, mine() * window + n};
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine) continue;
    for (size_t j = 0; j < size_of(c); ++j) {
      const Interval both = overlap(own, part_of(total, size_of(c), j));
      if (both.empty()) continue;
      to(rank_of(c, j)).put(*tracks_, slice(part, lo + (both.lo - own.lo), both.size()));
    }
  }
  if (ranks > 1) {
    at::Tensor piece = n == window ? slice(part, lo, n) : fit(*arena_, s.shard, window, at::kByte);
    if (n > 0 && n < window) slice(piece, 0, n).copy_(slice(part, lo, n));
    const at::Tensor all = fit(*arena_, s.work, total, at::kByte);
    mates_->all_gather(piece, all);
    unpack(all, out, clusters_.mine, lo, window);
  }
  s.native = tracks_->mark(Track::kNative);
}

// Takes the owned interval of the other clusters' windows, and spreads it inside.
void Engine::gather_end(Stage& s, const Tensors& out, size_t lo, size_t window) {
  const size_t ranks = clusters_.own().size();
  const auto count = static_cast<size_t>(clusters_.count());
  s.received.resize(count);
  s.shards.resize(count);
  tracks_->wait(Track::kIn, s.native);
  for (int c = 0; c < clusters_.count(); ++c) {
    if (c == clusters_.mine) continue;
    const size_t total = size_of(c) * window, each = ceil_div(total, ranks);
    const Interval own = part_of(total, ranks, mine());
    at::Tensor got = fit(*arena_, s.received[static_cast<size_t>(c)], each, at::kByte);
    for (size_t i = 0; i < size_of(c); ++i) {
      const size_t n = inside(out[static_cast<size_t>(rank_of(c, i))], lo, window);
      const Interval both = overlap(own, {i * window, i * window + n});
      if (both.empty()) continue;
      from(rank_of(c, i)).take(*tracks_, slice(got, both.lo - own.lo, both.size()));
    }
    tracks_->wait(Track::kNative, tracks_->mark(Track::kIn));
    const at::Tensor all = fit(*arena_, s.shards[static_cast<size_t>(c)], ranks * each, at::kByte);
    mates_->all_gather(got, all);
    unpack(all, out, c, lo, window);
  }
}

// Windows of a cluster's parts, one after the other, to their places. This rank has its own.
void Engine::unpack(const at::Tensor& packed, const Tensors& out, int cluster, size_t lo,
                    size_t window) {
  for (size_t i = 0; i < size_of(cluster); ++i) {
    const int r = rank_of(cluster, i);
    const at::Tensor& part = out[static_cast<size_t>(r)];
    const size_t n = inside(part, lo, window);
    if (r != rank_ && n > 0) slice(part, lo, n).copy_(slice(packed, i * window, n));
  }
}

void Engine::broadcast(const BufferList& buffer, int root, const Deadline& d) {
  if (buffer.bytes() == 0) return;
  const OpCard what = dense_card(OpCode::kBroadcast, buffer.bytes(), nullptr, root);
  operation(what, d, [&](const OpCard& card) {
    const at::Tensor all = memories({buffer}, at::kByte)[0];
    if (by_kernel(nvlink::Collective::kBroadcast, {all}, {all}, {}, card, root)) return;
    if (tiny(buffer.bytes())) {
      log(card, "on the board");
      const size_t stride = stride_for(buffer.bytes());
      const at::Tensor none = slice(all, 0, 0);
      const at::Tensor shared = share(root == rank_ ? all : none, stride);
      if (root != rank_) {
        all.copy_(slice(shared, static_cast<size_t>(root) * stride, buffer.bytes()));
      }
      return;
    }
    log(card, "broadcast inside, sent by the root to owners, all-gather inside, pipelined");
    broadcast_from(all, root);
  });
}

void Engine::broadcast_from(const at::Tensor& buffer, int root) {
  const auto total = static_cast<size_t>(buffer.numel());
  const size_t chunk = chunk_of(total, 1, smallest_cluster()), ranks = clusters_.own().size();
  const int source = cluster_of(root);
  const auto& around_root = clusters_.ranks[static_cast<size_t>(source)];
  const auto place = std::find(around_root.begin(), around_root.end(), root) - around_root.begin();
  const auto piece = [&](size_t k) {
    return slice(buffer, k * chunk, std::min(chunk, total - k * chunk));
  };
  const auto begin = [&](Stage& s, size_t k) {
    const at::Tensor now = piece(k);
    for (int c = 0; c < clusters_.count() && rank_ == root; ++c) {
      for (size_t j = 0; c != source && j < size_of(c); ++j) {
        const Interval theirs = part_of(now.nbytes(), size_of(c), j);
        if (!theirs.empty()) {
          to(rank_of(c, j)).put(*tracks_, slice(now, theirs.lo, theirs.size()));
        }
      }
    }
    if (source == clusters_.mine) mates_->broadcast(now, static_cast<int>(place));
    s.native = tracks_->mark(Track::kNative);
  };
  const auto end = [&](Stage& s, size_t k) {
    if (source == clusters_.mine) return;
    const at::Tensor now = piece(k);
    const size_t each = ceil_div(now.nbytes(), ranks);
    const Interval own = part_of(now.nbytes(), ranks, mine());
    const at::Tensor got = fit(*arena_, s.shard, each, at::kByte);
    tracks_->wait(Track::kIn, s.native);
    if (!own.empty()) from(root).take(*tracks_, slice(got, 0, own.size()));
    tracks_->wait(Track::kNative, tracks_->mark(Track::kIn));
    if (now.nbytes() == ranks * each) return mates_->all_gather(got, now);
    const at::Tensor all = fit(*arena_, s.work, ranks * each, at::kByte);
    mates_->all_gather(got, all);
    now.copy_(slice(all, 0, now.nbytes()));
  };
  pipeline(ceil_div(total, chunk), begin, end);
}

}  // namespace fsccl
