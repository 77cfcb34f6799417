// Tiny operations among GPUs of one host by one kernel each: the packets of nvlink/flagged.h, in
// host memory that every GPU writes and reads. A copy to the board and one from it, with a word to
// set and words to wait for, take several times as long as such a kernel.
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

class Packets {
 public:
  // These channels take as much as the board does by default, of up to eight ranks.
  static constexpr nvlink::u32 kChannels = 32;
  static size_t bytes(int ranks) { return static_cast<size_t>(ranks) * arena_bytes(); }

  // `segment`: bytes() of memory that all ranks have mapped.
  Packets(nvlink::Engine& engine, int rank, int ranks, Segment segment, Tracks& tracks)
      : segment_(std::move(segment)),
        adopted_(tracks.adopt(segment_.data(), segment_.bytes())),
        group_(engine, rank, 0, arenas(ranks, tracks), kChannels) {}

  // Whether there is a kernel for it, wherever its memory lies: all ranks get the same answer.
  bool takes(const nvlink::Call& call) { return group_.takes(call); }
  // Puts such an operation on its stream.
  void run(const nvlink::Call& call) { group_.run(call); }

  // Throws what a kernel has found out: a rank that did not come.
  void check() const {
    if (const auto why = group_.failure()) throw *why;
  }
  // Ends all waiting. Any thread.
  void abort() { group_.abort(); }

 private:
  static size_t arena_bytes() { return nvlink::Communicator::lent_bytes(kChannels); }

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
