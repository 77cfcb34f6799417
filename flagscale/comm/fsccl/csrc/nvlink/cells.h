// Cells: data and flag in one access, written directly into every peer's memory. A receiver waits
// for nothing but the data itself. Packets are NCCL's protocol LL, bundles its LL128.
//
// Each operation has an epoch; cells of epoch e go to box e % 2. No cell is overwritten before it
// is read: rank r writes for epoch e + 2 after its operation e + 1 has ended, so it had a cell of
// epoch e + 1 from every peer p (each channel that takes part has one for every pair of ranks: the
// host chooses the grid accordingly). p sent that in its operation e + 1, after its operation e had
// ended, in which it read all its cells of epoch e.
//
// Epochs wrap after 2^32 operations. A cell that lay untouched for so long would look new, so every
// 2^30 operations a rank clears its boxes, each at a moment when no peer can write to it: peers
// write box (e + 1) % 2 only once they have this rank's cells of epoch e.
#pragma once

#include "block_primitives.h"

namespace fsccl {
namespace nvlink {

FSCCL_FN constexpr u32 next_epoch(u32 last) { return last + 1 != 0 ? last + 1 : 2; }

// Kind of cells: eight bytes of data and eight of flags, written by one thread.
template <class B>
struct Packets {
  using Cell = Packet;
  using Raw = Packet;
  static constexpr u32 kThreads = 1;             // per cell
  static constexpr u32 kWords = 1;               // per thread and cell
  static constexpr u64 kData = sizeof(u64);      // bytes per cell
  static constexpr u64 kCells = kBoxBytes / sizeof(Cell);  // per box

  FSCCL_FN static u32* epoch(Counters* c) { return &c->packets; }
  FSCCL_FN static Cell* boxes(char* arena) { return reinterpret_cast<Cell*>(arena + kBoxes); }
  // The position of a source's cells in its owner's box.
  FSCCL_FN static u32 index(int, int source) { return static_cast<u32>(source); }

  // The word of the cell's data that this thread's w-th word is; negative: none.
  FSCCL_FN static int word(B&, u32) { return 0; }
  FSCCL_FN static void send(B& b, Cell* to, const u64 (&data)[kWords], u32 epoch) {
    const u64 flag = static_cast<u64>(epoch) << 32;
    b.send(to, (data[0] & 0xFFFFFFFF) | flag, (data[0] >> 32) | flag);
  }
  FSCCL_FN static Raw receive(B& b, const Cell* from) {
    Raw raw;
    b.receive(from, &raw.low, &raw.high);
    return raw;
  }
  // Unpacks the data. False if the cell is not of this epoch.
  FSCCL_FN static bool open(B&, const Raw& raw, u32 epoch, u64 (&data)[kWords]) {
    data[0] = (raw.low & 0xFFFFFFFF) | raw.high << 32;
    return raw.low >> 32 == epoch && raw.high >> 32 == epoch;
  }
  // Disjunction over the threads of a cell.
  FSCCL_FN static u32 any(B&, u32 bits) { return bits; }
};

// Kind of cells: four lines, written by a warp; a sixteenth of the bytes that cross is flags. An
// aligned line that a warp writes by one instruction arrives whole, and is whole for a warp that
// reads it by one. CUDA does not promise that, but between GPUs with an NVLink NCCL relies on it,
// too (LL128).
template <class B>
struct Bundles {
  using Cell = Bundle;
  using Raw = typename B::Share;
  static constexpr u32 kThreads = B::kWarp;
  static constexpr u32 kWords = kBundleWords / kThreads;
  static constexpr u64 kData = kBundleData;
  static constexpr u64 kCells = kRackBytes / sizeof(Cell);

  FSCCL_FN static u32* epoch(Counters* c) { return &c->bundles; }
  FSCCL_FN static Cell* boxes(char* arena) { return reinterpret_cast<Cell*>(arena + kRacks); }
  FSCCL_FN static u32 index(int owner, int source) {
    return static_cast<u32>(source - (source > owner ? 1 : 0));
  }

