// Shared-memory channels of pipelined schedules (schedule.h): slots between neighbours of a ring,
// and doorbells. Pipeline (pipeline.h) uses them.
//
// The ranks of a node share a segment for the channels. In it, every rank has, for each of k rings,
// kDepth slots of one send each and two counters: `posted` counts the sends that it has written to
// its slots, `released` the sends that it has read from the slots of its predecessor. Counters only
// grow and are never reset. A rank that has nothing to do sleeps on its doorbell, a counter that
// its neighbours increment whenever they increment one of those counters. Completed messages
// increment it, too.
//
// Before a rank sleeps, it records in shared memory which rank each of its rings waits for, and the
// value of its doorbell. A rank that times out follows a ring from rank to rank until it finds a
// rank that waits for no other, or that has not woken up although its doorbell has changed: that
// rank is the straggler, which the error names.
#pragma once

#include <functional>
#include <vector>

#include "shm_steps.h"

namespace fsccl {

// Slots and doorbells of the ranks of one node. One thread at a time calls, except where noted.
class Channels {
 public:
  // Slots per ring. With one slot, every rank of a ring would wait for its successor to release it;
  // two are enough.
  static constexpr size_t kDepth = 2;
  // Creates (on the first rank, which reserves the first `reserved_bytes` bytes) or opens the n-th
  // channel segment of this node.
  using MakeSegment = std::function<Segment(size_t bytes, size_t reserved_bytes, int n)>;

  Channels(ShmSteps& shm, size_t rings, MakeSegment make_segment)
      : shm_(shm), rings_(rings), make_segment_(std::move(make_segment)) {}

  // Makes the slots large enough for sends of `send_bytes`. All ranks call it with the same number.
  void reserve_slots(size_t send_bytes);

  // Slots of ring c, from this rank to local rank `next` and from `previous` to this rank. Unless
  // is_send_full(), a send is written to send_slot() and published by post(). Unless
  // is_recv_empty(), a send is read from recv_slot() and its slot returned by release().
  bool is_send_full(size_t c, int next) const;
  bool is_recv_empty(size_t c, int previous) const;
  std::byte* send_slot(size_t c) const;
  const std::byte* recv_slot(size_t c, int previous) const;
  void post(size_t c, int next);
  void release(size_t c, int previous);

  // Returns the value of the doorbell. Read it before checking whether there is something to do.
  uint32_t doorbell() const { return own_state().doorbell.load(std::memory_order_seq_cst); }
  // Returns a function that increments the doorbell of this rank. Any thread may call it while this
  // object lives.
  std::function<void()> doorbell_callback() const;
  // Waits while the doorbell has the value `idle_doorbell`; may return early. awaited_ranks[c] is
  // the group rank that ring c waits for, or -1. Throws like ShmSteps::wait_for_peer().
  void wait_for_progress(const std::vector<int>& awaited_ranks, uint32_t idle_doorbell);
  // Like ShmSteps::awaited_rank(), for wait_for_progress(). Any thread may call.
  int awaited_rank() const { return awaited_rank_.load(std::memory_order_acquire); }

 private:
  // Doorbell of a rank, in shared memory.
  struct alignas(2 * kCacheLine) RankState {
    Word doorbell;
    Word sleeping;       // 1 while this rank may sleep
    Word idle_doorbell;  // value of the doorbell when this rank last had nothing to do
  };
  // State of a rank in one ring, in shared memory. Only that rank writes it.
  struct alignas(2 * kCacheLine) RingState {
    Word posted, released;
    Word awaited_rank;  // group rank plus one; valid while the doorbell still shows `idle_doorbell`
  };

  RankState& rank_state(int local_rank) const;
  RankState& own_state() const { return rank_state(shm_.rank()); }
  RingState& ring_state(int local_rank, size_t c) const;
  std::byte* slot(int local_rank, size_t c, uint32_t number) const;
  size_t slots_of(int local_rank) const;  // offset of the first one
  static void ring_doorbell(RankState& state);
  void check_peers_and_deadline(const std::vector<int>& awaited_ranks,
                                uint32_t idle_doorbell) const;
  int find_straggler(const std::vector<int>& awaited_ranks) const;

  ShmSteps& shm_;
  size_t rings_;
  MakeSegment make_segment_;
  // Offset of slots; bytes of all slots of a rank; bytes of a slot.
  size_t header_bytes_ = 0, rank_stride_ = 0, slot_bytes_ = 0;
  std::atomic<int> awaited_rank_{-1};
  // The last one is in use. Earlier ones with smaller slots are kept, because a message that
  // completes late may still increment a doorbell in one.
  std::vector<Segment> segments_;
};

}  // namespace fsccl
