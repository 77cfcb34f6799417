// Failure and shutdown of a group.
#include <unistd.h>

#include <algorithm>
#include <cstring>
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
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.groups.insert(this);
}

Group::~Group() {
  {
    auto& registry = per_process<GroupRegistry>();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.groups.erase(this);
  }
  shutdown();
  if (!is_forked_child()) return;
  // In a forked child these objects belong to the parent: their threads do not exist here and may
  // have held locks. They are leaked.
  static_cast<void>(pipeline_.release());
  static_cast<void>(hierarchical_.release());
  static_cast<void>(intra_node_.release());
  static_cast<void>(shm_.release());
  static_cast<void>(bounded_all_reduce_.release());
  static_cast<void>(transport_.release());
  rendezvous_.release();
}

bool Group::is_forked_child() const { return getpid() != identity_.pid; }

void Group::check_not_forked() const {
  if (!is_forked_child()) return;
  throw Error(Fault::kAborted, config_.rank,
              "group '" + config_.name + "' belongs to process " + std::to_string(identity_.pid) +
                  ", from which this one was forked: make a group here, or call there");
}

void Group::check_usable() const {
  check_not_forked();
  if (shut_down_) throw Error(Fault::kAborted, config_.rank, kShutDown);
}

void Group::poll_failure() {
  std::vector<std::string> message;
  try {
    Store& store = rendezvous_.store();
    if (store.has({kFailedKey})) message = store.get({kFailedKey});
  } catch (const std::exception&) {
    throw Error(Fault::kAborted, -1, "the store of the group is gone before all ranks have joined");
  }
  if (!message.empty()) throw Error(Fault::kAborted, -1, message[0]);
}

void Group::poll_failure_of_silent_peers() {
  const auto now = Deadline::Clock::now();
  // The interval grows with the size of the group, which bounds the load of the store.
  const auto interval = std::chrono::milliseconds(std::max(500, config_.size));
  if (now < next_failure_poll_.load() || !transport_ || !transport_->awaits_silent_peer()) return;
  next_failure_poll_ = now + interval;
  poll_failure();
}

bool Group::is_same_host(int rank) const {
  return static_cast<size_t>(rank) < identities_.size() &&
         identities_[static_cast<size_t>(rank)].domain == identity_.domain;
}

// Returns a more precise error than a lost connection, which does not say what happened to the
// peer. The process has ended if the kernel of this host says so, or another host refuses
// connections to it, or a rank of its node, which notices first, reports it.
Error Group::refine_peer_loss(const Error& error) {
  const bool has_left = std::string(error.what()).find(kLeftGroup) != std::string::npos;
  if (error.fault != Fault::kPeerLost || error.rank < 0 || has_left || !identities_known_)
    return error;
  const std::string& name = names_[static_cast<size_t>(error.rank)];
  const bool same_host = is_same_host(error.rank);
  // A process that ends closes its connections before the kernel reports its end.
  const auto deadline = Deadline::after(Deadline::Ms(same_host ? 50 : 200));
  auto state = ProcessState::kUnknown;
  while (!deadline.passed()) {
    if (same_host) {
      const bool is_running = identities_[static_cast<size_t>(error.rank)].is_running();
      state = is_running ? ProcessState::kRunning : ProcessState::kEnded;
    } else {
      state = transport_->probe_process(error.rank, deadline);
    }
    if (state == ProcessState::kEnded) return {Fault::kPeerLost, error.rank, name + kProcessEnded};
    if (const auto first_error = recorded_error()) return *first_error;
    std::this_thread::sleep_for(std::chrono::milliseconds(same_host ? 1 : 10));
  }
  if (state != ProcessState::kRunning) return error;
  const std::string text = error.what();
  const size_t at = text.find(kConnectionLost);
  if (at == std::string::npos) return error;
  return {error.fault, error.rank,
          text.substr(0, at) + kConnectionBroke + text.substr(at + std::strlen(kConnectionLost))};
}

// Records an error unless there is one already, and returns the first error of the group: that of
// the rank of this node that failed first, or one that another rank has reported.
Error Group::record_error(const Error& error) {
  const Error refined = refine_peer_loss(error);
  {
    const std::lock_guard<std::mutex> lock(recorded_error_mutex_);
    if (recorded_error_) return *recorded_error_;
    recorded_error_ = std::make_unique<Error>(shared_memory_open_ ? shm_->abort(refined) : refined);
    failed_ = true;
  }
  report_to_other_groups(*recorded_error_);
  return *recorded_error_;
}

