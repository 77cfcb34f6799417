// What the ranks of a host share for pipelined schedules: slots between neighbours, and doorbells.
//
// In a segment beside the transport's every rank has, for each of k rings, two slots of one send
// and two counters: `posted`, of the sends that it has put there, and `taken`, of those that it has
// taken from its predecessor's slots. Counters only grow and are never reset. A rank that has
// nothing to do sleeps on its doorbell, a counter that its neighbours raise with each of theirs;
// messages that have gone or come ring it too.
//
// A sleeper writes down what each of its rings waits for, and at which count of its doorbell it
// fell asleep. Whoever times out follows a ring from rank to rank until it finds one that waits for
// nothing, or whose doorbell has rung in vain: that one does not move, and is named.
#pragma once

#include <functional>
#include <vector>

#include "shm_steps.h"

namespace fsccl {

class Channels {
 public:
  // Two slots are enough: with one, every rank of a ring would wait for the next to take.
  static constexpr size_t kDepth = 2;
  // Makes (on the first rank, which reserves the `first` bytes) or opens the n-th segment of the
  // ranks of this host.
  using MakeSegment = std::function<Segment(size_t bytes, size_t first, int n)>;

  Channels(ShmSteps& shm, size_t rings, MakeSegment make)
      : shm_(shm), rings_(rings), make_(std::move(make)) {}

  // Makes room for sends of so many bytes. All ranks call it with the same number.
  void prepare(size_t send);

  // Of ring c: what this rank sends to the local rank `next` and takes from `previous`.
  bool full(size_t c, int next) const;
  bool empty(size_t c, int previous) const;
  std::byte* to_fill(size_t c) const;
  const std::byte* to_read(size_t c, int previous) const;
  void post(size_t c, int next);
  void take(size_t c, int previous);

  // The doorbell's count, to be read before looking for something to do.
  uint32_t bell() const { return own().bell.load(std::memory_order_seq_cst); }
  // Rings this rank's doorbell, on any thread, as long as this object lives.
  std::function<void()> bell_ringer() const;
  // Sleeps, not much longer than until the doorbell shows another count than `seen`. waits_for[c]
  // is the group rank that ring c waits for, or -1. Throws as the transport's waits do.
  void rest(const std::vector<int>& waits_for, uint32_t seen);
  // As ShmSteps::awaited(), of rests.
  int awaited() const { return awaited_.load(std::memory_order_acquire); }

 private:
  struct alignas(2 * kCacheLine) Line {
    Word bell;
    Word asleep;
    Word seen;  // the bell when this rank last looked for something to do in vain
  };
  struct alignas(2 * kCacheLine) Way {
    Word posted, taken;
    Word waits_for;  // a group rank plus one; it counts while the rank's bell shows `seen`
  };

  Line& line(int local_rank) const;
  Line& own() const { return line(shm_.rank()); }
  Way& way(int local_rank, size_t c) const;
  std::byte* slot(int local_rank, size_t c, uint32_t number) const;
  size_t slots_of(int local_rank) const;  // where they begin
  static void ring(Line& whose);
  void look_around(const std::vector<int>& waits_for, uint32_t seen) const;
  int culprit(const std::vector<int>& waits_for) const;

  ShmSteps& shm_;
  size_t rings_;
  MakeSegment make_;
  size_t head_bytes_ = 0, each_ = 0, slot_bytes_ = 0;  // lines and ways; a rank's slots; one slot
  std::atomic<int> awaited_{-1};
  // Outgrown ones stay: a message that ends late may still ring a bell in them.
  std::vector<Segment> segments_;
};

}  // namespace fsccl
