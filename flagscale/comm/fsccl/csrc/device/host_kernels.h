// Small and medium operations among GPUs of one host by one kernel each: those of the NVLink
// engine, in host memory that every GPU writes and reads. The board, or pipes and the native
// library, take a dozen steps of the host's for the same, and each costs more than a small message
// takes to cross.
//
// Only among ranks that all have the NVLink engine's kernels, each on a GPU of its own: kernels of
// two processes take turns on a GPU and would wait for each other.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../core/segment.h"
#include "../nvlink/engine.h"
#include "tracks.h"

namespace fsccl {

class HostKernels {
 public:
  static size_t bytes(int ranks) { return static_cast<size_t>(ranks) * arena_bytes(); }

  // `segment`: bytes() of memory that all ranks have mapped.
  HostKernels(nvlink::Engine& engine, int rank, int ranks, Segment segment, Tracks& tracks)
      : segment_(std::move(segment)),
        adopted_(tracks.adopt(segment_.data(), segment_.bytes())),
        group_(engine, rank, 0, {arenas(ranks, tracks), kChannels, kSlotBytes}) {}

  // Whether there is a kernel for it, wherever its memory lies: all ranks get the same answer.
  bool takes(const nvlink::Call& call) { return group_.takes(call); }
  // Puts such an operation on its stream.
  void run(const nvlink::Call& call) { group_.run(call); }
  // What each of `ranks` writes at most, the bus being what it waits for: a measure of its time.
  static size_t written(const nvlink::Call& call, size_t ranks) {
    const size_t to_others = call.bytes * (ranks - 1);
    return call.collective == nvlink::Collective::kAllReduce ? 2 * to_others / ranks : to_others;
  }

  // Throws what a kernel has found out: a rank that did not come.
  void check() const {
    if (const auto why = group_.failure()) throw *why;
  }
  // Ends all waiting. Any thread.
  void abort() { group_.abort(); }

 private:
  // As much as keeps a GPU's bus busy, which is little beside its own memory.
  static constexpr nvlink::u32 kChannels = 32;
  static constexpr nvlink::u64 kSlotBytes = 16 << 10;

  static size_t arena_bytes() {
    return nvlink::Communicator::Lent::arena_bytes(kChannels, kSlotBytes);
  }

  std::vector<char*> arenas(int ranks, const Tracks& tracks) const {
    std::vector<char*> out;
    for (size_t p = 0; p < static_cast<size_t>(ranks); ++p) {
      out.push_back(tracks.seen_by_device(segment_.data() + p * arena_bytes()));
    }
    return out;
  }

  Segment segment_;
  std::shared_ptr<void> adopted_;
  nvlink::Communicator group_;
};

}  // namespace fsccl
