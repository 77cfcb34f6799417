// A thread of a CUDA block: the template argument `B` of the kernels, whose interface
// block_primitives.h describes. Includes no CUDA header, so that NVRTC can compile it.
#pragma once

#include "block_primitives.h"

namespace fsccl {
namespace nvlink {

class CudaBlock {
 public:
  static constexpr u32 kWarp = 32;

  FSCCL_FN u32 thread() const { return threadIdx.x; }
  FSCCL_FN u32 threads() const { return blockDim.x; }
  FSCCL_FN u32 channel() const { return blockIdx.x; }
  FSCCL_FN u32 channels() const { return gridDim.x; }
  // Waits until the stream's previous kernel has ended (a kernel that is launched early, see
  // device.h, begins before that), and then lets the next kernel begin, which waits here in turn.
  FSCCL_FN void wait_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  }
  FSCCL_FN void sync() { __syncthreads(); }
  FSCCL_FN bool any(bool condition) { return __syncthreads_or(condition); }
  FSCCL_FN void fence() { __threadfence_system(); }
  FSCCL_FN void pause() {}

  template <class W>
  FSCCL_FN W load(const char* from) const {
    return *reinterpret_cast<const W*>(from);
  }
  template <class W>
  FSCCL_FN void store(char* to, const W& value) {
    *reinterpret_cast<W*>(to) = value;
  }

  // Release and acquire at system scope. Writes of other threads of the block before a barrier of
  // the block are released, too, and after the next barrier all threads see the data that one has
  // acquired.
  FSCCL_FN void post_flag(u32* flag, u32 step) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(step) : "memory");
  }
  FSCCL_FN u32 load_flag(const u32* flag) {
    u32 step;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(step) : "l"(flag) : "memory");
    return step;
  }

  // One instruction. Each of the two words is single-copy atomic, the pair need not be.
  FSCCL_FN void send(Packet* to, u64 low, u64 high) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high)
                 : "memory");
  }
  FSCCL_FN void receive(const Packet* from, u64* low, u64* high) {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(*low), "=l"(*high)
                 : "l"(from)
                 : "memory");
  }

  // A thread's 16 bytes of a bundle. A line becomes visible as a whole only if all threads of a
  // warp access it by one instruction, so they synchronize before it.
  struct Share {
    u64 word[2];
  };
  FSCCL_FN void write_bundle(Bundle* to, const Share& share) {
    __syncwarp();
    send(reinterpret_cast<Packet*>(to) + thread() % kWarp, share.word[0], share.word[1]);
  }
  FSCCL_FN Share read_bundle(const Bundle* from) {
    __syncwarp();
    Share share;
    receive(reinterpret_cast<const Packet*>(from) + thread() % kWarp, &share.word[0],
            &share.word[1]);
    return share;
  }
  FSCCL_FN u32 warp_or(u32 bits) { return __reduce_or_sync(~0u, bits); }

  FSCCL_FN u32 load_host(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
  }
  FSCCL_FN void store_host(u32* word, u32 value) {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }
  FSCCL_FN u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
};

}  // namespace nvlink
}  // namespace fsccl
