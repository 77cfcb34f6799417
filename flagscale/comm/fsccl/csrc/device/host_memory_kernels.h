// Small and medium operations among GPUs of one host by one kernel each: kernels of the NVLink
// engine, in host memory that every GPU reads and writes. The control block, or pipes and the
// native library, take a dozen steps of the host for the same, each of which costs more than a
// small message takes to cross.
//
// Only among ranks that all have the NVLink engine's kernels, each on a GPU of its own: kernels of
// two processes take turns on a GPU and would wait for each other.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../core/segment.h"
#include "../nvlink/engine.h"
#include "streams.h"

namespace fsccl {

class HostMemoryKernels {
 public:
  static size_t bytes(int ranks) { return static_cast<size_t>(ranks) * arena_bytes(); }

  // `segment`: bytes() of memory that all ranks have mapped.
  HostMemoryKernels(nvlink::Engine& engine, int rank, int ranks, Segment segment, Streams& streams)
      : segment_(std::move(segment)),
        registration_(streams.register_host_memory(segment_.data(), segment_.bytes())),
        communicator_(engine, rank, 0, {arenas(ranks, streams), kChannels, kSlotBytes}) {}

  // Returns whether there is a kernel for the call, wherever its memory lies: all ranks get the
  // same answer.
  bool supports(const nvlink::Call& call) { return communicator_.supports(call); }
  // Puts such a call on its stream.
  void run(const nvlink::Call& call) { communicator_.run(call); }
  // Bytes that each of `ranks` writes at most: a measure of the call's time, because the bus is the
  // bottleneck.
  static size_t written_bytes(const nvlink::Call& call, size_t ranks) {
    const size_t to_peers = call.bytes * (ranks - 1);
    return call.collective == nvlink::Collective::kAllReduce ? 2 * to_peers / ranks : to_peers;
  }

  // Throws the error of a kernel: a rank that did not come.
  void check() const {
    if (const auto error = communicator_.failure()) throw *error;
  }
  // Ends all waiting. Any thread.
  void abort() { communicator_.abort(); }

 private:
  // Enough to keep a GPU's bus busy, and little compared with the memory of a GPU.
  static constexpr nvlink::u32 kChannels = 32;
  static constexpr nvlink::u64 kSlotBytes = 16 << 10;

  static size_t arena_bytes() {
    return nvlink::Communicator::BorrowedArenas::arena_bytes(kChannels, kSlotBytes);
  }

  std::vector<char*> arenas(int ranks, const Streams& streams) const {
    std::vector<char*> out;
    for (size_t p = 0; p < static_cast<size_t>(ranks); ++p) {
      out.push_back(streams.device_address(segment_.data() + p * arena_bytes()));
    }
    return out;
  }

  Segment segment_;
  std::shared_ptr<void> registration_;
  nvlink::Communicator communicator_;
};

}  // namespace fsccl
