// Choice of the algorithm of each collective.
#include <algorithm>

#include "../datagram/bounded_all_reduce.h"
#include "group.h"

namespace fsccl {
namespace {

CollectiveFingerprint fingerprint_of(OpCode op, size_t bytes, DType dtype, int root = -1) {
  CollectiveFingerprint c;
  c.op = op;
  c.bytes = bytes;
  c.dtype = dtype;
  c.root = root;
  return c;
}

CollectiveFingerprint fingerprint_of(OpCode op, size_t bytes, const Reduction& r, int root = -1) {
  CollectiveFingerprint c = fingerprint_of(op, bytes, r.dtype, root);
  c.red_op = r.op;
  return c;
}

// Adds the sizes of the parts, for operations in which all ranks pass the sizes of all parts.
CollectiveFingerprint fingerprint_of(CollectiveFingerprint c, const BufferLists& parts) {
  c.sizes_hash = hash_of_sizes(parts);
  return c;
}

// Returns by how much waits between nodes end before the deadline, so that there is time to find
// the rank at fault and report it to all ranks.
Deadline::Ms straggler_search_time(const Deadline& d) {
  return std::min(Deadline::Ms(1000), d.limit() / 5);
}

size_t total_of(const BufferLists& list) {
  size_t n = 0;
  for (const BufferList& p : list) n += p.bytes();
  return n;
}

void copy_list(const BufferList& from, const BufferList& to) {
  from.visit({0, from.bytes()}, [&](const std::byte* p, size_t n, size_t off) {
    to.visit({off, off + n}, [&](std::byte* q, size_t m, size_t at) {
      if (q != p + at) std::copy(p + at, p + at + m, q);
    });
  });
}

// Returns the interval of each list entry in the concatenation of the list.
std::vector<Interval> offsets_of(const BufferLists& list) {
  std::vector<Interval> out;
  size_t at = 0;
  for (const BufferList& p : list) {
    out.push_back({at, at + p.bytes()});
    at += p.bytes();
  }
  return out;
}

const char* describe_inter_node(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kRing:
      return "ring between nodes, reduce-scatter and all-gather inside";
    case Algorithm::kTree:
      return "tree between nodes, reduce-scatter and all-gather inside";
    case Algorithm::kTranspose:
      return "transpose between nodes, reduce-scatter and all-gather inside";
    default:
      return "exchange between nodes, reduce-scatter and all-gather inside";
  }
}

BufferList concatenate(const BufferLists& list) {
  BufferList out;
  for (const BufferList& list_entry : list) {
    for (const Buffer& p : list_entry.buffers()) out.add(p);
  }
  return out;
}

}  // namespace

void Group::log_algorithm(const CollectiveFingerprint& fingerprint, const char* algorithm) {
  set_last_algorithm(algorithm);
  log_debug([&] { return fingerprint.text() + ": " + algorithm + ", " + nodes_.text(); });
}

template <class F>
void Group::collective(CollectiveFingerprint fingerprint, const Deadline& d, F&& body) {
  check_usable();
  fingerprint.sequence = ++sequence_;
  run_or_fail(name_of(fingerprint.op), fingerprint.sequence, [&] {
    throw_if_failed();
    open_shared_memory(d);
    deadline_ = d;
    shm_->begin(fingerprint, spans_nodes() ? d.earlier_by(straggler_search_time(d)) : d);
    body(fingerprint);
    shm_->end();
  });
}

bool Group::use_pipeline(const CollectiveFingerprint& fingerprint) {
  if (!pipeline_ || config_.size == 1 || fingerprint.bytes <= config_.settings.one_shot_bytes) {
    return false;
  }
  log_algorithm(fingerprint, pipeline_description_.c_str());
  return true;
}

RequestBatch Group::make_request_batch() {
  return RequestBatch(transport(), *shm_, shm_->fingerprint(), shm_->deadline(),
                      [this] { shm_->check_peers(-1, nullptr); });
}

void Group::all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                       const Deadline& d, const void* bucket) {
  check_reduction(r);
  const size_t bytes = count * r.width();
  if (bytes == 0) return;
  const bool bounded =
      datagram::BoundedAllReduce::is_eligible(config_.settings.bounded, r, bytes) &&
      has_bounded_all_reduce(d);
  collective(fingerprint_of(OpCode::kAllReduce, bytes, r), d,
             [&](const CollectiveFingerprint& fingerprint) {
               if (bounded) {
                 return log_algorithm(
                     fingerprint, bounded_all_reduce_->all_reduce(
                                      in, out, count, r, bucket == nullptr ? in : bucket,
                                      [&] { all_reduce_exactly(fingerprint, in, out, count, r); }));
               }
               all_reduce_exactly(fingerprint, in, out, count, r);
             });
}

