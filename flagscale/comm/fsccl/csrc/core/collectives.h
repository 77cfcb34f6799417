// Interface of the collectives of a group. Callers (csrc/torch) do not depend on how the data is
// transferred.
//
// Two classes implement it: Group (group.h) for host memory, DeviceEngine (device/engine.h) also
// for the memory of devices. Pointers are addresses in the memory that the implementation handles.
#pragma once

#include <cstddef>

#include "buffer_list.h"
#include "types.h"

namespace fsccl {

// Collective operations with the semantics of torch.distributed. All ranks call the same operations
// in the same order, from one thread at a time. `count` is in elements; a BufferList has its size
// in bytes. The input may be the same memory as the output. Lists have one entry per rank; entries
// may differ in size if all ranks agree on them. Every operation throws Error: kUsage for invalid
// arguments, any other fault after it has failed the group.
class Collectives {
 public:
  virtual void all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                          const Deadline& d) = 0;
  virtual void reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
                      const Deadline& d) = 0;
  virtual void reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                              const Deadline& d) = 0;
  // `width`: size of an element in bytes, the unit in which pipelined schedules count.
  virtual void all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                          size_t width) = 0;
  virtual void broadcast(const BufferList& buffer, int root, const Deadline& d) = 0;
  virtual void gather(const BufferList& in, const BufferLists& out, int root,
                      const Deadline& d) = 0;
  virtual void scatter(const BufferLists& in, const BufferList& out, int root,
                       const Deadline& d) = 0;
  // A rank passes only its own sizes, which need not be equal.
  virtual void all_to_all(const BufferLists& send, const BufferLists& recv, const Deadline& d) = 0;
  virtual void barrier(const Deadline& d) = 0;

 protected:
  ~Collectives() = default;  // objects are not deleted through this interface
};

}  // namespace fsccl
