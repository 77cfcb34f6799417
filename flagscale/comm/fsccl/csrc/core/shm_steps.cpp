#include "shm_steps.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kSleepInterval(100);
constexpr int32_t kNobody = -1;

// Returns whether a counter has reached a step, also after it has wrapped around.
bool reached(uint32_t posted, uint32_t step) { return static_cast<int32_t>(posted - step) >= 0; }

}  // namespace

// State of a rank, in shared memory. Only that rank writes it, except `sleepers`.
struct alignas(2 * kCacheLine) ShmSteps::RankState {
  Word posted;
  Word sleepers;
  // In a second cache line, which no rank reads while the operation makes progress.
  alignas(kCacheLine) Word has_joined;
  Word has_left;
  std::atomic<uint64_t> process_id;
  // Sequence number of the last operation that this rank has finished.
  std::atomic<uint64_t> finished_sequence;
  std::atomic<int32_t> awaited_rank;  // group rank
  // Step awaited from a rank of this node; 0 if it is on another node.
  std::atomic<uint32_t> awaited_step;
};

namespace {
constexpr size_t kHeaderBytes = 2048;
constexpr size_t kFingerprintBytes = kCacheLine;
static_assert(sizeof(CollectiveFingerprint) <= kFingerprintBytes,
              "the fingerprint fits before the payload");
}  // namespace

size_t ShmSteps::head_bytes(int ranks) {
  static_assert(sizeof(GroupError) <= kHeaderBytes, "the error fits into the header");
  return Segment::round_to_pages(kHeaderBytes + static_cast<size_t>(ranks) * sizeof(RankState));
}

size_t ShmSteps::segment_bytes(int ranks, size_t slot_bytes) {
  return head_bytes(ranks) + static_cast<size_t>(ranks) * slots_bytes(slot_bytes);
}

size_t ShmSteps::creator_reserved_bytes(int ranks, size_t slot_bytes) {
  return head_bytes(ranks) + slots_bytes(slot_bytes);
}

size_t ShmSteps::slots_bytes(size_t slot_bytes) {
  return Segment::round_to_pages(2 * (kFingerprintBytes + slot_bytes));
}

size_t ShmSteps::default_slot_bytes(int ranks) {
  const size_t share = (size_t{16} << 20) / static_cast<size_t>(2 * ranks);
  // The two-shot algorithm divides a slot among the ranks; below 2 KiB per rank, waiting would
  // dominate.
  const size_t min_bytes = std::max(size_t{64} << 10, static_cast<size_t>(ranks) * 2048);
  return std::max(min_bytes, std::min(share, size_t{512} << 10) / 4096 * 4096);
}

ShmSteps::ShmSteps(Segment segment, int rank, ShmConfig config)
    : segment_(std::move(segment)), rank_(rank), config_(std::move(config)) {
  checked_step_.resize(config_.members.size());
  rank_stride_ = slots_bytes(capacity());
  slots_ = segment_.data() + head_bytes(size());
  segment_.lock_rank(rank_);
  reserve_slots();
  RankState& own_state = rank_state(rank_);
  step_ = config_.first_step;
  checked_step_.assign(checked_step_.size(), step_);
  own_state.posted.store(step_, std::memory_order_relaxed);
  own_state.process_id.store(config_.process_id, std::memory_order_relaxed);
  own_state.awaited_rank.store(kNobody, std::memory_order_relaxed);
  own_state.has_joined.store(1, std::memory_order_release);
}

// Reserves the slots of this rank, so that their pages are on the NUMA node of the rank that writes
// them.
void ShmSteps::reserve_slots() {
  const size_t first = head_bytes(size()) + static_cast<size_t>(rank_) * rank_stride_;
  try {
    segment_.reserve(first, first + rank_stride_);
  } catch (const Error& e) {
    abort({e.fault, group_rank_of(rank_), name(group_rank_of(rank_)) + ": " + e.what()});
    throw;
  }
}

GroupError& ShmSteps::group_error() const {
  return *reinterpret_cast<GroupError*>(segment_.data());
}

ShmSteps::RankState& ShmSteps::rank_state(int local_rank) const {
  std::byte* at =
      segment_.data() + kHeaderBytes + static_cast<size_t>(local_rank) * sizeof(RankState);
  return *reinterpret_cast<RankState*>(at);
}

