#include "lane.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace fsccl {
namespace {

constexpr uint32_t kRunning = 0, kWriting = 1, kAborted = 2;
constexpr std::chrono::milliseconds kLaneNap(100);
constexpr int32_t kNobody = -1;

bool reached(uint32_t posted, uint32_t step) { return static_cast<int32_t>(posted - step) >= 0; }

}  // namespace

struct Lane::Header {
  Word state;  // kRunning, kWriting, kAborted
  int32_t at_fault;
  char why[1024];
};

struct alignas(2 * kCacheLine) Lane::Line {
  Word posted;
  Word sleepers;
  Word joined, left;
  std::atomic<uint64_t> process;
  std::atomic<int32_t> waits_for;    // group rank
  std::atomic<uint32_t> waits_step;  // of a lane mate; 0 when the awaited is not in the lane
};

namespace {
constexpr size_t kHeaderBytes = 2048;
constexpr size_t kCardBytes = kCacheLine;
static_assert(sizeof(OpCard) <= kCardBytes, "a card fits before the payload");
}  // namespace

std::string OpCard::text() const {
  std::string out = std::string(name_of(op)) + " #" + std::to_string(sequence);
  if (bytes > 0) out += " of " + std::to_string(bytes) + " bytes";
  if (dtype != DType::kOpaque) out += std::string(" of ") + name_of(dtype) + ", " + name_of(red);
  if (root >= 0) out += ", root " + std::to_string(root);
  return out;
}

uint32_t OpCard::digest() const {
  uint64_t h = static_cast<uint64_t>(op) << 16 | static_cast<uint64_t>(dtype) << 8 |
               static_cast<uint64_t>(red) | static_cast<uint64_t>(root) << 32;
  for (const uint64_t more : {bytes, layout}) {
    h = (h ^ more) * 0x9E3779B97F4A7C15u;
    h ^= h >> 32;
  }
  return static_cast<uint32_t>(h);
}

std::string unlike(const std::string& them, const OpCard& theirs, const std::string& me,
                   const OpCard& mine) {
  OpCard alike = theirs;
  alike.layout = mine.layout;
  return them + " called " + theirs.text() + " while " + me + " called " + mine.text() +
         (alike == mine ? ": the sizes of the ranks' parts differ" : "");
}

size_t Lane::head_bytes(int ranks) {
  static_assert(sizeof(Header) <= kHeaderBytes, "the header has its room");
  return Segment::whole_pages(kHeaderBytes + static_cast<size_t>(ranks) * sizeof(Line));
}

size_t Lane::segment_bytes(int ranks, size_t slot_bytes) {
  return head_bytes(ranks) + static_cast<size_t>(ranks) * slots_bytes(slot_bytes);
}

size_t Lane::first_bytes(int ranks, size_t slot_bytes) {
  return head_bytes(ranks) + slots_bytes(slot_bytes);
}

size_t Lane::slots_bytes(size_t slot_bytes) {
  return Segment::whole_pages(2 * (kCardBytes + slot_bytes));
}

size_t Lane::default_slot_bytes(int ranks) {
  const size_t share = (size_t{16} << 20) / static_cast<size_t>(2 * ranks);
  // Two-shot divides a slot among the ranks: below 2 KiB each it would be all waiting.
  const size_t least = std::max(size_t{64} << 10, static_cast<size_t>(ranks) * 2048);
  return std::max(least, std::min(share, size_t{512} << 10) / 4096 * 4096);
}

Lane::Lane(Segment segment, int rank, LaneConfig config)
    : segment_(std::move(segment)), rank_(rank), config_(std::move(config)) {
  each_ = slots_bytes(capacity());
  slots_ = segment_.data() + head_bytes(size());
  segment_.lock_rank(rank_);
  reserve_slots();
  Line& mine = line(rank_);
  mine.process.store(config_.process, std::memory_order_relaxed);
  mine.waits_for.store(kNobody, std::memory_order_relaxed);
  mine.joined.store(1, std::memory_order_release);
}

// Each rank its own, so that their pages lie in the memory nearest to the rank that fills them.
void Lane::reserve_slots() {
  const size_t first = head_bytes(size()) + static_cast<size_t>(rank_) * each_;
  try {
    segment_.reserve(first, first + each_);
  } catch (const Error& e) {
    abort(member(rank_), name(member(rank_)) + ": " + e.what());
    throw;
  }
}

Lane::Header& Lane::header() const { return *reinterpret_cast<Header*>(segment_.data()); }

Lane::Line& Lane::line(int lane_rank) const {
  std::byte* at = segment_.data() + kHeaderBytes + static_cast<size_t>(lane_rank) * sizeof(Line);
  return *reinterpret_cast<Line*>(at);
}

std::byte* Lane::slot(int lane_rank, uint32_t step) const {
  return slots_ + static_cast<size_t>(lane_rank) * each_ + (step & 1) * (kCardBytes + capacity());
}

void Lane::begin(const OpCard& card, const Deadline& deadline) {
  throw_if_aborted();
  card_ = card;
  deadline_ = deadline;
}