void Group::all_reduce_exactly(const CollectiveFingerprint& fingerprint, const void* in, void* out,
                               size_t count, const Reduction& r) {
  Algorithm requested = config_.settings.algorithm;
  // In a group that also uses the bounded all_reduce, prefer connections that are never idle, on
  // which TCP detects losses early.
  if (bounded_all_reduce_ && fingerprint.bytes >= config_.settings.bounded.min_bytes &&
      requested == Algorithm::kAuto) {
    requested = Algorithm::kRing;
  }
  if ((!spans_nodes() || requested == Algorithm::kAuto) && use_pipeline(fingerprint)) {
    RequestBatch requests = make_request_batch();
    return pipeline_->all_reduce(requests, in, out, count, r);
  }
  if (!spans_nodes()) {
    const bool small = fingerprint.bytes <= config_.settings.one_shot_bytes;
    log_algorithm(fingerprint, small ? "one-shot in shared memory" : "two-shot in shared memory");
    if (small) return intra_node_->all_reduce_one_shot(in, out, count, r);
    return intra_node_->all_reduce_two_shot(in, out, count, r);
  }
  RequestBatch requests = make_request_batch();
  const Algorithm algorithm =
      requested == Algorithm::kAuto ? hierarchical_->best_algorithm(fingerprint.bytes) : requested;
  log_algorithm(fingerprint, describe_inter_node(algorithm));
  hierarchical_->all_reduce(requests, in, out, count, r, algorithm);
}

void Group::reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
                   const Deadline& d) {
  check_reduction(r);
  check_rank(root, "root");
  if (count == 0) return;
  collective(fingerprint_of(OpCode::kReduce, count * r.width(), r, root), d,
             [&](const CollectiveFingerprint& fingerprint) {
               if (spans_nodes()) {
                 log_algorithm(fingerprint, "reduce-scatter inside, tree between nodes");
                 RequestBatch requests = make_request_batch();
                 return hierarchical_->reduce(requests, in, out, count, r, root);
               }
               log_algorithm(fingerprint, "two-shot in shared memory");
               intra_node_->reduce(in, out, count, r, root);
             });
}

void Group::reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                           const Deadline& d) {
  check_reduction(r);
  const size_t bytes = total_of(in);
  if (bytes == 0) return;
  const CollectiveFingerprint base =
      fingerprint_of(fingerprint_of(OpCode::kReduceScatter, bytes, r), in);
  collective(base, d, [&](const CollectiveFingerprint& fingerprint) {
    if (use_pipeline(fingerprint)) {
      RequestBatch requests = make_request_batch();
      return pipeline_->reduce_scatter(requests, in, out, r);
    }
    if (spans_nodes()) {
      log_algorithm(fingerprint, "reduce-scatter inside, exchange");
      RequestBatch requests = make_request_batch();
      return hierarchical_->reduce_scatter(requests, in, out, r);
    }
    log_algorithm(fingerprint, "direct in shared memory");
    intra_node_->reduce_scatter(concatenate(in), offsets_of(in), out, r);
  });
}

void Group::all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                       size_t width) {
  const size_t bytes = total_of(out);
  check_gather_sizes(in, out[static_cast<size_t>(config_.rank)]);
  if (bytes == 0) return;
  collective(fingerprint_of(fingerprint_of(OpCode::kAllGather, bytes, in.dtype()), out), d,
             [&](const CollectiveFingerprint& fingerprint) {
               copy_list(in, out[static_cast<size_t>(config_.rank)]);
               if (use_pipeline(fingerprint)) {
                 RequestBatch requests = make_request_batch();
                 return pipeline_->all_gather(requests, out, width);
               }
               if (spans_nodes()) {
                 log_algorithm(fingerprint, "exchange, all-gather inside");
                 RequestBatch requests = make_request_batch();
                 return hierarchical_->all_gather(requests, out);
               }
               log_algorithm(fingerprint, "direct in shared memory");
               intra_node_->all_gather(concatenate(out), offsets_of(out));
             });
}

void Group::broadcast(const BufferList& buffer, int root, const Deadline& d) {
  check_rank(root, "root");
  if (buffer.bytes() == 0) return;
  collective(fingerprint_of(OpCode::kBroadcast, buffer.bytes(), buffer.dtype(), root), d,
             [&](const CollectiveFingerprint& fingerprint) {
               if (spans_nodes()) {
                 log_algorithm(fingerprint,
                               "broadcast inside, tree between nodes, all-gather inside");
                 RequestBatch requests = make_request_batch();
                 return hierarchical_->broadcast(requests, buffer, root);
               }
               log_algorithm(fingerprint, "direct in shared memory");
               intra_node_->broadcast(buffer, root);
             });
}

