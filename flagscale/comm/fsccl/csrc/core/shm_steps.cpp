#include "shm_steps.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kShmNap(100);
constexpr int32_t kNobody = -1;

bool reached(uint32_t posted, uint32_t step) { return static_cast<int32_t>(posted - step) >= 0; }

}  // namespace

struct alignas(2 * kCacheLine) ShmSteps::Line {
  Word posted;
  Word sleepers;
  // The second half, which nobody looks at while the operation goes on.
  alignas(kCacheLine) Word joined;
  Word left;
  std::atomic<uint64_t> process;
  std::atomic<uint64_t> finished;    // the last operation that has
  std::atomic<int32_t> waits_for;    // group rank
  std::atomic<uint32_t> waits_step;  // of a mate on the host; 0 when it is on another
};

namespace {
constexpr size_t kHeaderBytes = 2048;
constexpr size_t kCardBytes = kCacheLine;
static_assert(sizeof(OpCard) <= kCardBytes, "a card fits before the payload");
}  // namespace

size_t ShmSteps::head_bytes(int ranks) {
  static_assert(sizeof(Verdict) <= kHeaderBytes, "the verdict has its room");
  return Segment::whole_pages(kHeaderBytes + static_cast<size_t>(ranks) * sizeof(Line));
}

size_t ShmSteps::segment_bytes(int ranks, size_t slot_bytes) {
  return head_bytes(ranks) + static_cast<size_t>(ranks) * slots_bytes(slot_bytes);
}

size_t ShmSteps::first_bytes(int ranks, size_t slot_bytes) {
  return head_bytes(ranks) + slots_bytes(slot_bytes);
}

size_t ShmSteps::slots_bytes(size_t slot_bytes) {
  return Segment::whole_pages(2 * (kCardBytes + slot_bytes));
}

size_t ShmSteps::default_slot_bytes(int ranks) {
  const size_t share = (size_t{16} << 20) / static_cast<size_t>(2 * ranks);
  // Two-shot divides a slot among the ranks: below 2 KiB each it would be all waiting.
  const size_t least = std::max(size_t{64} << 10, static_cast<size_t>(ranks) * 2048);
  return std::max(least, std::min(share, size_t{512} << 10) / 4096 * 4096);
}

ShmSteps::ShmSteps(Segment segment, int rank, ShmConfig config)
    : segment_(std::move(segment)), rank_(rank), config_(std::move(config)) {
  compared_.resize(config_.members.size());
  each_ = slots_bytes(capacity());
  slots_ = segment_.data() + head_bytes(size());
  segment_.lock_rank(rank_);
  reserve_slots();
  Line& mine = line(rank_);
  step_ = config_.first_step;
  compared_.assign(compared_.size(), step_);
  mine.posted.store(step_, std::memory_order_relaxed);
  mine.process.store(config_.process, std::memory_order_relaxed);
  mine.waits_for.store(kNobody, std::memory_order_relaxed);
  mine.joined.store(1, std::memory_order_release);
}

// Each rank its own, so that their pages lie in the memory nearest to the rank that fills them.
void ShmSteps::reserve_slots() {
  const size_t first = head_bytes(size()) + static_cast<size_t>(rank_) * each_;
  try {
    segment_.reserve(first, first + each_);
  } catch (const Error& e) {
    abort({e.fault, member(rank_), name(member(rank_)) + ": " + e.what()});
    throw;
  }
}

Verdict& ShmSteps::verdict() const { return *reinterpret_cast<Verdict*>(segment_.data()); }

ShmSteps::Line& ShmSteps::line(int local_rank) const {
  std::byte* at = segment_.data() + kHeaderBytes + static_cast<size_t>(local_rank) * sizeof(Line);
  return *reinterpret_cast<Line*>(at);
}

std::byte* ShmSteps::slot(int local_rank, uint32_t step) const {
  return slots_ + static_cast<size_t>(local_rank) * each_ + (step & 1) * (kCardBytes + capacity());
}

void ShmSteps::begin(const OpCard& card, const Deadline& deadline) {
  throw_if_aborted();
  card_ = card;
  deadline_ = deadline;
}

void ShmSteps::end() { line(rank_).finished.store(card_.sequence, std::memory_order_release); }

std::byte* ShmSteps::fill() {
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    wait_posted(p, step_);
    if (compared_[static_cast<size_t>(p)] != step_) compare_card(p, posted_card_);
  }
  std::byte* at = slot(rank_, step_ + 1);
  std::memcpy(at, &card_, sizeof card_);
  return at + kCardBytes;
}

