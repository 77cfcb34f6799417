// Small and medium operations among GPUs of one host that have no NVLink between them, by one
// kernel each. The kernels are those of the NVLink engine (nvlink/engine.h), whose arenas are here
// in host memory that every GPU reads and writes. Without them, an operation takes a dozen steps of
// the host, each of which takes longer than the transfer of a small message.
//
// All ranks must have the NVLink engine's kernels, and each a GPU of its own: a GPU runs kernels of
// two processes in turns, so they would wait for each other for ever.
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

  // `segment` has bytes() of shared memory, which all ranks have mapped.
  HostMemoryKernels(nvlink::Engine& engine, int rank, int ranks, Segment segment, Streams& streams)
      : segment_(std::move(segment)),
        registration_(streams.register_host_memory(segment_.data(), segment_.bytes())),
        communicator_(engine, rank, 0, {arenas(ranks, streams), kChannels, kSlotBytes}) {}

  // Returns whether there is a kernel for the call. The result does not depend on the call's
  // pointers, so it is the same on all ranks.
  bool supports(const nvlink::Call& call) { return communicator_.supports(call); }
  // Launches the kernel of a supported call on the call's stream.
  void run(const nvlink::Call& call) { communicator_.run(call); }
  // Returns the bytes that each of `ranks` ranks writes at most. They determine the time of the
  // call, because the bus is the bottleneck.
  static size_t written_bytes(const nvlink::Call& call, size_t ranks) {
    const size_t to_peers = call.bytes * (ranks - 1);
    return call.collective == nvlink::Collective::kAllReduce ? 2 * to_peers / ranks : to_peers;
  }

  // Throws if a kernel has failed because a rank did not come.
  void check() const {
    if (const auto error = communicator_.failure()) throw *error;
  }
  // Makes all kernels stop waiting. Any thread may call.
  void abort() { communicator_.abort(); }

 private:
  // Enough to keep a GPU's bus busy.
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
