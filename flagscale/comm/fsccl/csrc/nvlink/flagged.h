// Small messages: data and flag in one packet, written straight into every peer's memory. Half of
// what crosses is flags, and nothing is waited for but the data itself.
//
// Each operation has an epoch; packets of epoch e go to box e % 2. Why none is overwritten before
// it is read: rank r writes for epoch e + 2 after its operation e + 1 has ended, so it had a packet
// of epoch e + 1 from every peer p (each channel that takes part has one for every pair of ranks:
// the host chooses the grid so). p sent that in its operation e + 1, after its operation e had
// ended, in which it read all its packets of epoch e.
//
// Epochs wrap after 2^32 operations. A packet that lay untouched for so long would look new, so
// every 2^30 operations a rank clears its boxes, each at a moment when no peer can write to it:
// peers write box (e + 1) % 2 only once they have this rank's packets of epoch e.
//
// Small ones take no longer than to launch them does, and may begin early: follow() is the first
// thing that all of them do.
#pragma once

#include "access.h"

namespace fsccl {
namespace nvlink {

FSCCL_FN constexpr u32 next_epoch(u32 last) { return last + 1 != 0 ? last + 1 : 2; }

template <class B>
class Boxes {
 public:
  FSCCL_FN Boxes(B& b, const Args& a)
      : b_(b),
        a_(a),
        epoch_(next_epoch(b.template load<u32>(
            reinterpret_cast<const char*>(&counters(b, a)->epoch)))),
        packets_(box_packets(static_cast<u32>(a.ranks))) {
    constexpr u32 kClearing = (1u << 30) - 1;
    if ((epoch_ & kClearing) <= 1) clear();
  }

  FSCCL_FN bool lost_before() const { return Patience<B>::lost_before(b_, a_); }

  FSCCL_FN void send(int peer, u32 slot, u64 data) {
    const u64 flag = static_cast<u64>(epoch_) << 32;
    b_.send(box(peer, epoch_, a_.rank) + slot, (data & 0xFFFFFFFF) | flag, (data >> 32) | flag);
  }

  FSCCL_FN void send_others(u32 slot, u64 data) {
    for (int k = 1; k < a_.ranks; ++k) send((a_.rank + k) % a_.ranks, slot, data);
  }

  // One packet of each rank whose bit is set in `from`: all are asked for before any is needed.
  // False if waiting was given up: this thread has nothing to store or send then.
  FSCCL_FN bool receive(u32 slot, u32 from, u64 (&data)[kMaxRanks]) {
    const Packet* const mine = box(a_.rank, epoch_, 0) + slot;
    return patience_.wait(b_, a_, [&] {
      u64 low[kMaxRanks], high[kMaxRanks];
      FSCCL_UNROLL for (int p = 0; p < kMaxRanks; ++p) {
        low[p] = high[p] = 0;
        if (from >> p & 1) b_.receive(mine + static_cast<u64>(p) * packets_, &low[p], &high[p]);
      }
      u32 missing = 0;
      FSCCL_UNROLL for (int p = 0; p < kMaxRanks; ++p) {
        if (low[p] >> 32 != epoch_ || high[p] >> 32 != epoch_) missing |= 1u << p;
        data[p] = (low[p] & 0xFFFFFFFF) | high[p] << 32;
      }
      return missing & from;
    });
  }

  FSCCL_FN u32 others() const { return ((1u << a_.ranks) - 1) & ~(1u << a_.rank); }

  FSCCL_FN void finish() {
    if (b_.any(patience_.lost())) return Patience<B>::lose(b_, a_);
    if (b_.thread() == 0) b_.store(reinterpret_cast<char*>(&counters(b_, a_)->epoch), epoch_);
  }

 private:
  FSCCL_FN Packet* box(int owner, u32 epoch, int source) const {
    char* const at = a_.arena[owner] + kBoxes + (b_.channel() * 2 + (epoch & 1)) * kBoxBytes;
    return reinterpret_cast<Packet*>(at) + static_cast<u64>(source) * packets_;
  }

  FSCCL_FN void clear() {
    Packet* const all = box(a_.rank, epoch_ + 1, 0);
    for (u32 i = b_.thread(); i < kBoxBytes / sizeof(Packet); i += b_.threads()) {
      b_.send(all + i, 0, 0);
    }
    b_.fence();
    b_.sync();
  }