void ShmSteps::post() {
  Line& mine = line(rank_);
  posted_card_ = card_;
  mine.posted.store(++step_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(mine.posted);
}

const std::byte* ShmSteps::await(int peer) {
  wait_posted(peer, step_);
  compare_card(peer, card_);
  return slot(peer, step_) + kCardBytes;
}

void ShmSteps::compare_card(int peer, const OpCard& mine) {
  OpCard theirs;
  std::memcpy(&theirs, slot(peer, step_), sizeof theirs);
  if (theirs != mine) {
    throw unlike({member(peer), name_of(peer), theirs}, {member(rank_), name_of(rank_), mine},
                 member(peer));
  }
  compared_[static_cast<size_t>(peer)] = step_;
}

uint32_t ShmSteps::posted() const { return line(rank_).posted.load(std::memory_order_relaxed); }

void ShmSteps::await_all() {
  for (int k = 1; k < size(); ++k) await((rank_ + k) % size());
}

void ShmSteps::wait_posted(int peer, uint32_t step) {
  const Word& posted = line(peer).posted;
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
  Line& theirs = line(peer);
  Line& mine = line(rank_);
  mine.waits_step.store(step, std::memory_order_relaxed);
  mine.waits_for.store(member(peer), std::memory_order_release);
  for (;;) {
    theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = theirs.posted.load(std::memory_order_seq_cst);
    const bool done = reached(seen, step);
    if (!done) futex_wait(theirs.posted, seen, nap());
    theirs.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (done || reached(theirs.posted.load(std::memory_order_acquire), step)) break;
    look_around(peer, step);
  }
  mine.waits_for.store(kNobody, std::memory_order_release);
}

std::chrono::milliseconds ShmSteps::nap() const {
  return std::min(kShmNap, deadline_.remaining());
}

void ShmSteps::look_around(int peer, uint32_t step) {
  const Word& posted = line(peer).posted;
  look_at(peer, [&] { return reached(posted.load(std::memory_order_acquire), step); });
  give_up(culprit(peer));
}

// It may have come, and its rank gone, between the caller's look and this one.
void ShmSteps::look_at(int peer, const std::function<bool()>& come) const {
  throw_if_aborted();
  if (watch_) watch_();
  for (int p = 0; p < size(); ++p) {
    const char* const how = p == rank_ ? nullptr : gone(p);
    if (how == nullptr) continue;
    const bool done = line(p).finished.load(std::memory_order_acquire) >= card_.sequence;
    if (p == peer ? come() : done) continue;
    throw_if_aborted();  // which a rank says before it leaves for that
    throw Error(Fault::kPeerLost, member(p), name(member(p)) + how);
  }
}

const char* ShmSteps::gone(int peer) const {
  const Line& theirs = line(peer);
  if (theirs.left.load(std::memory_order_acquire) != 0) return kLeft;
  const bool joined = theirs.joined.load(std::memory_order_acquire) != 0;
  const bool lives = !joined ? config_.runs(member(peer))
                             : theirs.process.load(std::memory_order_relaxed) == config_.process ||
                                   segment_.rank_is_locked(peer);
  return lives ? nullptr : kEnded;
}

void ShmSteps::give_up(int at_fault) const {
  if (!deadline_.passed()) return;
  if (trace_) at_fault = trace_(at_fault);
  throw Error(Fault::kTimeout, at_fault,
              name(at_fault) + " did not come within " + deadline_.text());
}

int ShmSteps::local_rank_of(int group_rank) const {
  const auto at = std::find(config_.members.begin(), config_.members.end(), group_rank);
  return at == config_.members.end() ? -1 : static_cast<int>(at - config_.members.begin());
}

// Follows who waits for whom from `peer` on. A mate whose own wait is already over (it was
// stopped, or starved) is itself the one that does not move.
int ShmSteps::culprit(int peer) const {
  for (int hops = 0; hops < size(); ++hops) {
    const Line& at = line(peer);
    const int32_t next = at.waits_for.load(std::memory_order_acquire);
    if (next == kNobody || next == member(rank_)) return member(peer);
    const int q = local_rank_of(next);
    if (q < 0) return member(peer);  // which give_up() asks whether it still does
    const uint32_t step = at.waits_step.load(std::memory_order_relaxed);
    if (reached(line(q).posted.load(std::memory_order_acquire), step)) return member(peer);
    peer = q;
  }
  return member(peer);
}

int ShmSteps::awaited() const {
  const Line& mine = line(rank_);
  const int32_t next = mine.waits_for.load(std::memory_order_acquire);
  const int mate = next == kNobody ? -1 : local_rank_of(next);
  if (mate < 0) return next;
  const uint32_t step = mine.waits_step.load(std::memory_order_relaxed);
  const bool over = reached(line(mate).posted.load(std::memory_order_acquire), step);
  return over ? kNobody : culprit(mate);
}

void ShmSteps::note_wait(int group_rank) {
  line(rank_).waits_step.store(0, std::memory_order_relaxed);
  line(rank_).waits_for.store(group_rank, std::memory_order_release);
}

Error ShmSteps::abort(const Error& why) {
  const Error first = verdict().settle(why);
  for (int p = 0; p < size(); ++p) futex_wake_all(line(p).posted);
  return first;
}

void ShmSteps::throw_if_aborted() const { verdict().throw_if_settled(); }

bool ShmSteps::complete() const {
  for (int p = 0; p < size(); ++p) {
    if (line(p).joined.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

void ShmSteps::leave(bool kept) {
  Line& mine = line(rank_);
  mine.left.store(1, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(mine.posted);
  if (!kept || complete()) return;
  segment_.keep_until(
      [lines = &line(0), n = size(), members = config_.members, runs = config_.runs] {
        for (int p = 0; p < n; ++p) {
          const bool joined = lines[p].joined.load(std::memory_order_acquire) != 0;
          if (!joined && runs(members[static_cast<size_t>(p)])) return false;
        }
        return true;
      });
}

}  // namespace fsccl
