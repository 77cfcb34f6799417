// Cells: data and its flag, written by one access directly into every peer's memory. The receiver
// polls the data itself, so no separate flag and no memory fence is needed. There are two kinds:
// packets are the lines of NCCL's LL protocol, bundles those of its LL128 protocol.
//
// Each operation has an epoch, which is the flag's value. A channel (a block of the grid, see
// kernel_args.h) has two buffers of cells, and cells of epoch e go to buffer e % 2. No cell is
// overwritten before it is read: rank r writes for epoch e + 2 after its operation e + 1 has ended,
// so it had received a cell of epoch e + 1 from every peer p (each channel that takes part has one
// for every pair of ranks: the host chooses the grid accordingly). p sent that cell in its
// operation e + 1, after its operation e had ended, in which it read all its cells of epoch e.
//
// Epochs wrap after 2^32 operations. A cell that was not written for so long would look new, so
// every 2^30 operations a rank clears its buffers, each at a moment when no peer can write to it:
// peers write buffer (e + 1) % 2 only once they have this rank's cells of epoch e.
#pragma once

#include "block_primitives.h"

namespace fsccl {
namespace nvlink {

// The epoch after `last`. When it wraps, it skips 0, which cleared cells contain, and 1, so that
// even and odd epochs still alternate.
FSCCL_FN constexpr u32 next_epoch(u32 last) { return last + 1 != 0 ? last + 1 : 2; }

// A packet as a cell: eight bytes of data and eight of flags, written by one thread.
template <class B>
struct Packets {
  using Cell = Packet;
  using Raw = Packet;
  static constexpr u32 kThreadsPerCell = 1;
  static constexpr u32 kWordsPerThread = 1;  // of a cell
  static constexpr u64 kCellDataBytes = sizeof(u64);
  static constexpr u64 kCellsPerBuffer = kPacketBufferBytes / sizeof(Cell);

  FSCCL_FN static u32* epoch(Counters* c) { return &c->packet_epoch; }
  FSCCL_FN static Cell* buffers(char* arena) {
    return reinterpret_cast<Cell*>(arena + kPacketBuffersOffset);
  }
  // Index of the source rank's cells in the buffer of the owner rank, in units of
  // KernelArgs::cells_per_source.
  FSCCL_FN static u32 source_index(int, int source) { return static_cast<u32>(source); }

  // Index in the cell's data of this thread's w-th word; negative if that word is a flag.
  FSCCL_FN static int data_word(B&, u32) { return 0; }
  FSCCL_FN static void send(B& b, Cell* to, const u64 (&data)[kWordsPerThread], u32 epoch) {
    const u64 flag = static_cast<u64>(epoch) << 32;
    b.send(to, (data[0] & 0xFFFFFFFF) | flag, (data[0] >> 32) | flag);
  }
  FSCCL_FN static Raw receive(B& b, const Cell* from) {
    Raw raw;
    b.receive(from, &raw.low, &raw.high);
    return raw;
  }
  // Unpacks the data. Returns false if the cell is not of this epoch.
  FSCCL_FN static bool unpack(B&, const Raw& raw, u32 epoch, u64 (&data)[kWordsPerThread]) {
    data[0] = (raw.low & 0xFFFFFFFF) | raw.high << 32;
    return raw.low >> 32 == epoch && raw.high >> 32 == epoch;
  }
  // Bitwise OR over the threads of a cell.
  FSCCL_FN static u32 any(B&, u32 bits) { return bits; }
};

// A bundle as a cell: four lines of 128 bytes, written by a warp; a sixteenth of the bytes sent is
// flags. A warp that writes an aligned line with one instruction makes it visible as a whole to a
// warp that reads it with one instruction. CUDA does not guarantee that, but between GPUs with
// NVLink NCCL relies on it, too (LL128).
template <class B>
struct Bundles {
  using Cell = Bundle;
  using Raw = typename B::Share;
  static constexpr u32 kThreadsPerCell = B::kWarp;
  static constexpr u32 kWordsPerThread = kBundleWords / kThreadsPerCell;
  static constexpr u64 kCellDataBytes = kBundleDataBytes;
  static constexpr u64 kCellsPerBuffer = kBundleBufferBytes / sizeof(Cell);

  FSCCL_FN static u32* epoch(Counters* c) { return &c->bundle_epoch; }
  FSCCL_FN static Cell* buffers(char* arena) {
    return reinterpret_cast<Cell*>(arena + kBundleBuffersOffset);
  }
  FSCCL_FN static u32 source_index(int owner, int source) {
    return static_cast<u32>(source - (source > owner ? 1 : 0));
  }

