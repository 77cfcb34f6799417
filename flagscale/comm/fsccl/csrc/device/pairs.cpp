// Operations in which a rank knows only what it sends and receives itself.
#include "operation.h"

namespace fsccl {
namespace {

OpCard pair_card(OpCode op, int root) {
  OpCard c;
  c.op = op;
  c.root = root;
  return c;
}

}  // namespace

void Engine::gather(const BufferList& in, const BufferLists& out, int root, const Deadline& d) {
  const auto n = static_cast<size_t>(group_->size());
  BufferLists send(n), recv = out;
  send[static_cast<size_t>(root)] = in;
  recv.resize(n);
  exchange_pairs(pair_card(OpCode::kGather, root), send, recv, d);
}

void Engine::scatter(const BufferLists& in, const BufferList& out, int root,
                     const Deadline& d) {
  const auto n = static_cast<size_t>(group_->size());
  BufferLists send = in, recv(n);
  send.resize(n);
  recv[static_cast<size_t>(root)] = out;
  exchange_pairs(pair_card(OpCode::kScatter, root), send, recv, d);
}

void Engine::all_to_all(const BufferLists& send, const BufferLists& recv,
                        const Deadline& d) {
  exchange_pairs(pair_card(OpCode::kAllToAll, -1), send, recv, d);
}

void Engine::exchange_pairs(const OpCard& what, const BufferLists& send,
                            const BufferLists& recv, const Deadline& d) {
  operation(what, d, [&](const OpCard& card) {
    log(card, "native library inside, pipes between clusters");
    expect_own(send[static_cast<size_t>(rank_)], recv[static_cast<size_t>(rank_)]);
    const Tensors from = memories(send, at::kByte), to = memories(recv, at::kByte);
    tracks_->fork();
    if (bridged()) exchange_outside(from, to);
    exchange_inside(from, to);
    tracks_->join();
  });
}

void Engine::expect_own(const BufferList& sent, const BufferList& expected) const {
  if (sent.bytes() == expected.bytes()) return;
  throw Error(Fault::kMismatch, rank_,
              group_->name(rank_) + " sends itself " + std::to_string(sent.bytes()) +
                  " bytes and expects " + std::to_string(expected.bytes()));
}

void Engine::exchange_inside(const Tensors& send, const Tensors& recv) {
  std::vector<int64_t> sent, received;
  Tensors parts;
  int64_t total = 0;
  for (const int r : clusters_.own()) {
    parts.push_back(send[static_cast<size_t>(r)]);
    sent.push_back(parts.back().numel());
    received.push_back(recv[static_cast<size_t>(r)].numel());
    total += received.back();
  }
  const at::Tensor got = arena_->take(total, at::kByte);
  mates_->all_to_all(at::cat(parts), sent, got, received);
  size_t at = 0;
  for (const int r : clusters_.own()) {
    const at::Tensor& place = recv[static_cast<size_t>(r)];
    if (place.numel() > 0) place.copy_(slice(got, at, place.nbytes()));
    at += place.nbytes();
  }
}

// Round by round a slot to, and a slot from, every rank of the other clusters.
void Engine::exchange_outside(const Tensors& send, const Tensors& recv) {
  const size_t step = config_.pipe_bytes;
  std::vector<int> peers;
  size_t longest = 0;
  for (int d = 1; d < clusters_.count(); ++d) {
    const int c = (clusters_.mine + d) % clusters_.count();
    for (size_t j = 0; j < size_of(c); ++j) {
      // Ranks of a cluster begin with different peers.
      const int peer = rank_of(c, (j + mine()) % size_of(c));
      peers.push_back(peer);
      longest = std::max({longest, send[static_cast<size_t>(peer)].nbytes(),
                          recv[static_cast<size_t>(peer)].nbytes()});
    }
  }
  for (size_t lo = 0; lo < longest; lo += step) {
    for (const int peer : peers) {
      const at::Tensor& from_here = send[static_cast<size_t>(peer)];
      const size_t n = inside(from_here, lo, step);
      if (n > 0) to(peer).put(*tracks_, slice(from_here, lo, n));
    }
    for (const int peer : peers) {
      const at::Tensor& to_here = recv[static_cast<size_t>(peer)];
      const size_t n = inside(to_here, lo, step);
      if (n > 0) from(peer).take(*tracks_, slice(to_here, lo, n));
    }
  }
}

}  // namespace fsccl