void Group::gather(const BufferList& in, const BufferLists& out, int root, const Deadline& d) {
  check_rank(root, "root");
  BufferLists send(static_cast<size_t>(config_.size)), recv = out;
  send[static_cast<size_t>(root)] = in;
  recv.resize(static_cast<size_t>(config_.size));
  exchange_pairs(fingerprint_of(OpCode::kGather, 0, in.dtype(), root), send, recv, d);
}

void Group::scatter(const BufferLists& in, const BufferList& out, int root, const Deadline& d) {
  check_rank(root, "root");
  BufferLists send = in, recv(static_cast<size_t>(config_.size));
  send.resize(static_cast<size_t>(config_.size));
  recv[static_cast<size_t>(root)] = out;
  exchange_pairs(fingerprint_of(OpCode::kScatter, 0, out.dtype(), root), send, recv, d);
}

void Group::all_to_all(const BufferLists& send, const BufferLists& recv, const Deadline& d) {
  exchange_pairs(fingerprint_of(OpCode::kAllToAll, 0, recv[0].dtype()), send, recv, d);
}

void Group::exchange_pairs(const CollectiveFingerprint& base, const BufferLists& send,
                           const BufferLists& recv, const Deadline& d) {
  collective(base, d, [&](const CollectiveFingerprint& fingerprint) {
    if (spans_nodes()) {
      log_algorithm(fingerprint, "shared memory inside, messages between nodes");
      RequestBatch requests = make_request_batch();
      return hierarchical_->all_to_all(requests, send, recv, fingerprint.op == OpCode::kAllToAll);
    }
    log_algorithm(fingerprint, "direct in shared memory");
    intra_node_->all_to_all(send, recv, intra_node_->exchange_sizes(send, recv));
  });
}

void Group::barrier(const Deadline& d) {
  collective(fingerprint_of(OpCode::kBarrier, 0, DType::kOpaque), d, [&](const CollectiveFingerprint& fingerprint) {
    log_algorithm(fingerprint, spans_nodes() ? "shared memory and first ranks" : "shared memory");
    if (!spans_nodes()) return intra_node_->barrier();
    RequestBatch requests = make_request_batch();
    hierarchical_->barrier(requests);
  });
}

void Group::monitored_barrier(const Deadline& d) {
  check_usable();
  CollectiveFingerprint fingerprint = fingerprint_of(OpCode::kBarrier, 0, DType::kOpaque);
  fingerprint.sequence = ++sequence_;
  run_or_fail("monitored_barrier", fingerprint.sequence, [&] {
    throw_if_failed();
    exchange_identities(d);
    if (config_.rank == 0) return collect_barrier_reports(fingerprint, d);
    // Ranks that wait for rank 0 must receive its error before they blame rank 0.
    const Deadline later = d.earlier_by(-straggler_search_time(d));
    const uint64_t tag = Transport::kCollectiveTag | fingerprint.sequence;
    transport_->send(0, tag, BufferList(), fingerprint);
    transport_->wait(transport_->recv(0, tag, BufferList(), fingerprint), later, nullptr);
  });
}

void Group::collect_barrier_reports(const CollectiveFingerprint& fingerprint, const Deadline& d) {
  const uint64_t tag = Transport::kCollectiveTag | fingerprint.sequence;
  std::vector<RequestPtr> reports;
  for (int r = 1; r < config_.size; ++r) {
    reports.push_back(transport_->recv(r, tag, BufferList(), fingerprint));
  }
  std::string late_rank_names;
  int first_late_rank = -1;
  for (const RequestPtr& report : reports) {
    try {
      transport_->wait(report, d, nullptr);
    } catch (const Error& e) {
      if (e.fault != Fault::kTimeout) throw;
      late_rank_names +=
          (first_late_rank < 0 ? "" : ", ") + names_[static_cast<size_t>(report->peer)];
      if (first_late_rank < 0) first_late_rank = report->peer;
    }
  }
  if (first_late_rank >= 0)
    throw Error(Fault::kTimeout, first_late_rank,
                late_rank_names + " did not come within the timeout of " + d.text());
  for (int r = 1; r < config_.size; ++r) transport_->send(r, tag, BufferList(), fingerprint);
}

}  // namespace fsccl