std::byte* Lane::fill() {
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) wait_posted(p, step_);
  }
  std::byte* at = slot(rank_, step_ + 1);
  std::memcpy(at, &card_, sizeof card_);
  return at + kCardBytes;
}

void Lane::post() {
  Line& mine = line(rank_);
  mine.posted.store(++step_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(mine.posted);
}

const std::byte* Lane::await(int peer) {
  wait_posted(peer, step_);
  const std::byte* at = slot(peer, step_);
  OpCard theirs;
  std::memcpy(&theirs, at, sizeof theirs);
  if (!(theirs == card_)) {
    throw Error(Fault::kMismatch, member(peer),
                unlike(name_of(peer), theirs, name_of(rank_), card_));
  }
  return at + kCardBytes;
}

void Lane::await_all() {
  for (int k = 1; k < size(); ++k) await((rank_ + k) % size());
}

void Lane::wait_posted(int peer, uint32_t step) {
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

void Lane::sleep_until(int peer, uint32_t step) {
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

std::chrono::milliseconds Lane::nap() const { return std::min(kLaneNap, deadline_.remaining()); }

void Lane::look_around(int peer, uint32_t step) {
  const Word& posted = line(peer).posted;
  look_at(peer, [&] { return reached(posted.load(std::memory_order_acquire), step); });
  give_up(culprit(peer));
}

// It may have come, and its rank gone, between the caller's look and this one.
void Lane::look_at(int peer, const std::function<bool()>& come) const {
  throw_if_aborted();
  if (watch_) watch_();
  if (peer < 0) return;
  const Line& theirs = line(peer);
  if (theirs.left.load(std::memory_order_acquire) != 0 && !come()) {
    throw Error(Fault::kPeerLost, member(peer), name(member(peer)) + " has left the group");
  }
  const bool lives = theirs.joined.load(std::memory_order_acquire) == 0 ||
                     theirs.process.load(std::memory_order_relaxed) == config_.process ||
                     segment_.rank_is_locked(peer);
  if (!lives && !come()) {
    throw Error(Fault::kPeerLost, member(peer),
                name(member(peer)) + " ended without leaving the group");
  }
}

void Lane::give_up(int at_fault) const {
  if (!deadline_.passed()) return;
  if (trace_) at_fault = trace_(at_fault);
  throw Error(Fault::kTimeout, at_fault,
              name(at_fault) + " did not come within " + deadline_.text());
}

int Lane::lane_rank_of(int group_rank) const {
  const auto at = std::find(config_.members.begin(), config_.members.end(), group_rank);
  return at == config_.members.end() ? -1 : static_cast<int>(at - config_.members.begin());
}

// Follows who waits for whom from `peer` on. A lane mate whose own wait is already over (it was
// stopped, or starved) is itself the one that does not move.
int Lane::culprit(int peer) const {
  for (int hops = 0; hops < size(); ++hops) {
    const Line& at = line(peer);
    const int32_t next = at.waits_for.load(std::memory_order_acquire);
    if (next == kNobody || next == member(rank_)) return member(peer);
    const int q = lane_rank_of(next);
    if (q < 0) return member(peer);  // which give_up() asks whether it still does
    const uint32_t step = at.waits_step.load(std::memory_order_relaxed);
    if (reached(line(q).posted.load(std::memory_order_acquire), step)) return member(peer);
    peer = q;
  }
  return member(peer);
}

int Lane::awaited() const {
  const Line& mine = line(rank_);
  const int32_t next = mine.waits_for.load(std::memory_order_acquire);
  const int mate = next == kNobody ? -1 : lane_rank_of(next);
  if (mate < 0) return next;
  const uint32_t step = mine.waits_step.load(std::memory_order_relaxed);
  const bool over = reached(line(mate).posted.load(std::memory_order_acquire), step);
  return over ? kNobody : culprit(mate);
}

void Lane::note_wait(int group_rank) {
  line(rank_).waits_step.store(0, std::memory_order_relaxed);
  line(rank_).waits_for.store(group_rank, std::memory_order_release);
}

void Lane::abort(int group_rank_at_fault, const std::string& why) {
  Header& h = header();
  uint32_t expected = kRunning;
  if (!h.state.compare_exchange_strong(expected, kWriting)) return;
  h.at_fault = group_rank_at_fault;
  const size_t n = std::min(why.size(), sizeof(h.why) - 1);
  std::memcpy(h.why, why.data(), n);
  h.why[n] = '\0';
  h.state.store(kAborted, std::memory_order_release);
  for (int p = 0; p < size(); ++p) futex_wake_all(line(p).posted);
}

void Lane::throw_if_aborted() const {
  const Header& h = header();
  if (h.state.load(std::memory_order_acquire) == kAborted) {
    throw Error(Fault::kAborted, h.at_fault, h.why);
  }
}

bool Lane::complete() const {
  for (int p = 0; p < size(); ++p) {
    if (line(p).joined.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

void Lane::leave() {
  Line& mine = line(rank_);
  mine.left.store(1, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(mine.posted);
}

}  // namespace fsccl
