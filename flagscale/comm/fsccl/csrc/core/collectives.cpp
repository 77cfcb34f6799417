// Which algorithm a collective takes.
#include <algorithm>

#include "../datagram/tail.h"
#include "group.h"

namespace fsccl {
namespace {

OpCard card_of(OpCode op, size_t bytes, int root = -1) {
  OpCard c;
  c.op = op;
  c.bytes = bytes;
  c.root = root;
  return c;
}

OpCard card_of(OpCode op, size_t bytes, const Reduction& r, int root = -1) {
  OpCard c = card_of(op, bytes, root);
  c.dtype = r.dtype;
  c.red = r.op;
  return c;
}

// Of an operation whose ranks have parts of sizes that all of them know.
OpCard card_of(OpCard c, const BufferLists& parts) {
  c.layout = layout_of(parts);
  return c;
}

// By how much waits between clusters end before their time, so that who is at fault can be found
// out and told to all.
Deadline::Ms earlier_by(const Deadline& d) { return std::min(Deadline::Ms(1000), d.limit() / 5); }

size_t total_of(const BufferLists& list) {
  size_t n = 0;
  for (const BufferList& p : list) n += p.bytes();
  return n;
}

void copy(const BufferList& from, const BufferList& to) {
  from.visit({0, from.bytes()}, [&](const std::byte* p, size_t n, size_t off) {
    to.visit({off, off + n}, [&](std::byte* q, size_t m, size_t at) {
      if (q != p + at) std::copy(p + at, p + at + m, q);
    });
  });
}

// Every interval's place in the concatenation of a list.
std::vector<Interval> places_of(const BufferLists& list) {
  std::vector<Interval> out;
  size_t at = 0;
  for (const BufferList& p : list) {
    out.push_back({at, at + p.bytes()});
    at += p.bytes();
  }
  return out;
}

const char* between_clusters(Algorithm taken) {
  switch (taken) {
    case Algorithm::kRing:
      return "ring between clusters, reduce-scatter and all-gather inside";
    case Algorithm::kTree:
      return "tree between clusters, reduce-scatter and all-gather inside";
    case Algorithm::kTranspose:
      return "transpose between clusters, reduce-scatter and all-gather inside";
    default:
      return "exchange between clusters, reduce-scatter and all-gather inside";
  }
}

BufferList join_all(const BufferLists& list) {
  BufferList out;
  for (const BufferList& one : list) {
    for (const Buffer& p : one.list()) out.add(p);
  }
  return out;
}

}  // namespace

void Group::chose(const OpCard& card, const char* algorithm) {
  took(algorithm);
  say([&] { return card.text() + ": " + algorithm + ", " + clusters_.text(); });
}

template <class F>
void Group::collective(OpCard card, const Deadline& d, F&& body) {
  check_here();
  card.sequence = ++sequence_;
  or_fail(name_of(card.op), card.sequence, [&] {
    check();
    open_shm(d);
    patience_ = d;
    shm_->begin(card, hierarchical() ? d.earlier(earlier_by(d)) : d);
    body(card);
    shm_->end();
  });
}

bool Group::pipelined(const OpCard& card) {
  if (!pipeline_ || config_.size == 1 || card.bytes <= config_.settings.one_shot_bytes) {
    return false;
  }
  chose(card, pipelined_text_.c_str());
  return true;
}

RequestBatch Group::batch() {
  return RequestBatch(transport(), *shm_, shm_->card(), shm_->deadline(),
                      [this] { shm_->look_at(-1, nullptr); });
}

void Group::all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                       const Deadline& d, const void* of) {
  check_reduction(r);
  const size_t bytes = count * r.width();
  if (bytes == 0) return;
  const bool bounded = datagram::Tail::takes(config_.settings.tail, r, bytes) && has_tail(d);
  collective(card_of(OpCode::kAllReduce, bytes, r), d, [&](const OpCard& card) {
    if (bounded) {
      return chose(card, tail_->all_reduce(in, out, count, r, of == nullptr ? in : of,
                                           [&] { all_reduce_exactly(card, in, out, count, r); }));
    }
    all_reduce_exactly(card, in, out, count, r);
  });
}

void Group::all_reduce_exactly(const OpCard& card, const void* in, void* out, size_t count,
                               const Reduction& r) {
  Algorithm named = config_.settings.algorithm;
  // Beside a tail one keeps to connections that are never idle: TCP finds what is lost on them early.
  if (tail_ && card.bytes >= config_.settings.tail.bytes && named == Algorithm::kAuto) {
    named = Algorithm::kRing;
  }
  if ((!hierarchical() || named == Algorithm::kAuto) && pipelined(card)) {
    RequestBatch x = batch();
    return pipeline_->all_reduce(x, in, out, count, r);
  }
  if (!hierarchical()) {
    const bool small = card.bytes <= config_.settings.one_shot_bytes;
    chose(card, small ? "one-shot in shared memory" : "two-shot in shared memory");
    if (small) return local_->all_reduce_one_shot(in, out, count, r);
    return local_->all_reduce_two_shot(in, out, count, r);
  }
  RequestBatch x = batch();
  const Algorithm taken = named == Algorithm::kAuto ? hierarchy_->best_for(card.bytes) : named;
  chose(card, between_clusters(taken));
  hierarchy_->all_reduce(x, in, out, count, r, taken);
}

void Group::reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
                   const Deadline& d) {
  check_reduction(r);
  check_rank(root, "root");
  if (count == 0) return;
  collective(card_of(OpCode::kReduce, count * r.width(), r, root), d, [&](const OpCard& card) {
    if (hierarchical()) {
      chose(card, "reduce-scatter inside, tree between clusters");
      RequestBatch x = batch();
      return hierarchy_->reduce(x, in, out, count, r, root);
    }
    chose(card, "two-shot in shared memory");
    local_->reduce(in, out, count, r, root);
  });
}

