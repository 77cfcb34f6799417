// Failure and shutdown of a group.
#include <unistd.h>

#include <algorithm>
#include <set>
#include <thread>

#include "../datagram/bounded_all_reduce.h"
#include "group.h"
#include "per_process.h"

namespace fsccl {
namespace {

constexpr const char* kFailedKey = "failed";

// All groups of this process.
struct GroupRegistry {
  std::mutex mutex;
  std::set<Group*> groups;
};

}  // namespace

void Group::register_group() {
  auto& registry = per_process<GroupRegistry>();
  const std::lock_guard<std::mutex> hold(registry.mutex);
  registry.groups.insert(this);
}

Group::~Group() {
  {
    auto& registry = per_process<GroupRegistry>();
    const std::lock_guard<std::mutex> hold(registry.mutex);
    registry.groups.erase(this);
  }
  shutdown();
  if (!forked()) return;
  // In a forked child these belong to the parent: threads that do not exist here, locks that they
  // may hold, memory in use. They are leaked.
  static_cast<void>(pipeline_.release());
  static_cast<void>(hierarchical_.release());
  static_cast<void>(intra_node_.release());
  static_cast<void>(shm_.release());
  static_cast<void>(bounded_all_reduce_.release());
  static_cast<void>(transport_.release());
  rendezvous_.release();
}

bool Group::forked() const { return getpid() != identity_.pid; }

void Group::check_not_forked() const {
  if (!forked()) return;
  throw Error(Fault::kAborted, config_.rank,
              "group '" + config_.name + "' belongs to process " + std::to_string(identity_.pid) +
                  ", from which this one was forked: make a group here, or call there");
}

void Group::check_usable() const {
  check_not_forked();
  if (shut_down_) throw Error(Fault::kAborted, config_.rank, "the group has been shut down");
}

void Group::poll_failure() {
  std::vector<std::string> message;
  try {
    Store& store = rendezvous_.store();
    if (store.has({kFailedKey})) message = store.get({kFailedKey});
  } catch (const std::exception&) {
    throw Error(Fault::kSystem, -1, "the store of the group is gone before all ranks have joined");
  }
  if (!message.empty()) throw Error(Fault::kAborted, -1, message[0]);
}

bool Group::is_same_host(int rank) const {
  return static_cast<size_t>(rank) < identities_.size() &&
         identities_[static_cast<size_t>(rank)].domain == identity_.domain;
}

// Returns whether `rank` shares memory with another rank. That rank detects first, and best, how it
// ended.
bool Group::has_node_peer(int rank) const {
  for (const auto& node : nodes_.ranks) {
    const bool is_member = std::find(node.begin(), node.end(), rank) != node.end();
    if (is_member) return node.size() > 1;
  }
  return false;
}

// Returns a more precise error than a lost connection, which explains little about the peer. For a
// rank of this host, the kernel reports the end of its process within a moment; for another one,
// the ranks of its node report.
Error Group::refine_peer_loss(const Error& error) {
  const bool has_left = std::string(error.what()).find(kLeftGroup) != std::string::npos;
  if (error.fault != Fault::kPeerLost || error.rank < 0 || has_left || !identities_known_)
    return error;
  const bool same_host = is_same_host(error.rank);
  const auto end = Deadline::after(Deadline::Ms(same_host ? 50 : 200));
  while (!end.passed() && (same_host || has_node_peer(error.rank))) {
    if (same_host && !identities_[static_cast<size_t>(error.rank)].is_running()) {
      return Error(Fault::kPeerLost, error.rank,
                   names_[static_cast<size_t>(error.rank)] + kProcessEnded);
    }
    if (const auto first = recorded_error()) return *first;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return error;
}

// Records the first error of the group and returns it: that of the first rank of this node to fail,
// or the one that another rank reported.
Error Group::record_error(const Error& error) {
  const Error refined = refine_peer_loss(error);
  {
    const std::lock_guard<std::mutex> hold(recorded_error_mutex_);
    if (recorded_error_) return *recorded_error_;
    recorded_error_ = std::make_unique<Error>(shared_memory_open_ ? shm_->abort(refined) : refined);
    failed_ = true;
  }
  report_to_other_groups(*recorded_error_);
  return *recorded_error_;
}

// A process that ended in one group has ended in all. A rank may wait in another group for a rank
// that is alive but got stuck in this group.
void Group::report_to_other_groups(const Error& error) {
  static thread_local bool reporting = false;
  if (reporting || error.rank < 0 || !identities_known_) return;
  const uint64_t process = identities_[static_cast<size_t>(error.rank)].process_id;
  if (process == identity_.process_id) return;
  for (const char* const suffix : {kProcessEnded, kConnectionLost}) {
    if (std::string(error.what()).find(suffix) == std::string::npos) continue;
    auto& registry = per_process<GroupRegistry>();
    const std::lock_guard<std::mutex> hold(registry.mutex);
    reporting = true;
    for (Group* const group : registry.groups) group->on_process_end(process, suffix);
    reporting = false;
    return;
  }
}

void Group::on_process_end(uint64_t process, const char* suffix) {
  if (!identities_known_ || failed_ || shut_down_) return;
  for (const Identity& identity : identities_) {
    if (identity.process_id != process) continue;
    const auto rank = static_cast<int>(&identity - identities_.data());
    const Error error(Fault::kAborted, rank, names_[static_cast<size_t>(rank)] + suffix);
    transport_->abort(record_error(error));
    return;
  }
}

std::optional<Error> Group::recorded_error() const {
  if (!failed_) return std::nullopt;
  const std::lock_guard<std::mutex> hold(recorded_error_mutex_);
  return *recorded_error_;
}

void Group::fail(const char* operation, uint64_t sequence, const Error& error) {
  const Error first = record_error(error);
  if (identities_known_ && transport_) transport_->abort(first);
  if (!shared_memory_open_ || !identities_known_ || !shm_->all_joined()) {
    try {
      rendezvous_.store().set(kFailedKey, first.what());
    } catch (const std::exception&) {
      // The store is gone as well; the error thrown below is what matters.
    }
  }
  throw Error(first.fault, first.rank,
              std::string("fsccl: ") + operation + " #" + std::to_string(sequence) + " in group '" +
                  config_.name + "', rank " +
                  std::to_string(config_.global_ranks[static_cast<size_t>(config_.rank)]) + ": " +
                  first.what());
}

void Group::fail_without_throw(const char* operation, uint64_t sequence, const Error& error) {
  try {
    fail(operation, sequence, error);
  } catch (const Error&) {
    // fail() has reported it to all ranks. It throws for the benefit of operations.
  }
}

void Group::abort(const std::string& error) {
  fail_without_throw("abort", sequence_, Error(Fault::kAborted, config_.rank, error));
}

void Group::shutdown() {
  if (shut_down_.exchange(true) || forked()) return;
  if (bounded_open_) bounded_all_reduce_->stop();
  if (shared_memory_open_) shm_->leave(!failed_);
  if (transport_) transport_->close();
}

std::optional<std::string> Group::failure() const {
  const auto error = recorded_error();
  if (!error) return std::nullopt;
  return std::string(error->what());
}

void Group::throw_if_failed() const {
  check_usable();
  if (const auto error = recorded_error()) throw Error(*error);
  if (shared_memory_open_) shm_->throw_if_aborted();
}

void Group::check_peers() const {
  throw_if_failed();
  if (!shared_memory_open_) return;
  for (const int node_peer : nodes_.own_ranks()) {
    if (node_peer != config_.rank)
      shm_->check_peers(shm_->local_rank_of(node_peer), [] { return false; });
  }
}

// The owner may have ended before it made the segment, or since.
void Group::check_segment_owner(int owner) const {
  if (!is_same_host(owner) || identities_[static_cast<size_t>(owner)].is_running()) return;
  throw Error(Fault::kPeerLost, owner, names_[static_cast<size_t>(owner)] + kProcessEnded);
}

}  // namespace fsccl
