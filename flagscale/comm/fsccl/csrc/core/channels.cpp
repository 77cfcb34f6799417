#include "channels.h"

#include <sched.h>

#include <algorithm>

namespace fsccl {

size_t Channels::slots_of(int local_rank) const {
  return head_bytes_ + static_cast<size_t>(local_rank) * each_;
}

void Channels::prepare(size_t send) {
  if (send <= slot_bytes_) return;
  const auto n = static_cast<size_t>(shm_.size());
  slot_bytes_ = ceil_div(send, kCacheLine) * kCacheLine;
  each_ = Segment::whole_pages(rings_ * kDepth * slot_bytes_);
  head_bytes_ = Segment::whole_pages(n * (sizeof(Line) + rings_ * sizeof(Way)));
  const size_t bytes = slots_of(shm_.size());
  segments_.push_back(make_(bytes, slots_of(1), static_cast<int>(segments_.size())));
  segments_.back().reserve(slots_of(shm_.rank()), slots_of(shm_.rank() + 1));
}

Channels::Line& Channels::line(int local_rank) const {
  return reinterpret_cast<Line*>(segments_.back().data())[local_rank];
}

Channels::Way& Channels::way(int local_rank, size_t c) const {
  auto* first = reinterpret_cast<Way*>(&line(shm_.size()));
  return first[static_cast<size_t>(local_rank) * rings_ + c];
}

std::byte* Channels::slot(int local_rank, size_t c, uint32_t number) const {
  const size_t index = c * kDepth + number % kDepth;
  return segments_.back().data() + slots_of(local_rank) + index * slot_bytes_;
}

bool Channels::full(size_t c, int next) const {
  const uint32_t taken = way(next, c).taken.load(std::memory_order_acquire);
  return way(shm_.rank(), c).posted.load(std::memory_order_relaxed) - taken == kDepth;
}

bool Channels::empty(size_t c, int previous) const {
  const uint32_t posted = way(previous, c).posted.load(std::memory_order_acquire);
  return posted == way(shm_.rank(), c).taken.load(std::memory_order_relaxed);
}

std::byte* Channels::to_fill(size_t c) const {
  return slot(shm_.rank(), c, way(shm_.rank(), c).posted.load(std::memory_order_relaxed));
}

const std::byte* Channels::to_read(size_t c, int previous) const {
  return slot(previous, c, way(shm_.rank(), c).taken.load(std::memory_order_relaxed));
}

void Channels::post(size_t c, int next) {
  way(shm_.rank(), c).posted.fetch_add(1, std::memory_order_release);
  ring(line(next));
}

void Channels::take(size_t c, int previous) {
  way(shm_.rank(), c).taken.fetch_add(1, std::memory_order_release);
  ring(line(previous));
}

// Sequentially consistent, as in shm_steps.h: either the ringer sees the sleeper or the sleeper
// hears.
void Channels::ring(Line& whose) {
  whose.bell.fetch_add(1, std::memory_order_seq_cst);
  if (whose.asleep.load(std::memory_order_seq_cst) != 0) futex_wake_all(whose.bell);
}

std::function<void()> Channels::bell_ringer() const {
  return [mine = &own()] { ring(*mine); };
}

void Channels::rest(const std::vector<int>& waits_for, uint32_t seen) {
  const SpinPolicy& spin = shm_.spin();
  for (int i = 0; i < spin.pauses + spin.yields; ++i) {
    if (i < spin.pauses) {
      cpu_relax();
    } else {
      sched_yield();
    }
    if (bell() != seen) return;
  }
  Line& mine = own();
  for (size_t c = 0; c < waits_for.size(); ++c) {
    way(shm_.rank(), c)
        .waits_for.store(static_cast<uint32_t>(waits_for[c] + 1), std::memory_order_relaxed);
  }
  mine.seen.store(seen, std::memory_order_release);
  mine.asleep.store(1, std::memory_order_seq_cst);
  awaited_.store(culprit(waits_for), std::memory_order_release);
  if (bell() == seen) futex_wait(mine.bell, seen, shm_.nap());
  mine.asleep.store(0, std::memory_order_seq_cst);
  if (bell() == seen) {
    look_around(waits_for, seen);
  } else {
    awaited_.store(-1, std::memory_order_release);
  }
}

void Channels::look_around(const std::vector<int>& waits_for, uint32_t seen) const {
  for (const int rank : waits_for) {
    const int peer = rank < 0 ? -1 : shm_.local_rank_of(rank);
    // A rank posts, and then leaves or ends: what it posted has rung.
    shm_.look_at(peer, [&] { return bell() != seen; });
  }
  if (bell() == seen) shm_.give_up(culprit(waits_for));
}

int Channels::culprit(const std::vector<int>& waits_for) const {
  const auto c = static_cast<size_t>(
      std::find_if(waits_for.begin(), waits_for.end(), [](int r) { return r >= 0; }) -
      waits_for.begin());
  int rank = waits_for[c];
  for (int hops = 0; hops < shm_.size(); ++hops) {
    const int peer = shm_.local_rank_of(rank);
    if (peer < 0 || peer == shm_.rank()) break;
    const Line& theirs = line(peer);
    const bool sleeps =
        theirs.seen.load(std::memory_order_acquire) == theirs.bell.load(std::memory_order_acquire);
    const uint32_t next = way(peer, c).waits_for.load(std::memory_order_relaxed);
    if (!sleeps || next == 0) break;
    if (shm_.local_rank_of(static_cast<int>(next) - 1) < 0) break;  // as in ShmSteps::culprit
    rank = static_cast<int>(next) - 1;
  }
  return rank;
}

}  // namespace fsccl