  B& b_;
  const Args& a_;
  const u32 epoch_, packets_;
  Patience<B> patience_;
};

// This thread's packets of a list of `count`: f(packet, slot in its channel's box).
template <class B, class F>
FSCCL_FN void each_packet(B& b, u64 count, F f) {
  u32 slot = b.thread();
  for (u64 i = b.channel() * b.threads() + slot; i < count; i += b.channels() * b.threads()) {
    f(i, slot);
    slot += b.threads();
  }
}

template <class E>
FSCCL_FN u64 sum_of(const Args& a, const u64 (&data)[kMaxRanks]) {
  Sum<E, u64> sum;
  if (sum.plain(a)) {
    sum.begin_plainly(data[0]);
    FSCCL_UNROLL for (int p = 1; p < kMaxRanks; ++p) {
      if (p < a.ranks) sum.add_plainly(data[p]);
    }
    return sum.finish_plainly(a);
  }
  FSCCL_UNROLL for (int p = 0; p < kMaxRanks; ++p) {
    if (p < a.ranks) sum.add(a, p == 0, data[p]);
  }
  return sum.finish(a);
}

FSCCL_FN void put(u64 (&data)[kMaxRanks], int rank, u64 own) {
  FSCCL_UNROLL for (int p = 0; p < kMaxRanks; ++p) {
    if (p == rank) data[p] = own;
  }
}

constexpr u64 kWord = sizeof(u64);

template <class B>
FSCCL_FN void send_flagged(B& b, const Args& a, Boxes<B>& boxes) {
  each_packet(b, (a.bytes + kWord - 1) / kWord, [&](u64 i, u32 slot) {
    const u64 at = i * kWord, left = a.bytes - at;
    if (a.stride_in == 0) {
      boxes.send_others(slot, load<u64>(b, a.in + at, left, a.width_in));
      return;
    }
    for (int k = 1; k < a.ranks; ++k) {
      const int p = (a.rank + k) % a.ranks;
      boxes.send(p, slot, load<u64>(b, a.in + p * a.stride_in + at, left, a.width_in));
    }
  });
}

// all_reduce (stride_in 0) and reduce_scatter: everyone sums what it got.
template <class E, class B>
FSCCL_FN void reduce_flagged(B& b, const Args& a) {
  b.follow();
  Boxes<B> boxes(b, a);
  if (boxes.lost_before()) return;
  send_flagged(b, a, boxes);
  const char* const own = a.in + a.rank * a.stride_in;
  each_packet(b, (a.bytes + kWord - 1) / kWord, [&](u64 i, u32 slot) {
    const u64 at = i * kWord, left = a.bytes - at;
    const u64 mine = load<u64>(b, own + at, left, a.width_in);
    u64 data[kMaxRanks];
    if (!boxes.receive(slot, boxes.others(), data)) return;
    put(data, a.rank, mine);
    store(b, a.out + at, left, a.width_out, sum_of<E>(a, data));
  });
  boxes.finish();
}

// all_gather (stride_in 0) and all_to_all.
template <class B>
FSCCL_FN void copy_flagged(B& b, const Args& a) {
  b.follow();
  Boxes<B> boxes(b, a);
  if (boxes.lost_before()) return;
  send_flagged(b, a, boxes);
  const char* const own = a.in + a.rank * a.stride_in;
  each_packet(b, (a.bytes + kWord - 1) / kWord, [&](u64 i, u32 slot) {
    const u64 at = i * kWord, left = a.bytes - at;
    const u64 mine = load<u64>(b, own + at, left, a.width_in);
    u64 data[kMaxRanks];
    if (!boxes.receive(slot, boxes.others(), data)) return;
    put(data, a.rank, mine);
    FSCCL_UNROLL for (int p = 0; p < kMaxRanks; ++p) {
      if (p < a.ranks) store(b, a.out + p * a.stride_out + at, left, a.width_out, data[p]);
    }
  });
  boxes.finish();
}

// all_reduce in two steps: rank p sums the p-th share and sends the result, so that a byte crosses
// twice instead of ranks - 1 times. A box's first half is for inputs, its second for results.
template <class E, class B>
FSCCL_FN void all_reduce_flagged(B& b, const Args& a) {
  b.follow();
  Boxes<B> boxes(b, a);
  if (boxes.lost_before()) return;
  const u64 all = (a.bytes + kWord - 1) / kWord, n = static_cast<u64>(a.ranks);
  const u32 results = box_packets(static_cast<u32>(a.ranks)) / 2;
  const auto begin = [&](u64 p) { return all * p / n; };
  const auto own = [&](u64 i) {
    return load<u64>(b, a.in + i * kWord, a.bytes - i * kWord, a.width_in);
  };
  for (int k = 1; k < a.ranks; ++k) {
    const u64 p = static_cast<u64>((a.rank + k) % a.ranks), lo = begin(p);
    each_packet(b, begin(p + 1) - lo,
                [&](u64 i, u32 slot) { boxes.send(static_cast<int>(p), slot, own(lo + i)); });
  }
  const u64 mine = begin(static_cast<u64>(a.rank));
  each_packet(b, begin(static_cast<u64>(a.rank) + 1) - mine, [&](u64 i, u32 slot) {
    const u64 at = (mine + i) * kWord;
    const u64 input = own(mine + i);
    u64 data[kMaxRanks];
    if (!boxes.receive(slot, boxes.others(), data)) return;
    put(data, a.rank, input);
    const u64 sum = sum_of<E>(a, data);
    boxes.send_others(results + slot, sum);
    store(b, a.out + at, a.bytes - at, a.width_out, sum);
  });
  // Shares differ by one packet at most: of the longest, some ranks may have none.
  each_packet(b, (all + n - 1) / n, [&](u64 i, u32 slot) {
    u32 from = boxes.others();
    FSCCL_UNROLL for (int p = 0; p < kMaxRanks; ++p) {
      if (p < a.ranks && begin(p) + i >= begin(p + 1)) from &= ~(1u << p);
    }
    u64 data[kMaxRanks];
    if (!boxes.receive(results + slot, from, data)) return;
    FSCCL_UNROLL for (int p = 0; p < kMaxRanks; ++p) {
      const u64 at = (begin(p) + i) * kWord;
      if (from >> p & 1) store(b, a.out + at, a.bytes - at, a.width_out, data[p]);
    }
  });
  boxes.finish();
}

}  // namespace nvlink
}  // namespace fsccl
