#include "channels.h"

#include <sched.h>

#include <algorithm>

namespace fsccl {

size_t Channels::slots_of(int local_rank) const {
  return header_bytes_ + static_cast<size_t>(local_rank) * rank_stride_;
}

void Channels::reserve_slots(size_t send_bytes) {
  if (send_bytes <= slot_bytes_) return;
  const auto n = static_cast<size_t>(shm_.size());
  slot_bytes_ = ceil_div(send_bytes, kCacheLine) * kCacheLine;
  rank_stride_ = Segment::round_to_pages(rings_ * kDepth * slot_bytes_);
  header_bytes_ = Segment::round_to_pages(n * (sizeof(RankState) + rings_ * sizeof(RingState)));
  const size_t bytes = slots_of(shm_.size());
  segments_.push_back(make_segment_(bytes, slots_of(1), static_cast<int>(segments_.size())));
  segments_.back().reserve(slots_of(shm_.rank()), slots_of(shm_.rank() + 1));
}

Channels::RankState& Channels::rank_state(int local_rank) const {
  return reinterpret_cast<RankState*>(segments_.back().data())[local_rank];
}

Channels::RingState& Channels::ring_state(int local_rank, size_t c) const {
  auto* first = reinterpret_cast<RingState*>(&rank_state(shm_.size()));
  return first[static_cast<size_t>(local_rank) * rings_ + c];
}

std::byte* Channels::slot(int local_rank, size_t c, uint32_t number) const {
  const size_t index = c * kDepth + number % kDepth;
  return segments_.back().data() + slots_of(local_rank) + index * slot_bytes_;
}

bool Channels::is_send_full(size_t c, int next) const {
  const uint32_t released = ring_state(next, c).released.load(std::memory_order_acquire);
  return ring_state(shm_.rank(), c).posted.load(std::memory_order_relaxed) - released == kDepth;
}

bool Channels::is_recv_empty(size_t c, int previous) const {
  const uint32_t posted = ring_state(previous, c).posted.load(std::memory_order_acquire);
  return posted == ring_state(shm_.rank(), c).released.load(std::memory_order_relaxed);
}

std::byte* Channels::send_slot(size_t c) const {
  return slot(shm_.rank(), c, ring_state(shm_.rank(), c).posted.load(std::memory_order_relaxed));
}

const std::byte* Channels::recv_slot(size_t c, int previous) const {
  return slot(previous, c, ring_state(shm_.rank(), c).released.load(std::memory_order_relaxed));
}

void Channels::post(size_t c, int next) {
  ring_state(shm_.rank(), c).posted.fetch_add(1, std::memory_order_release);
  ring_doorbell(rank_state(next));
}

void Channels::release(size_t c, int previous) {
  ring_state(shm_.rank(), c).released.fetch_add(1, std::memory_order_release);
  ring_doorbell(rank_state(previous));
}

// Increments a doorbell and wakes its rank. The operations are sequentially consistent, as in
// shm_steps.h: either this rank observes `sleeping`, or the sleeping rank observes the new value.
void Channels::ring_doorbell(RankState& state) {
  state.doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (state.sleeping.load(std::memory_order_seq_cst) != 0) futex_wake_all(state.doorbell);
}

std::function<void()> Channels::doorbell_callback() const {
  return [state = &own_state()] { ring_doorbell(*state); };
}

void Channels::wait_for_progress(const std::vector<int>& awaited_ranks, uint32_t idle_doorbell) {
  const SpinPolicy& spin = shm_.spin();
  for (int i = 0; i < spin.pauses + spin.yields; ++i) {
    if (i < spin.pauses) {
      cpu_relax();
    } else {
      sched_yield();
    }
    if (doorbell() != idle_doorbell) return;
  }
  RankState& state = own_state();
  for (size_t c = 0; c < awaited_ranks.size(); ++c) {
    ring_state(shm_.rank(), c)
        .awaited_rank.store(static_cast<uint32_t>(awaited_ranks[c] + 1), std::memory_order_relaxed);
  }
  state.idle_doorbell.store(idle_doorbell, std::memory_order_release);
  state.sleeping.store(1, std::memory_order_seq_cst);
  awaited_rank_.store(find_straggler(awaited_ranks), std::memory_order_release);
  if (doorbell() == idle_doorbell) futex_wait(state.doorbell, idle_doorbell, shm_.sleep_interval());
  state.sleeping.store(0, std::memory_order_seq_cst);
  if (doorbell() == idle_doorbell) {
    check_peers_and_deadline(awaited_ranks, idle_doorbell);
  } else {
    awaited_rank_.store(-1, std::memory_order_release);
  }
}

void Channels::check_peers_and_deadline(const std::vector<int>& awaited_ranks,
                                        uint32_t idle_doorbell) const {
  for (const int rank : awaited_ranks) {
    const int peer = rank < 0 ? -1 : shm_.local_rank_of(rank);
    // A rank that has posted and then left or ended is no failure: posting changes the doorbell.
    shm_.check_peers(peer, [&] { return doorbell() != idle_doorbell; });
  }
  if (doorbell() == idle_doorbell) shm_.throw_if_timed_out(find_straggler(awaited_ranks));
}

int Channels::find_straggler(const std::vector<int>& awaited_ranks) const {
  const auto c = static_cast<size_t>(
      std::find_if(awaited_ranks.begin(), awaited_ranks.end(), [](int r) { return r >= 0; }) -
      awaited_ranks.begin());
  int rank = awaited_ranks[c];
  for (int hops = 0; hops < shm_.size(); ++hops) {
    const int peer = shm_.local_rank_of(rank);
    if (peer < 0 || peer == shm_.rank()) break;
    const RankState& peer_state = rank_state(peer);
    const bool is_sleeping = peer_state.idle_doorbell.load(std::memory_order_acquire) ==
                             peer_state.doorbell.load(std::memory_order_acquire);
    const uint32_t next = ring_state(peer, c).awaited_rank.load(std::memory_order_relaxed);
    if (!is_sleeping || next == 0) break;
    // As in ShmSteps::find_straggler.
    if (shm_.local_rank_of(static_cast<int>(next) - 1) < 0) break;
    rank = static_cast<int>(next) - 1;
  }
  return rank;
}

}  // namespace fsccl
