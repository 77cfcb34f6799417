#include "board.h"

#include <unistd.h>

#include <algorithm>

namespace fsccl {
namespace {

constexpr size_t kBoardHeader = 2048;

}  // namespace

struct alignas(2 * kCacheLine) Board::Line {
  struct Slot {
    std::atomic<uint64_t> sequence;  // set last
    OpCard card;
  };
  Word posted;
  alignas(kCacheLine) Word joined;
  Word left;
  std::atomic<int32_t> pid;
  std::atomic<int32_t> waits_for;
  std::atomic<uint64_t> sequence;  // of the operation it is in
  std::atomic<uint64_t> natives;   // how often it has entered the native library
  Slot cards[kCards];
};

size_t Board::segment_bytes(int ranks, size_t area_bytes) {
  static_assert(sizeof(Verdict) <= kBoardHeader, "the verdict has its room");
  const size_t raw =
      kBoardHeader + static_cast<size_t>(ranks) * sizeof(Line) + 2 * area_bytes + kCacheLine;
  return ceil_div(raw, size_t{4096}) * 4096;
}

Board::Board(Segment segment, int rank, std::vector<int> members,
             std::vector<std::vector<int>> clusters, std::vector<std::string> names,
             size_t area_bytes)
    : segment_(std::move(segment)),
      rank_(rank),
      index_(-1),
      members_(std::move(members)),
      clusters_(std::move(clusters)),
      names_(std::move(names)),
      area_bytes_(area_bytes) {
  index_ = index_of(rank);
  segment_.lock_rank(index_);
  Line& mine = line(index_);
  mine.pid.store(getpid(), std::memory_order_relaxed);
  mine.waits_for.store(kNobody, std::memory_order_relaxed);
  mine.joined.store(1, std::memory_order_release);
}

Verdict& Board::verdict() const { return *reinterpret_cast<Verdict*>(segment_.data()); }

Board::Line& Board::line(int index) const {
  return reinterpret_cast<Line*>(segment_.data() + kBoardHeader)[index];
}

int Board::index_of(int group_rank) const {
  const auto at = std::find(members_.begin(), members_.end(), group_rank);
  return at == members_.end() ? -1 : static_cast<int>(at - members_.begin());
}

Word& Board::posted(int group_rank) const { return line(index_of(group_rank)).posted; }

std::byte* Board::area(uint32_t step) const {
  return segment_.data() + kBoardHeader + members_.size() * sizeof(Line) +
         static_cast<size_t>(step % 2) * area_bytes_;
}

void Board::begin(const OpCard& card) {
  Line& mine = line(index_);
  Line::Slot& slot = mine.cards[card.sequence % kCards];
  slot.sequence.store(0, std::memory_order_seq_cst);
  slot.card = card;
  slot.sequence.store(card.sequence, std::memory_order_seq_cst);
  mine.sequence.store(card.sequence, std::memory_order_release);
  for (size_t p = 0; p < members_.size(); ++p) {
    const Line::Slot& theirs = line(static_cast<int>(p)).cards[card.sequence % kCards];
    if (theirs.sequence.load(std::memory_order_seq_cst) != card.sequence) continue;
    const OpCard other = theirs.card;
    // A rank that has gone on may have written over it meanwhile.
    if (theirs.sequence.load(std::memory_order_seq_cst) != card.sequence) continue;
    if (other == card) continue;
    throw unlike({members_[p], names_[static_cast<size_t>(members_[p])], other},
                 {rank_, names_[static_cast<size_t>(rank_)], card}, members_[p]);
  }
}

void Board::note(int waits_for) {
  Line& mine = line(index_);
  if (waits_for == kInNative) mine.natives.fetch_add(1, std::memory_order_relaxed);
  mine.waits_for.store(waits_for, std::memory_order_release);
}

Error Board::abort(const Error& why) {
  const Error first = verdict().settle(why);
  for (size_t p = 0; p < members_.size(); ++p) futex_wake_all(line(static_cast<int>(p)).posted);
  return first;
}

void Board::leave() { line(index_).left.store(1, std::memory_order_release); }

bool Board::complete() const {
  for (size_t p = 0; p < members_.size(); ++p) {
    if (line(static_cast<int>(p)).joined.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

void Board::look() const {
  verdict().throw_if_settled();
  for (size_t p = 0; p < members_.size(); ++p) {
    const int i = static_cast<int>(p);
    const Line& theirs = line(i);
    if (i == index_ || theirs.joined.load(std::memory_order_acquire) == 0 ||
        theirs.left.load(std::memory_order_acquire) != 0 ||
        theirs.pid.load(std::memory_order_relaxed) == getpid() || segment_.rank_is_locked(i)) {
      continue;
    }
    throw Error(Fault::kPeerLost, members_[p],
                names_[static_cast<size_t>(members_[p])] + " ended without leaving the group");
  }
}

// Of the ranks that `group_rank` meets in the native library one that has not come there yet.
int Board::behind(int group_rank) const {
  const Line& theirs = line(index_of(group_rank));
  for (const auto& cluster : clusters_) {
    if (std::find(cluster.begin(), cluster.end(), group_rank) == cluster.end()) continue;
    for (const int mate : cluster) {
      if (mate == group_rank || !has(mate)) continue;
      const Line& other = line(index_of(mate));
      if (other.natives.load(std::memory_order_relaxed) <
          theirs.natives.load(std::memory_order_relaxed)) {
        return mate;
      }
    }
  }
  return kNobody;
}

int Board::culprit(int peer) const {
  int at = peer;
  for (size_t hops = 0; hops < members_.size() && has(at); ++hops) {
    const Line& theirs = line(index_of(at));
    int next = theirs.waits_for.load(std::memory_order_acquire);
    if (next == kInNative) next = behind(at);
    if (next == kNobody || next == rank_) return at;
    at = next;
  }
  return at;
}

}  // namespace fsccl
