// Setup of a group: identities, shared memory, point-to-point messages. Its failure and shutdown
// are in group_failure.cpp, its collectives in collectives.cpp.
#include "group.h"

#include "../datagram/bounded_all_reduce.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <thread>

namespace fsccl {
namespace {

// Resets a rank to -1, no rank, at the end of the scope.
class ClearOnExit {
 public:
  explicit ClearOnExit(std::atomic<int>& value) : value_(value) {}
  ~ClearOnExit() { value_ = -1; }

 private:
  std::atomic<int>& value_;
};

}  // namespace

Group::Group(std::unique_ptr<Store> store, GroupConfig config)
    : config_(std::move(config)), rendezvous_(std::move(store), config_.rank, config_.size) {
  if (config_.size < 1 || config_.rank < 0 || config_.rank >= config_.size) {
    fail_usage("rank " + std::to_string(config_.rank) + " of " + std::to_string(config_.size));
  }
  for (int r = 0;
       r < config_.size && config_.global_ranks.size() < static_cast<size_t>(config_.size); ++r) {
    config_.global_ranks.push_back(r);
  }
  for (int r = 0; r < config_.size; ++r) names_.push_back(describe_rank(r));
  try {
    publish();
  } catch (const std::exception& e) {  // other ranks would wait for this one
    fail_without_throw("creation", 0, Error(Fault::kSystem, -1, e.what()));
    throw;
  }
  register_group();
}

std::string Group::describe_rank(int rank) const {
  const int global = config_.global_ranks[static_cast<size_t>(rank)];
  std::string out = "rank " + std::to_string(global);
  if (global != rank) out += " (" + std::to_string(rank) + " in the group)";
  if (static_cast<size_t>(rank) < identities_.size()) {
    const Identity& identity = identities_[static_cast<size_t>(rank)];
    out += " [" + identity.host + ", pid " + std::to_string(identity.pid) + "]";
  }
  return out;
}

void Group::publish() {
  identity_ = Identity::of_this_process(config_.settings);
  identity_.native = config_.native;
  identity_.key = random_key();
  if (config_.size > 1) {
    if (!config_.network) config_.network = Device::of_this_process(config_.settings);
    transport_ = config_.network->open();
    transport_->set_wait_query_handler([this] { return awaited_rank(); });
    transport_->set_abort_handler([this](const Error& error) { record_error(error); });
    transport_->set_farewell_key(secret_key(identity_.key, KeyPurpose::kFarewell));
    identity_.address = transport_->address();
  }
  rendezvous_.publish(identity_);
}

// Returns a key that every rank of the group can compute from the published one, and nobody else if
// there is a secret (FSCCL_SECRET).
Key Group::secret_key(const Key& published, KeyPurpose purpose) const {
  const auto& secret = config_.settings.secret;
  if (!secret) return published;
  return derive_key(*secret, std::array<uint64_t, 3>{static_cast<uint64_t>(purpose), published.lo,
                                                     published.hi});
}

// Polls the store until has_arrived() returns true. A blocking wait would hold the lock of the
// store, which other groups of this process need. `expected_rank` is the rank that is awaited, or
// kAnyAbsentRank.
void Group::wait_at_rendezvous(int expected_rank, const Deadline& d,
                               const std::function<bool()>& has_arrived) {
  // The interval grows with the size of the group, which bounds the load of the store.
  const std::chrono::microseconds max_interval(std::max(10000, 50 * config_.size));
  auto interval = std::chrono::microseconds(200);
  const ClearOnExit clear_on_exit(awaited_at_rendezvous_);
  while (!has_arrived()) {
    if (const auto error = recorded_error()) throw Error(*error);
    // Once the segment is mapped, the error is in it, and possibly not in the store.
    if (shared_memory_open_.load(std::memory_order_acquire)) shm_->throw_if_aborted();
    if (interval.count() > 4000) {
      awaited_at_rendezvous_ = expected_rank;
      try {
        poll_failure();
        if (identities_known_ && transport_) transport_->raise_transport_error();
        if (identities_known_ && expected_rank >= 0) check_has_not_left(expected_rank);
      } catch (const Error&) {
        // The awaited key may have arrived in the meantime. This rank must then continue, because
        // other ranks may wait for keys that it has yet to set.
        if (!has_arrived()) throw;
      }
      if (expected_rank >= 0) check_segment_owner(expected_rank);
    }
    if (d.passed()) {
      std::vector<int> absent{expected_rank};
      if (expected_rank < 0) absent = rendezvous_.absent_ranks();
      if (absent.empty()) return;
      std::string names;
      for (const int r : absent) {
        names += (names.empty() ? "" : ", ") + names_[static_cast<size_t>(r)];
      }
      throw Error(Fault::kTimeout, absent[0],
                  names + " did not come to connect within the timeout of " + d.text());
    }
    std::this_thread::sleep_for(interval);
    interval = std::min(interval * 2, max_interval);
  }
}

std::string Group::poll_key(const std::string& key, int expected_rank, const Deadline& d) {
  Store& store = rendezvous_.store();
  wait_at_rendezvous(expected_rank, d, [&] { return store.has({key}); });
  return store.get({key})[0];
}

void Group::exchange_identities(const Deadline& d) {
  if (identities_known_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> lock(identities_mutex_);
  if (identities_known_.load(std::memory_order_relaxed)) return;
  identities_.clear();
  wait_at_rendezvous(kAnyAbsentRank, d, [this] { return rendezvous_.complete(); });
  identities_ = rendezvous_.identities();
  for (int r = 0; r < config_.size; ++r) names_[static_cast<size_t>(r)] = describe_rank(r);
  check_compatible(identities_, names_);
  nodes_ = partition_by_node(config_.rank, identities_, config_.global_ranks, config_.settings);
  if (transport_) {
    Peers peers;
    peers.rank = config_.rank;
    peers.names = names_;
    peers.same_host.resize(identities_.size());
    peers.key = secret_key(identities_[0].key, KeyPurpose::kGroup);
    for (const Identity& identity : identities_) {
      peers.addresses.push_back(identity.address);
      peers.farewell_keys.push_back(secret_key(identity.key, KeyPurpose::kFarewell));
    }
    for (const int node_peer : nodes_.own_ranks())
      peers.same_host[static_cast<size_t>(node_peer)] = true;
    transport_->set_peers(std::move(peers));
  }
  identities_known_.store(true, std::memory_order_release);
  try {
    // Other ranks may have connected, failed and left before this rank knew their identities.
    poll_failure();
  } catch (const Error& error) {
    const Error first_error = record_error(error);
    // Other ranks that no longer read the store may wait for this rank.
    if (transport_) transport_->abort(first_error);
    throw;
  }
}

int Group::awaited_rank() const {
  if (!shared_memory_open_.load(std::memory_order_acquire)) return -1;
  const int by_pipeline = pipeline_ ? pipeline_->awaited_rank() : -1;
  return by_pipeline >= 0 ? by_pipeline : shm_->awaited_rank();
}

std::string Group::awaited_rank_name(const Deadline& d) {
  const int awaited = awaited_at_rendezvous_;
  int rank = awaited >= 0 ? awaited : awaited_rank();
  if (awaited == kAnyAbsentRank) {
    const std::vector<int> absent = rendezvous_.absent_ranks();
    rank = absent.empty() ? kNobody : absent[0];
  }
  if (rank < 0) return "";
  // While identities are being exchanged, names_ may be changing.
  if (!identities_known_)
    return "rank " + std::to_string(config_.global_ranks[static_cast<size_t>(rank)]);
  if (awaited == kNobody && spans_nodes()) rank = transport_->find_straggler(rank, d, [] {});
  return names_[static_cast<size_t>(rank)];
}

// If creating the segment fails on its owner, run_or_fail() reports that to the other ranks.
Segment Group::open_shared_segment(const std::string& segment_name,
                                   const std::vector<int>& sharing_ranks, size_t bytes,
                                   size_t reserved_bytes, const Deadline& d) {
  const int owner = sharing_ranks[0];
  const std::string key = segment_name + "/" + std::to_string(owner);
  const std::string& directory = config_.settings.shm_directory;
  if (owner == config_.rank) {
    Segment segment = Segment::create(bytes, reserved_bytes, directory);
    if (sharing_ranks.size() > 1) set_key(key, segment.address());
    return segment;
  }
  const std::string address = poll_key(key, owner, d);
  check_segment_owner(owner);
  try {
    return Segment::open(address, bytes, directory);
  } catch (const Error& e) {
    if (e.fault == Fault::kSystem) throw;  // this rank lacks a resource
    throw Error(Fault::kPeerLost, owner,
                names_[static_cast<size_t>(owner)] + " made a segment that cannot be opened: " +
                    e.what() + "; FSCCL_SHM=0 does without shared memory");
  }
}

void Group::open_shared_memory(const Deadline& d) {
  if (shared_memory_open_.load(std::memory_order_acquire)) return;
  exchange_identities(d);
  // Ranks of other nodes may send wait queries while this rank waits for its node.
  if (spans_nodes()) transport_->listen();
  const int ranks = static_cast<int>(nodes_.own_ranks().size());
  ShmConfig config;
  config.members = nodes_.own_ranks();
  config.names = names_;
  config.process_id = identity_.process_id;
  config.slot_bytes = config_.settings.slot_bytes != 0 ? config_.settings.slot_bytes
                                                       : ShmSteps::default_slot_bytes(ranks);
  if (config.slot_bytes < static_cast<size_t>(ranks) * kCacheLine) {
    fail_usage("FSCCL_SLOT_BYTES=" + std::to_string(config.slot_bytes) + " is too small for " +
               std::to_string(ranks) + " ranks on a host");
  }
  config.is_running = [identities = std::make_shared<std::vector<Identity>>(identities_)](int r) {
    return (*identities)[static_cast<size_t>(r)].is_running();
  };
  int ranks_on_host = 0;
  for (const Identity& identity : identities_)
    ranks_on_host += identity.domain == identity_.domain ? 1 : 0;
  config.spin = SpinPolicy::for_ranks(ranks_on_host);
  Segment segment = open_shared_segment(
      "segment", nodes_.own_ranks(), ShmSteps::segment_bytes(ranks, config.slot_bytes),
      ShmSteps::creator_reserved_bytes(ranks, config.slot_bytes), d);
  shm_ = std::make_unique<ShmSteps>(std::move(segment), nodes_.own_index, std::move(config));
  shm_->set_wait_callback([this] {
    if (const auto error = recorded_error()) throw Error(*error);
    if (shut_down_) throw Error(Fault::kAborted, config_.rank, kShutDown);
    if (transport_) transport_->raise_transport_error();
    poll_failure_of_silent_peers();
    if (shm_->all_joined()) return;
    // A rank that fails before it maps the segment reports only through the store, and one that
    // leaves only through the transport.
    poll_failure();
    for (int r = 0; r < shm_->size(); ++r) {
      if (!shm_->has_joined(r)) check_has_not_left(shm_->group_rank_of(r));
    }
  });
  if (spans_nodes()) {
    shm_->set_straggler_query([this](int rank) {
      return transport_->find_straggler(rank, deadline_, [this] { shm_->throw_if_aborted(); });
    });
  }
  intra_node_ = std::make_unique<IntraNodeCollectives>(*shm_);
  hierarchical_ =
      std::make_unique<HierarchicalCollectives>(*intra_node_, nodes_, config_.settings.chunk_bytes);
  if (config_.settings.pipeline_k > 0) {
    const auto make_segment = [this](size_t bytes, size_t reserved_bytes, int n) {
      return open_shared_segment("channels/" + std::to_string(n), nodes_.own_ranks(), bytes,
                                 reserved_bytes, shm_->deadline());
    };
    pipeline_description_ = "pipelined, k=" + std::to_string(config_.settings.pipeline_k) + ", " +
                            std::to_string(config_.settings.pipeline_nelem) + " elements a send";
    pipeline_ = std::make_unique<Pipeline>(*shm_, nodes_, config_.settings, make_segment);
  }
  shared_memory_open_.store(true, std::memory_order_release);
}

uint64_t Group::progress() const {
  uint64_t event_count = sequence_;
  if (shared_memory_open_) event_count += shm_->posted();
  if (transport_) event_count += transport_->progress_count();
  return event_count;
}

std::vector<Transport::Traffic> Group::traffic() const {
  return identities_known_ && transport_
             ? transport_->sent_traffic()
             : std::vector<Transport::Traffic>(static_cast<size_t>(config_.size));
}

void Group::print(const std::string& message) const {
  std::fprintf(stderr, "[fsccl] rank %d group '%s': %s\n",
               config_.global_ranks[static_cast<size_t>(config_.rank)], config_.name.c_str(),
               message.c_str());
}

std::string Group::nodes_text() { return nodes_.text(); }

const std::vector<Identity>& Group::identities(const Deadline& d) {
  if (!identities_known_) run_or_fail("meeting", 0, [&] { exchange_identities(d); });
  return identities_;
}

std::string Group::wait_for_key(const std::string& key, int expected_rank, const Deadline& d) {
  return poll_key(key, expected_rank, d);
}

// In a ring, the remaining ranks stay connected if one rank, or several neighbours, are lost.
void Group::connect_abort_ring(const Deadline& d) {
  exchange_identities(d);
  if (config_.size > 1) transport_->ensure_connection((config_.rank + 1) % config_.size);
}

void Group::check_rank(int rank, const char* role) const {
  if (rank < 0 || rank >= config_.size) {
    fail_usage(std::string(role) + " " + std::to_string(rank) + " is not in the group of " +
               std::to_string(config_.size) + " ranks");
  }
}

RequestPtr Group::send(int peer, uint64_t tag, const BufferList& memory, const Deadline& d,
                       const CollectiveFingerprint& fingerprint) {
  check_usable();
  check_rank(peer, "destination");
  run_or_fail("send", tag, [&] {
    throw_if_failed();
    exchange_identities(d);
  });
  return transport().send(peer, tag, memory, fingerprint);
}

RequestPtr Group::recv(int peer, uint64_t tag, const BufferList& memory, const Deadline& d,
                       const CollectiveFingerprint& fingerprint) {
  check_usable();
  if (peer != kAnySource) check_rank(peer, "source");
  run_or_fail("recv", tag, [&] {
    throw_if_failed();
    exchange_identities(d);
  });
  return transport().recv(peer, tag, memory, fingerprint);
}

Transport& Group::transport() const {
  if (!transport_) fail_usage("a group of one rank has nobody to send to or to receive from");
  return *transport_;
}

void Group::wait(OpCode op, const RequestPtr& request, const Deadline& d) {
  check_not_forked();
  run_or_fail(name_of(op), request->tag, [&] {
    transport_->wait(request, d, [this] {
      if (shared_memory_open_) shm_->throw_if_aborted();
      poll_failure_of_silent_peers();
    });
  });
}

}  // namespace fsccl