  FSCCL_FN static u32 word_index(B& b, u32 w) {
    return b.thread() % kThreadsPerCell * kWordsPerThread + w;
  }
  FSCCL_FN static bool is_flag(u32 index) { return index % kLineWords == kLineWords - 1; }
  FSCCL_FN static int data_word(B& b, u32 w) {
    const u32 index = word_index(b, w);
    return is_flag(index) ? -1 : static_cast<int>(index - index / kLineWords);
  }
  FSCCL_FN static void send(B& b, Cell* to, const u64 (&data)[kWordsPerThread], u32 epoch) {
    Raw raw;
    FSCCL_UNROLL for (u32 w = 0; w < kWordsPerThread; ++w) {
      raw.word[w] = is_flag(word_index(b, w)) ? u64{epoch} : data[w];
    }
    b.write_bundle(to, raw);
  }
  FSCCL_FN static Raw receive(B& b, const Cell* from) { return b.read_bundle(from); }
  FSCCL_FN static bool unpack(B& b, const Raw& raw, u32 epoch, u64 (&data)[kWordsPerThread]) {
    bool all_arrived = true;
    FSCCL_UNROLL for (u32 w = 0; w < kWordsPerThread; ++w) {
      data[w] = raw.word[w];
      if (is_flag(word_index(b, w))) all_arrived = all_arrived && data[w] == epoch;
    }
    return all_arrived;
  }
  FSCCL_FN static u32 any(B& b, u32 bits) { return b.warp_or(bits); }
};

// The cell buffers of this channel on all ranks of the group, of which there are at most
// RankCapacity, during one operation. The threads of a cell make all calls together, with the same
// arguments except for `data`.
template <class CellKind, int RankCapacity, class B>
class CellBuffers {
 public:
  static constexpr u32 kWordsPerThread = CellKind::kWordsPerThread;
  using Cell = typename CellKind::Cell;

  FSCCL_FN CellBuffers(B& b, const KernelArgs& a)
      : b_(b),
        a_(a),
        epoch_(next_epoch(
            b.template load<u32>(reinterpret_cast<const char*>(CellKind::epoch(counters(b, a)))))) {
    constexpr u32 kClearInterval = (1u << 30) - 1;
    if ((epoch_ & kClearInterval) <= 1) clear();
  }

  FSCCL_FN bool gave_up_before() const { return PeerWait<B>::gave_up_before(b_, a_); }

  // Sends this thread's words of cell number `slot` of the buffer to a peer.
  FSCCL_FN void send(int peer, u32 slot, const u64 (&data)[kWordsPerThread]) {
    CellKind::send(
        b_,
        buffer(peer, epoch_) + CellKind::source_index(peer, a_.rank) * a_.cells_per_source + slot,
        data, epoch_);
  }

  FSCCL_FN void send_to_peers(u32 slot, const u64 (&data)[kWordsPerThread]) {
    for (int k = 1; k < a_.ranks; ++k) send(peer_rank(a_, k), slot, data);
  }

  // Receives cell number `slot` of each rank whose bit is set in `sources`, after loading all of
  // them. Returns false if waiting was given up: then this thread must not store or send.
  FSCCL_FN bool receive(u32 slot, u32 sources, u64 (&data)[RankCapacity][kWordsPerThread]) {
    const Cell* const own_cells = buffer(a_.rank, epoch_) + slot;
    const auto find_missing = [&] {
      typename CellKind::Raw raw[RankCapacity];
      FSCCL_UNROLL for (int p = 0; p < RankCapacity; ++p) {
        if (sources >> p & 1)
          raw[p] = CellKind::receive(
              b_, own_cells + CellKind::source_index(a_.rank, p) * a_.cells_per_source);
      }
      u32 missing_ranks = 0;
      FSCCL_UNROLL for (int p = 0; p < RankCapacity; ++p) {
        if ((sources >> p & 1) && !CellKind::unpack(b_, raw[p], epoch_, data[p])) {
          missing_ranks |= 1u << p;
        }
      }
      return CellKind::any(b_, missing_ranks);
    };
    const auto agree = [&](bool gives_up) { return CellKind::any(b_, gives_up) != 0; };
    return peer_wait_.wait(b_, a_, find_missing, agree);
  }

  // Bits of all ranks but this one.
  FSCCL_FN u32 peer_mask() const { return ((1u << a_.ranks) - 1) & ~(1u << a_.rank); }

  // Ends the operation: stores its epoch, or that the channel has given up.
  FSCCL_FN void finish() {
    if (b_.any(peer_wait_.gave_up())) return PeerWait<B>::mark_given_up(b_, a_);
    if (b_.thread() == 0) {
      b_.store(reinterpret_cast<char*>(CellKind::epoch(counters(b_, a_))), epoch_);
    }
  }

 private:
  FSCCL_FN Cell* buffer(int owner, u32 epoch) const {
    return CellKind::buffers(a_.arena[owner]) +
           (b_.channel() * 2 + (epoch & 1)) * CellKind::kCellsPerBuffer;
  }

  // Clears this rank's buffer of the next epoch.
  FSCCL_FN void clear() {
    auto* const packets = reinterpret_cast<Packet*>(buffer(a_.rank, epoch_ + 1));
    constexpr u32 kCount = CellKind::kCellsPerBuffer * sizeof(Cell) / sizeof(Packet);
    for (u32 i = b_.thread(); i < kCount; i += b_.threads()) b_.send(packets + i, 0, 0);
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