// If the error means that a process has ended, fails the other groups of that process as well.
// There, a rank may wait for a rank that is alive but blocked in this group.
void Group::report_to_other_groups(const Error& error) {
  static thread_local bool is_reporting = false;
  if (is_reporting || error.rank < 0 || !identities_known_) return;
  const uint64_t process = identities_[static_cast<size_t>(error.rank)].process_id;
  if (process == identity_.process_id) return;
  if (std::string(error.what()).find(kProcessEnded) == std::string::npos) return;
  auto& registry = per_process<GroupRegistry>();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  is_reporting = true;
  for (Group* const group : registry.groups) group->on_process_end(process);
  is_reporting = false;
}

void Group::on_process_end(uint64_t process) {
  if (!identities_known_ || failed_ || shut_down_) return;
  for (const Identity& identity : identities_) {
    if (identity.process_id != process) continue;
    const auto rank = static_cast<int>(&identity - identities_.data());
    const Error error(Fault::kAborted, rank, names_[static_cast<size_t>(rank)] + kProcessEnded);
    transport_->abort(record_error(error));
    return;
  }
}

std::optional<Error> Group::recorded_error() const {
  if (!failed_) return std::nullopt;
  const std::lock_guard<std::mutex> lock(recorded_error_mutex_);
  return *recorded_error_;
}

void Group::fail(const char* operation, uint64_t sequence, const Error& error) {
  const std::string prefix =
      std::string("fsccl: ") + operation + " #" + std::to_string(sequence) + " in group '" +
      config_.name + "', rank " +
      std::to_string(config_.global_ranks[static_cast<size_t>(config_.rank)]) + ": ";
  if (shut_down_ && !failed_) {  // an operation that the shutdown has ended; no other rank's concern
    throw Error(Fault::kAborted, config_.rank, prefix + kShutDown);
  }
  // What the operating system refuses to this rank is reported as the fault of this rank.
  const bool lacks_resource = error.fault == Fault::kSystem && error.rank < 0;
  const Error first_error = record_error(
      lacks_resource ? Error(error.fault, config_.rank,
                             names_[static_cast<size_t>(config_.rank)] + ": " + error.what())
                     : error);
  if (transport_) transport_->abort(first_error);
  // A rank that lacks a resource may be unable to connect, or to be connected to.
  if (error.fault == Fault::kSystem || !shared_memory_open_ || !identities_known_ || !shm_->all_joined()) {
    try {
      rendezvous_.store().set(kFailedKey, first_error.what());
    } catch (const std::exception&) {
      // The store has been lost as well. The error thrown below is the one to report.
    }
  }
  throw Error(first_error.fault, first_error.rank, prefix + first_error.what());
}

void Group::fail_without_throw(const char* operation, uint64_t sequence, const Error& error) {
  try {
    fail(operation, sequence, error);
  } catch (const Error&) {
    // fail() has reported the error to all ranks; the caller does not need the exception.
  }
}

void Group::abort(const std::string& error) {
  fail_without_throw("abort", sequence_,
                     Error(Fault::kAborted, config_.rank,
                           names_[static_cast<size_t>(config_.rank)] + ": " + error));
}

void Group::shutdown() {
  if (shut_down_.exchange(true) || is_forked_child()) return;
  if (bounded_all_reduce_open_) bounded_all_reduce_->stop();
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

void Group::check_presence(int rank) {
  check_segment_owner(rank);
  check_has_not_left(rank);
}

void Group::check_has_not_left(int rank) {
  transport_->ensure_connection(rank);
  const auto loss = transport_->loss_of(rank);
  if (loss && std::string(loss->what()).find(kLeftGroup) != std::string::npos) throw Error(*loss);
}

// Throws if the process that creates a segment has ended, before or after it created the segment.
void Group::check_segment_owner(int owner) const {
  if (!is_same_host(owner) || identities_[static_cast<size_t>(owner)].is_running()) return;
  throw Error(Fault::kPeerLost, owner, names_[static_cast<size_t>(owner)] + kProcessEnded);
}

}  // namespace fsccl