  FSCCL_FN static u32 place(B& b, u32 w) { return b.thread() % kThreads * kWords + w; }
  FSCCL_FN static bool flag(u32 place) { return place % kLineWords == kLineWords - 1; }
  FSCCL_FN static int word(B& b, u32 w) {
    const u32 at = place(b, w);
    return flag(at) ? -1 : static_cast<int>(at - at / kLineWords);
  }
  FSCCL_FN static void send(B& b, Cell* to, const u64 (&data)[kWords], u32 epoch) {
    Raw raw;
    FSCCL_UNROLL for (u32 w = 0; w < kWords; ++w) {
      raw.word[w] = flag(place(b, w)) ? u64{epoch} : data[w];
    }
    b.write_bundle(to, raw);
  }
  FSCCL_FN static Raw receive(B& b, const Cell* from) { return b.read_bundle(from); }
  FSCCL_FN static bool open(B& b, const Raw& raw, u32 epoch, u64 (&data)[kWords]) {
    bool there = true;
    FSCCL_UNROLL for (u32 w = 0; w < kWords; ++w) {
      data[w] = raw.word[w];
      if (flag(place(b, w))) there = there && data[w] == epoch;
    }
    return there;
  }
  FSCCL_FN static u32 any(B& b, u32 bits) { return b.warp_or(bits); }
};

// The boxes of this channel, of this rank and of up to `Most` ranks in all, during one operation.
// The threads of a cell make all calls together, with the same arguments except for their words.
template <class Kind, int Most, class B>
class Boxes {
 public:
  static constexpr u32 kWords = Kind::kWords;
  using Cell = typename Kind::Cell;

  FSCCL_FN Boxes(B& b, const KernelArgs& a)
      : b_(b),
        a_(a),
        epoch_(next_epoch(b.template load<u32>(
            reinterpret_cast<const char*>(Kind::epoch(counters(b, a)))))) {
    constexpr u32 kClearInterval = (1u << 30) - 1;
    if ((epoch_ & kClearInterval) <= 1) clear();
  }

  FSCCL_FN bool gave_up_before() const { return PeerWait<B>::gave_up_before(b_, a_); }

  FSCCL_FN void send(int peer, u32 slot, const u64 (&data)[kWords]) {
    Kind::send(b_, box(peer, epoch_) + Kind::index(peer, a_.rank) * a_.cells + slot, data, epoch_);
  }

  FSCCL_FN void send_to_peers(u32 slot, const u64 (&data)[kWords]) {
    for (int k = 1; k < a_.ranks; ++k) send(peer(a_, k), slot, data);
  }

  // Receives one cell of each rank whose bit is set in `from`; all are loaded before any is needed.
  // False if waiting was given up: then this thread has nothing to store or send.
  FSCCL_FN bool receive(u32 slot, u32 from, u64 (&data)[Most][kWords]) {
    const Cell* const mine = box(a_.rank, epoch_) + slot;
    const auto missing = [&] {
      typename Kind::Raw raw[Most];
      FSCCL_UNROLL for (int p = 0; p < Most; ++p) {
        if (from >> p & 1) raw[p] = Kind::receive(b_, mine + Kind::index(a_.rank, p) * a_.cells);
      }
      u32 out = 0;
      FSCCL_UNROLL for (int p = 0; p < Most; ++p) {
        if ((from >> p & 1) && !Kind::open(b_, raw[p], epoch_, data[p])) out |= 1u << p;
      }
      return Kind::any(b_, out);
    };
    return peer_wait_.wait(b_, a_, missing, [&](bool over) { return Kind::any(b_, over) != 0; });
  }

  FSCCL_FN u32 peers() const { return ((1u << a_.ranks) - 1) & ~(1u << a_.rank); }

  FSCCL_FN void finish() {
    if (b_.any(peer_wait_.gave_up())) return PeerWait<B>::mark_given_up(b_, a_);
    if (b_.thread() == 0) {
      b_.store(reinterpret_cast<char*>(Kind::epoch(counters(b_, a_))), epoch_);
    }
  }

 private:
  FSCCL_FN Cell* box(int owner, u32 epoch) const {
    return Kind::boxes(a_.arena[owner]) + (b_.channel() * 2 + (epoch & 1)) * Kind::kCells;
  }

  FSCCL_FN void clear() {
    auto* const all = reinterpret_cast<Packet*>(box(a_.rank, epoch_ + 1));
    constexpr u32 kCount = Kind::kCells * sizeof(Cell) / sizeof(Packet);
    for (u32 i = b_.thread(); i < kCount; i += b_.threads()) b_.send(all + i, 0, 0);
    b_.fence();
    b_.sync();
  }

  B& b_;
  const KernelArgs& a_;
  const u32 epoch_;
  PeerWait<B> peer_wait_;
};

}  // namespace nvlink
}  // namespace fsccl
