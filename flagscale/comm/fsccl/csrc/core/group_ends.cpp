// How a group fails and ends.
#include <unistd.h>

#include <algorithm>
#include <set>
#include <thread>

#include "../datagram/tail.h"
#include "group.h"
#include "per_process.h"

namespace fsccl {
namespace {

constexpr const char* kFailedKey = "failed";

// Of this process.
struct Groups {
  std::mutex mutex;
  std::set<Group*> all;
};

}  // namespace

void Group::enroll() {
  auto& groups = per_process<Groups>();
  const std::lock_guard<std::mutex> hold(groups.mutex);
  groups.all.insert(this);
}

Group::~Group() {
  {
    auto& groups = per_process<Groups>();
    const std::lock_guard<std::mutex> hold(groups.mutex);
    groups.all.erase(this);
  }
  shutdown();
  if (!forked()) return;
  // Of the parent: threads that are not here, locks that they may hold, memory that is in use.
  static_cast<void>(pipeline_.release());
  static_cast<void>(hierarchy_.release());
  static_cast<void>(local_.release());
  static_cast<void>(shm_.release());
  static_cast<void>(tail_.release());
  static_cast<void>(transport_.release());
  rendezvous_.release();
}

bool Group::forked() const { return getpid() != me_.pid; }

void Group::check_process() const {
  if (!forked()) return;
  throw Error(Fault::kAborted, config_.rank,
              "group '" + config_.name + "' belongs to process " + std::to_string(me_.pid) +
                  ", from which this one was forked: make a group here, or call there");
}

void Group::check_here() const {
  check_process();
  if (left_) throw Error(Fault::kAborted, config_.rank, "the group has been shut down");
}

void Group::hear_failure() {
  std::vector<std::string> told;
  try {
    Store& store = rendezvous_.store();
    if (store.has({kFailedKey})) told = store.get({kFailedKey});
  } catch (const std::exception&) {
    throw Error(Fault::kSystem, -1, "the store of the group is gone before all ranks have joined");
  }
  if (!told.empty()) throw Error(Fault::kAborted, -1, told[0]);
}

bool Group::near(int rank) const {
  return static_cast<size_t>(rank) < who_.size() &&
         who_[static_cast<size_t>(rank)].domain == me_.domain;
}

// Whether a rank that shares memory with that one runs: it knows first, and best, how it ended.
bool Group::has_witness(int rank) const {
  for (const auto& cluster : clusters_.ranks) {
    const bool its = std::find(cluster.begin(), cluster.end(), rank) != cluster.end();
    if (its) return cluster.size() > 1;
  }
  return false;
}

// A connection that has ended says little of its other end. Of a rank of this host the kernel says
// more, in a moment; of another's, those beside it.
Error Group::seen_closer(const Error& why) {
  const bool left = std::string(why.what()).find(kLeft) != std::string::npos;
  if (why.fault != Fault::kPeerLost || why.rank < 0 || left || !met_) return why;
  const bool here = near(why.rank);
  const auto end = Deadline::after(Deadline::Ms(here ? 50 : 200));
  while (!end.passed() && (here || has_witness(why.rank))) {
    if (here && !who_[static_cast<size_t>(why.rank)].runs()) {
      return Error(Fault::kPeerLost, why.rank, names_[static_cast<size_t>(why.rank)] + kEnded);
    }
    if (const auto told = verdict()) return *told;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return why;
}

// The group's one verdict: what the first of this cluster to fail has said, or has been told.
Error Group::conclude(const Error& why) {
  const Error mine = seen_closer(why);
  {
    const std::lock_guard<std::mutex> hold(verdict_mutex_);
    if (verdict_) return *verdict_;
    verdict_ = std::make_unique<Error>(open_ ? shm_->abort(mine) : mine);
    failed_ = true;
  }
  tell_other_groups(*verdict_);
  return *verdict_;
}

// Whose process has ended in one group has in all: a rank may wait in another of them, for one that
// lives and has come no further than this.
void Group::tell_other_groups(const Error& why) {
  static thread_local bool telling = false;
  if (telling || why.rank < 0 || !met_) return;
  const uint64_t process = who_[static_cast<size_t>(why.rank)].process;
  if (process == me_.process) return;
  for (const char* const how : {kEnded, kBroke}) {
    if (std::string(why.what()).find(how) == std::string::npos) continue;
    auto& groups = per_process<Groups>();
    const std::lock_guard<std::mutex> hold(groups.mutex);
    telling = true;
    for (Group* const other : groups.all) other->hear_of_end(process, how);
    telling = false;
    return;
  }
}

void Group::hear_of_end(uint64_t process, const char* how) {
  if (!met_ || failed_ || left_) return;
  for (const Identity& w : who_) {
    if (w.process != process) continue;
    const auto rank = static_cast<int>(&w - who_.data());
    const Error why(Fault::kAborted, rank, names_[static_cast<size_t>(rank)] + how);
    transport_->abort(conclude(why));
    return;
  }
}

std::optional<Error> Group::verdict() const {
  if (!failed_) return std::nullopt;
  const std::lock_guard<std::mutex> hold(verdict_mutex_);
  return *verdict_;
}

void Group::fail(const char* what, uint64_t sequence, const Error& why) {
  const Error root = conclude(why);
  if (met_ && transport_) transport_->abort(root);
  if (!open_ || !met_ || !shm_->complete()) {
    try {
      rendezvous_.store().set(kFailedKey, root.what());
    } catch (const std::exception&) {
      // The store is gone too; the error below says what matters.
    }
  }
  throw Error(root.fault, root.rank,
              std::string("fsccl: ") + what + " #" + std::to_string(sequence) + " in group '" +
                  config_.name + "', rank " +
                  std::to_string(config_.global_ranks[static_cast<size_t>(config_.rank)]) + ": " +
                  root.what());
}

void Group::give_up(const char* what, uint64_t sequence, const Error& why) {
  try {
    fail(what, sequence, why);
  } catch (const Error&) {
    // It has told everybody, and throws for the benefit of operations.
  }
}

void Group::abort(const std::string& why) {
  give_up("abort", sequence_, Error(Fault::kAborted, config_.rank, why));
}

void Group::shutdown() {
  if (left_.exchange(true) || forked()) return;
  if (tail_open_) tail_->stop();
  if (open_) shm_->leave(!failed_);
  if (transport_) transport_->close();
}

std::optional<std::string> Group::failure() const {
  const auto why = verdict();
  if (!why) return std::nullopt;
  return std::string(why->what());
}

void Group::check() const {
  check_here();
  if (const auto why = verdict()) throw Error(*why);
  if (open_) shm_->throw_if_aborted();
}

void Group::look() const {
  check();
  if (!open_) return;
  for (const int mate : clusters_.own()) {
    if (mate != config_.rank) shm_->look_at(shm_->local_rank_of(mate), [] { return false; });
  }
}

// It may have ended between telling of itself and making the segment, or since.
void Group::check_leader(int leader) const {
  if (!near(leader) || who_[static_cast<size_t>(leader)].runs()) return;
  throw Error(Fault::kPeerLost, leader, names_[static_cast<size_t>(leader)] + kEnded);
}

}  // namespace fsccl