void Group::reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                           const Deadline& d) {
  check_reduction(r);
  const size_t bytes = total_of(in);
  if (bytes == 0) return;
  const OpCard what = card_of(card_of(OpCode::kReduceScatter, bytes, r), in);
  collective(what, d, [&](const OpCard& card) {
    if (pipelined(card)) {
      RequestBatch x = batch();
      return pipeline_->reduce_scatter(x, in, out, r);
    }
    if (hierarchical()) {
      chose(card, "reduce-scatter inside, exchange");
      RequestBatch x = batch();
      return hierarchy_->reduce_scatter(x, in, out, r);
    }
    chose(card, "direct in shared memory");
    local_->reduce_scatter(join_all(in), places_of(in), out, r);
  });
}

void Group::all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                       size_t width) {
  const size_t bytes = total_of(out);
  expect_place(in, out[static_cast<size_t>(config_.rank)]);
  if (bytes == 0) return;
  collective(card_of(card_of(OpCode::kAllGather, bytes), out), d, [&](const OpCard& card) {
    copy(in, out[static_cast<size_t>(config_.rank)]);
    if (pipelined(card)) {
      RequestBatch x = batch();
      return pipeline_->all_gather(x, out, width);
    }
    if (hierarchical()) {
      chose(card, "exchange, all-gather inside");
      RequestBatch x = batch();
      return hierarchy_->all_gather(x, out);
    }
    chose(card, "direct in shared memory");
    local_->all_gather(join_all(out), places_of(out));
  });
}

void Group::broadcast(const BufferList& buffer, int root, const Deadline& d) {
  check_rank(root, "root");
  if (buffer.bytes() == 0) return;
  collective(card_of(OpCode::kBroadcast, buffer.bytes(), root), d, [&](const OpCard& card) {
    if (hierarchical()) {
      chose(card, "broadcast inside, tree between clusters, all-gather inside");
      RequestBatch x = batch();
      return hierarchy_->broadcast(x, buffer, root);
    }
    chose(card, "direct in shared memory");
    local_->broadcast(buffer, root);
  });
}

void Group::gather(const BufferList& in, const BufferLists& out, int root, const Deadline& d) {
  check_rank(root, "root");
  BufferLists send(static_cast<size_t>(config_.size)), recv = out;
  send[static_cast<size_t>(root)] = in;
  recv.resize(static_cast<size_t>(config_.size));
  exchange_pairs(card_of(OpCode::kGather, 0, root), send, recv, d);
}

void Group::scatter(const BufferLists& in, const BufferList& out, int root, const Deadline& d) {
  check_rank(root, "root");
  BufferLists send = in, recv(static_cast<size_t>(config_.size));
  send.resize(static_cast<size_t>(config_.size));
  recv[static_cast<size_t>(root)] = out;
  exchange_pairs(card_of(OpCode::kScatter, 0, root), send, recv, d);
}

void Group::all_to_all(const BufferLists& send, const BufferLists& recv, const Deadline& d) {
  exchange_pairs(card_of(OpCode::kAllToAll, 0), send, recv, d);
}

void Group::exchange_pairs(const OpCard& what, const BufferLists& send, const BufferLists& recv,
                           const Deadline& d) {
  collective(what, d, [&](const OpCard& card) {
    if (hierarchical()) {
      chose(card, "shared memory inside, messages between clusters");
      RequestBatch x = batch();
      return hierarchy_->all_to_all(x, send, recv, card.op == OpCode::kAllToAll);
    }
    chose(card, "direct in shared memory");
    local_->all_to_all(send, recv, local_->agree_on_sizes(send, recv));
  });
}

void Group::barrier(const Deadline& d) {
  collective(card_of(OpCode::kBarrier, 0), d, [&](const OpCard& card) {
    chose(card, hierarchical() ? "shared memory and first ranks" : "shared memory");
    if (!hierarchical()) return local_->barrier();
    RequestBatch x = batch();
    hierarchy_->barrier(x);
  });
}

void Group::monitored_barrier(const Deadline& d) {
  check_here();
  OpCard card = card_of(OpCode::kBarrier, 0);
  card.sequence = ++sequence_;
  or_fail("monitored_barrier", card.sequence, [&] {
    check();
    meet(d);
    if (config_.rank == 0) return hear_all(card, d);
    // Those that wait for rank 0's word must hear its verdict before they blame it.
    const Deadline later = d.earlier(-earlier_by(d));
    const uint64_t tag = Transport::kCollectiveTag | card.sequence;
    transport_->send(0, tag, BufferList(), card);
    transport_->wait(transport_->recv(0, tag, BufferList(), card), later, nullptr);
  });
}

void Group::hear_all(const OpCard& card, const Deadline& d) {
  const uint64_t tag = Transport::kCollectiveTag | card.sequence;
  std::vector<RequestPtr> reports;
  for (int r = 1; r < config_.size; ++r) {
    reports.push_back(transport_->recv(r, tag, BufferList(), card));
  }
  std::string late;
  int first = -1;
  for (const RequestPtr& report : reports) {
    try {
      transport_->wait(report, d, nullptr);
    } catch (const Error& e) {
      if (e.fault != Fault::kTimeout) throw;
      late += (first < 0 ? "" : ", ") + names_[static_cast<size_t>(report->peer)];
      if (first < 0) first = report->peer;
    }
  }
  if (first >= 0) throw Error(Fault::kTimeout, first, late + " did not come within " + d.text());
  for (int r = 1; r < config_.size; ++r) transport_->send(r, tag, BufferList(), card);
}

}  // namespace fsccl