std::byte* ShmSteps::slot(int local_rank, uint32_t step) const {
  return slots_ + static_cast<size_t>(local_rank) * rank_stride_ +
         (step & 1) * (kFingerprintBytes + capacity());
}

void ShmSteps::begin(const CollectiveFingerprint& fingerprint, const Deadline& deadline) {
  throw_if_aborted();
  fingerprint_ = fingerprint;
  deadline_ = deadline;
}

void ShmSteps::end() {
  rank_state(rank_).finished_sequence.store(fingerprint_.sequence, std::memory_order_release);
}

std::byte* ShmSteps::acquire_slot() {
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    wait_posted(p, step_);
    if (checked_step_[static_cast<size_t>(p)] != step_) check_fingerprint(p, posted_fingerprint_);
  }
  std::byte* at = slot(rank_, step_ + 1);
  std::memcpy(at, &fingerprint_, sizeof fingerprint_);
  return at + kFingerprintBytes;
}

void ShmSteps::post() {
  RankState& own_state = rank_state(rank_);
  posted_fingerprint_ = fingerprint_;
  own_state.posted.store(++step_, std::memory_order_seq_cst);
  if (own_state.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(own_state.posted);
}

const std::byte* ShmSteps::wait_for_peer(int peer) {
  wait_posted(peer, step_);
  check_fingerprint(peer, fingerprint_);
  return slot(peer, step_) + kFingerprintBytes;
}

void ShmSteps::check_fingerprint(int peer, const CollectiveFingerprint& expected) {
  CollectiveFingerprint peer_fingerprint;
  std::memcpy(&peer_fingerprint, slot(peer, step_), sizeof peer_fingerprint);
  if (peer_fingerprint != expected) {
    throw mismatch_error({group_rank_of(peer), name_of(peer), peer_fingerprint},
                         {group_rank_of(rank_), name_of(rank_), expected}, group_rank_of(peer));
  }
  checked_step_[static_cast<size_t>(peer)] = step_;
}

uint32_t ShmSteps::posted() const {
  return rank_state(rank_).posted.load(std::memory_order_relaxed);
}

void ShmSteps::wait_for_all_peers() {
  for (int k = 1; k < size(); ++k) wait_for_peer((rank_ + k) % size());
}

void ShmSteps::wait_posted(int peer, uint32_t step) {
  const Word& posted = rank_state(peer).posted;
  if (reached(posted.load(std::memory_order_acquire), step)) return;
  for (int i = 0; i < config_.spin.pauses; ++i) {
    cpu_relax();
    if (reached(posted.load(std::memory_order_acquire), step)) return;
  }
  for (int i = 0; i < config_.spin.yields; ++i) {
    sched_yield();
    if (reached(posted.load(std::memory_order_acquire), step)) return;
  }
  sleep_until(peer, step);
}

void ShmSteps::sleep_until(int peer, uint32_t step) {
  RankState& peer_state = rank_state(peer);
  RankState& own_state = rank_state(rank_);
  own_state.awaited_step.store(step, std::memory_order_relaxed);
  own_state.awaited_rank.store(group_rank_of(peer), std::memory_order_release);
  for (;;) {
    peer_state.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t posted_seen = peer_state.posted.load(std::memory_order_seq_cst);
    const bool is_done = reached(posted_seen, step);
    if (!is_done) futex_wait(peer_state.posted, posted_seen, sleep_interval());
    peer_state.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (is_done || reached(peer_state.posted.load(std::memory_order_acquire), step)) break;
    check_peers_and_deadline(peer, step);
  }
  own_state.awaited_rank.store(kNobody, std::memory_order_release);
}

std::chrono::milliseconds ShmSteps::sleep_interval() const {
  return std::min(kSleepInterval, deadline_.remaining());
}

void ShmSteps::check_peers_and_deadline(int peer, uint32_t step) {
  const Word& posted = rank_state(peer).posted;
  check_peers(peer, [&] { return reached(posted.load(std::memory_order_acquire), step); });
  throw_if_timed_out(find_straggler(peer));
}

// has_arrived() is called after the process of the peer is found to have ended: the peer may have
// posted and then ended after the caller checked.
void ShmSteps::check_peers(int awaited_peer, const std::function<bool()>& has_arrived) const {
  throw_if_aborted();
  if (wait_callback_) wait_callback_();
  for (int p = 0; p < size(); ++p) {
    const char* const suffix = p == rank_ ? nullptr : exit_reason(p);
    if (suffix == nullptr) continue;
    const bool is_done =
        rank_state(p).finished_sequence.load(std::memory_order_acquire) >= fingerprint_.sequence;
    if (p == awaited_peer ? has_arrived() : is_done) continue;
    throw_if_aborted();  // a rank that fails records its error before it leaves
    throw Error(Fault::kPeerLost, group_rank_of(p), name(group_rank_of(p)) + suffix);
  }
}

const char* ShmSteps::exit_reason(int peer) const {
  const RankState& peer_state = rank_state(peer);
  if (peer_state.has_left.load(std::memory_order_acquire) != 0) return kLeftGroup;
  const bool alive =
      !has_joined(peer) ? config_.is_running(group_rank_of(peer))
                  : peer_state.process_id.load(std::memory_order_relaxed) == config_.process_id ||
                        segment_.rank_is_locked(peer);
  return alive ? nullptr : kProcessEnded;
}

void ShmSteps::throw_if_timed_out(int at_fault) const {
  if (!deadline_.passed()) return;
  if (straggler_query_) at_fault = straggler_query_(at_fault);
  throw Error(Fault::kTimeout, at_fault,
              name(at_fault) + " did not come within the timeout of " + deadline_.text());
}

int ShmSteps::local_rank_of(int group_rank) const {
  const auto at = std::find(config_.members.begin(), config_.members.end(), group_rank);
  return at == config_.members.end() ? -1 : static_cast<int>(at - config_.members.begin());
}

// Follows the chain of awaited ranks from `peer` on. A rank is also the straggler if its awaited
// step has been posted but it has not continued: its process is stopped, or gets no processor time.
int ShmSteps::find_straggler(int peer) const {
  for (int hops = 0; hops < size(); ++hops) {
    const RankState& state = rank_state(peer);
    const int32_t awaited = state.awaited_rank.load(std::memory_order_acquire);
    if (awaited == kNobody || awaited == group_rank_of(rank_)) return group_rank_of(peer);
    const int next_peer = local_rank_of(awaited);
    // On another node: throw_if_timed_out() continues the search there.
    if (next_peer < 0) return group_rank_of(peer);
    const uint32_t step = state.awaited_step.load(std::memory_order_relaxed);
    if (reached(rank_state(next_peer).posted.load(std::memory_order_acquire), step))
      return group_rank_of(peer);
    peer = next_peer;
  }
  return group_rank_of(peer);
}

int ShmSteps::awaited_rank() const {
  const RankState& own_state = rank_state(rank_);
  const int32_t awaited = own_state.awaited_rank.load(std::memory_order_acquire);
  const int node_peer = awaited == kNobody ? -1 : local_rank_of(awaited);
  if (node_peer < 0) return awaited;
  const uint32_t step = own_state.awaited_step.load(std::memory_order_relaxed);
  const bool is_over = reached(rank_state(node_peer).posted.load(std::memory_order_acquire), step);
  return is_over ? kNobody : find_straggler(node_peer);
}

void ShmSteps::set_awaited_rank(int group_rank) {
  rank_state(rank_).awaited_step.store(0, std::memory_order_relaxed);
  rank_state(rank_).awaited_rank.store(group_rank, std::memory_order_release);
}

Error ShmSteps::abort(const Error& error) {
  const Error first = group_error().set_first(error);
  for (int p = 0; p < size(); ++p) futex_wake_all(rank_state(p).posted);
  return first;
}

void ShmSteps::throw_if_aborted() const { group_error().throw_if_set(); }

bool ShmSteps::has_joined(int local_rank) const {
  return rank_state(local_rank).has_joined.load(std::memory_order_acquire) != 0;
}

bool ShmSteps::all_joined() const {
  for (int p = 0; p < size(); ++p) {
    if (!has_joined(p)) return false;
  }
  return true;
}

void ShmSteps::leave(bool retain_segment) {
  RankState& own_state = rank_state(rank_);
  own_state.has_left.store(1, std::memory_order_seq_cst);
  if (own_state.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(own_state.posted);
  if (!retain_segment || all_joined()) return;
  segment_.retain_until([states = &rank_state(0), n = size(), members = config_.members,
                         is_running = config_.is_running] {
    for (int p = 0; p < n; ++p) {
      const bool has_joined = states[p].has_joined.load(std::memory_order_acquire) != 0;
      if (!has_joined && is_running(members[static_cast<size_t>(p)])) return false;
    }
    return true;
  });
}

}  // namespace fsccl
