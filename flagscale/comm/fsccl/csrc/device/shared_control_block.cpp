#include "shared_control_block.h"

#include <unistd.h>

#include <algorithm>

namespace fsccl {
namespace {

constexpr size_t kErrorBytes = 2048;  // at the beginning of the segment, for the group's error

}  // namespace

struct alignas(2 * kCacheLine) SharedControlBlock::RankState {
  struct FingerprintSlot {
    std::atomic<uint64_t> sequence;  // written last
    CollectiveFingerprint fingerprint;
  };
  Word posted;
  alignas(kCacheLine) Word joined;
  Word left;
  std::atomic<int32_t> pid;
  std::atomic<int32_t> waiting_for;
  std::atomic<uint64_t> sequence;      // of the operation it is in
  std::atomic<uint64_t> native_calls;  // number of calls of the native library it has begun
  FingerprintSlot fingerprints[kFingerprints];
};

size_t SharedControlBlock::segment_bytes(int ranks, size_t area_bytes) {
  static_assert(sizeof(GroupError) <= kErrorBytes, "the error fits its place");
  const size_t raw =
      kErrorBytes + static_cast<size_t>(ranks) * sizeof(RankState) + 2 * area_bytes + kCacheLine;
  return ceil_div(raw, size_t{4096}) * 4096;
}

SharedControlBlock::SharedControlBlock(Segment segment, int rank, std::vector<int> members,
                                       std::vector<std::vector<int>> clusters,
                                       std::vector<std::string> names, size_t area_bytes)
    : segment_(std::move(segment)),
      rank_(rank),
      index_(-1),
      members_(std::move(members)),
      clusters_(std::move(clusters)),
      names_(std::move(names)),
      area_bytes_(area_bytes) {
  index_ = index_of(rank);
  segment_.lock_rank(index_);
  RankState& own_state = state_of(index_);
  own_state.pid.store(getpid(), std::memory_order_relaxed);
  own_state.waiting_for.store(kNobody, std::memory_order_relaxed);
  own_state.joined.store(1, std::memory_order_release);
}

GroupError& SharedControlBlock::group_error() const {
  return *reinterpret_cast<GroupError*>(segment_.data());
}

SharedControlBlock::RankState& SharedControlBlock::state_of(int index) const {
  return reinterpret_cast<RankState*>(segment_.data() + kErrorBytes)[index];
}

int SharedControlBlock::index_of(int group_rank) const {
  const auto member = std::find(members_.begin(), members_.end(), group_rank);
  return member == members_.end() ? -1 : static_cast<int>(member - members_.begin());
}

Word& SharedControlBlock::posted(int group_rank) const {
  return state_of(index_of(group_rank)).posted;
}

std::byte* SharedControlBlock::area(uint32_t step) const {
  return segment_.data() + kErrorBytes + members_.size() * sizeof(RankState) +
         static_cast<size_t>(step % 2) * area_bytes_;
}

void SharedControlBlock::publish(const CollectiveFingerprint& fingerprint) {
  const uint64_t sequence = fingerprint.sequence;
  RankState& own_state = state_of(index_);
  RankState::FingerprintSlot& slot = own_state.fingerprints[sequence % kFingerprints];
  slot.sequence.store(0, std::memory_order_seq_cst);
  slot.fingerprint = fingerprint;
  slot.sequence.store(sequence, std::memory_order_seq_cst);
  own_state.sequence.store(sequence, std::memory_order_release);
  for (size_t p = 0; p < members_.size(); ++p) {
    const RankState::FingerprintSlot& peer_slot =
        state_of(static_cast<int>(p)).fingerprints[sequence % kFingerprints];
    if (peer_slot.sequence.load(std::memory_order_seq_cst) != sequence) continue;
    const CollectiveFingerprint peer_fingerprint = peer_slot.fingerprint;
    // A rank that has gone on may have overwritten it meanwhile.
    if (peer_slot.sequence.load(std::memory_order_seq_cst) != sequence) continue;
    if (peer_fingerprint == fingerprint) continue;
    throw mismatch_error({members_[p], names_[static_cast<size_t>(members_[p])], peer_fingerprint},
                         {rank_, names_[static_cast<size_t>(rank_)], fingerprint}, members_[p]);
  }
}

void SharedControlBlock::set_waiting_for(int peer) {
  RankState& own_state = state_of(index_);
  if (peer == kInNativeLibrary) own_state.native_calls.fetch_add(1, std::memory_order_relaxed);
  own_state.waiting_for.store(peer, std::memory_order_release);
}

Error SharedControlBlock::abort(const Error& error) {
  const Error first = group_error().set_first(error);
  for (size_t p = 0; p < members_.size(); ++p) {
    futex_wake_all(state_of(static_cast<int>(p)).posted);
  }
  return first;
}

void SharedControlBlock::leave() { state_of(index_).left.store(1, std::memory_order_release); }

bool SharedControlBlock::all_joined() const {
  for (size_t p = 0; p < members_.size(); ++p) {
    if (state_of(static_cast<int>(p)).joined.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

bool SharedControlBlock::has_joined(int group_rank) const {
  return state_of(index_of(group_rank)).joined.load(std::memory_order_acquire) != 0;
}

bool SharedControlBlock::has_left(int group_rank) const {
  return state_of(index_of(group_rank)).left.load(std::memory_order_acquire) != 0;
}

void SharedControlBlock::check_peers() const {
  group_error().throw_if_set();
  for (size_t p = 0; p < members_.size(); ++p) {
    const int i = static_cast<int>(p);
    const RankState& peer = state_of(i);
    if (i == index_ || peer.joined.load(std::memory_order_acquire) == 0 ||
        peer.left.load(std::memory_order_acquire) != 0 ||
        peer.pid.load(std::memory_order_relaxed) == getpid() || segment_.rank_is_locked(i)) {
      continue;
    }
    throw Error(Fault::kPeerLost, members_[p],
                names_[static_cast<size_t>(members_[p])] + kProcessEnded);
  }
}

// Returns a rank of `group_rank`'s cluster that has called the native library less often, so that
// `group_rank` waits for it there; kNobody if there is none.
int SharedControlBlock::find_late_member(int group_rank) const {
  const RankState& waiting = state_of(index_of(group_rank));
  for (const auto& cluster : clusters_) {
    if (std::find(cluster.begin(), cluster.end(), group_rank) == cluster.end()) continue;
    for (const int member : cluster) {
      if (member == group_rank || !has_member(member)) continue;
      const RankState& state = state_of(index_of(member));
      if (state.native_calls.load(std::memory_order_relaxed) <
          waiting.native_calls.load(std::memory_order_relaxed)) {
        return member;
      }
    }
  }
  return kNobody;
}

int SharedControlBlock::find_stalled_rank(int peer) const {
  int rank = peer;
  for (size_t hops = 0; hops < members_.size() && has_member(rank); ++hops) {
    int next = state_of(index_of(rank)).waiting_for.load(std::memory_order_acquire);
    if (next == kInNativeLibrary) next = find_late_member(rank);
    if (next == kNobody || next == rank_) return rank;
    rank = next;
  }
  return rank;
}

}  // namespace fsccl
