// NVLink engine: collectives of GPUs of one host that access each other's memory over NVLink, each
// as one kernel. Used by csrc/torch and csrc/device.
//
// One Engine serves all groups of a process on one GPU. It has a heap that peers map once. A new
// group takes an arena of the heap (kernel_args.h) and exchanges one PeerInfo with its peers, so
// creating a group usually allocates nothing. Nothing here communicates with peers except kernels:
// the caller exchanges the strings below.
//
//   Communicator c(engine, rank, size, timeout_ns);
//   c.connect(peer_infos);      // every rank's c.peer_info(), in the order of ranks
//   if (!c.run(call)) ...       // use another library, which is faster at this size
//
// run() launches one kernel and may be captured into a CUDA graph. It allocates nothing, and
// records an event only if the stream is not that of the previous call.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "kernel_plan.h"

namespace fsccl {
namespace nvlink {

// Arguments of a collective, of which all ranks pass the same except for pointers and stream. A
// part is the data for or from one rank; all_reduce and broadcast have one part. For an operation
// in place, `in` points to the data of this rank in `out`.
struct Call {
  Collective collective = Collective::kAllReduce;
  const void* in = nullptr;
  void* out = nullptr;
  u64 bytes = 0;        // of a part
  Reduction reduction;  // of all_reduce and reduce_scatter
  int root = 0;         // of broadcast
  Stream stream = nullptr;
  u64 timeout_ns = 0;  // how long its kernel waits for a peer; 0: the group's timeout
};

// The heap, kernels and tables of one GPU in this process. Any thread may call.
class Engine {
 public:
  struct Options {
    // Bytes of a slot (a staging buffer); a group has 64 channels of 4 slots (kernel_args.h). The
    // first groups have slots of this size, later ones of half of it: programs create many groups,
    // and few of them transfer much. The default is a little more than a power of two, because
    // messages are often powers of two, and the third or seventh of a slot that a peer gets is
    // rounded down.
    u64 slot_bytes = 65 << 10;
    u32 max_blocks = kChannels;  // of a kernel's grid; a group takes the minimum of its ranks
    u32 initial_arenas = 8, arenas_per_growth = 4;  // allocated at once
    // Tuning tables by number of ranks; defaults if there is none. A group uses its rank 0's table.
    std::map<int, TuningTable> tables;
  };
  Engine(std::unique_ptr<Device> device, Options options);

  // Returns the engine of the GPU with this number in the process, or null if none was installed.
  static Engine* find(int device);
  static void install(int device, std::unique_ptr<Engine> engine);
  // find(), but if no engine is installed, calls the function of set_installer() first, whose
  // exceptions propagate. Returns null if there is no such function.
  static Engine* find_or_install(int device);
  // Identity of the GPU, independent of its number in the process.
  std::string identity() { return device_->identity(); }
  // Sets the function that find_or_install() calls; null: none.
  static void set_installer(std::function<void(int device)> install);

 private:
  friend class Communicator;
  static constexpr u64 kFlagBytesPerGroup = 128;  // a cache line
  static constexpr u64 kFlagBytesPerAllocation = 32 * kFlagBytesPerGroup;

  struct Arena {
    char* memory;
    u64 slot_bytes;
    bool needs_clearing;  // used by an earlier group
    Stream last_stream;   // of that group
  };

  Arena acquire_arena();
  Arena take_free_arena();
  void release_arena(const Arena& arena);
  HostFlags* take_host_flags();
  Function find_kernel(const std::string& name);

  const std::unique_ptr<Device> device_;
  const Options options_;
  std::mutex mutex_;
  std::vector<Arena> free_arenas_;
  bool has_grown_ = false;
  char* flag_memory_ = nullptr;  // of the next groups
  u64 flag_bytes_left_ = 0;
  std::unordered_map<std::string, Function> functions_;
};

// This rank's member of a group. One thread at a time may call, and all ranks make the same calls
// in the same order. Methods throw Error.
class Communicator {
 public:
  // `timeout_ns`: how long a kernel waits for a peer; 0: without a timeout.
  Communicator(Engine& engine, int rank, int size, u64 timeout_ns);
  // Arenas that the caller (csrc/device) lends to the group, for ranks whose GPUs cannot access
  // each other's memory: zeroed memory that all GPUs can access, such as pinned host memory, which
  // must outlive the group. `arenas` are the addresses by rank on this rank's GPU; `slot_bytes` as
  // in Options.
  struct BorrowedArenas {
    std::vector<char*> arenas;
    u32 channels;  // of each arena, and the largest number of blocks of a kernel
    u64 slot_bytes;
    static constexpr u64 kSlotsOffset = kPacketBuffersOffset;
    static u64 arena_bytes(u32 channels, u64 slot_bytes) {
      return kSlotsOffset + channels * kSlotsPerChannel * slot_bytes;
    }
  };
  // Creates a connected communicator, which uses only the algorithm `staged`: over a bus, the
  // transfer takes longer than the flags.
  Communicator(Engine& engine, int rank, u64 timeout_ns, const BorrowedArenas& borrowed);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Returns the information about this rank for connect() of all ranks, as binary data.
  std::string peer_info() const;
  // Maps the peers' arenas. Throws if a peer cannot be reached or runs another version. That may
  // happen on some ranks only, so before any rank calls run(), the caller must check that all have
  // connected.
  void connect(const std::vector<std::string>& peer_infos);
  // Names of the ranks in errors, in order.
  void set_rank_names(std::vector<std::string> names) { rank_names_ = std::move(names); }

  // Registers memory, which peers then read and write directly: connect_memory() takes the
  // memory_handle() of all ranks. All ranks register in the same order, and later call run() with
  // memory at the same offset in it. The memory must begin at a multiple of 16 bytes, and stay
  // allocated until every rank has disconnected it.
  std::string memory_handle(const void* address, u64 bytes) const;
  void connect_memory(const void* address, u64 bytes, const std::vector<std::string>& handles);
  // To be called only after operations on the memory have ended on all streams.
  void disconnect_memory(const void* address);

  // Returns whether run() would launch a kernel for the call.
  bool supports(const Call& call);
  // Launches the operation's kernel on the call's stream. Returns false, on all ranks, if by the
  // tuning table another library should run it. `forced_shape` overrides the table; then false
  // means that the shape does not support the operation.
  bool run(const Call& call, const KernelShape* forced_shape = nullptr);
  // Algorithm of the last operation that run() launched.
  Algorithm last_algorithm() const { return last_algorithm_; }

  // Returns the error after which no operation can run: a rank did not come in time, or abort() was
  // called. Results that kernels have written since are invalid. Any thread may call this method
  // and the following ones.
  std::optional<Error> failure() const;
  // Returns whether a kernel has waited for more than 10 ms since the last call of this method.
  bool has_waited_long();
  // Returns whether all kernels that run() launched have ended, or true if that cannot be queried.
  bool idle();
  // Makes all kernels of this rank stop waiting, now and later.
  void abort();

 private:
  struct PreparedKernel {
    Function function = nullptr;
    u32 blocks = 0, threads = 0;
    Algorithm algorithm = Algorithm::kOther;
  };
  Communicator(Engine& engine, int rank, int size, const Engine::Arena& arena, bool borrowed,
               u64 timeout_ns);
  static Engine::Arena arena_for(Engine& engine, int size);

  struct RegisteredMemory {
    const char* begin;
    u64 bytes;
    char* rank_address[kMaxRanks];
    std::vector<std::string> imported_handles;
  };

  // Returns the kernel for the call, from a cache; its function is null if another library should
  // run it.
  const PreparedKernel& prepare_kernel(const Call& call, bool registered,
                                       const KernelShape* forced_shape);
  const RegisteredMemory* find_registered(const Call& call) const;
  bool can_launch_early(const PreparedKernel& launch) const;

  Engine& engine_;
  const int rank_, size_;
  const bool has_borrowed_arenas_;  // the arenas are the caller's
  const Engine::Arena arena_;
  HostFlags* const host_flags_;
  std::atomic<bool> aborted_{false};
  std::atomic<u64> timeout_ns_;  // of the last operation
  std::vector<std::string> rank_names_;
  KernelArgs base_args_{};
  TuningTable table_;
  u32 max_blocks_ = kChannels;
  std::mutex mutex_;
  bool connected_ = false, has_launched_ = false, shares_gpu_ = false;
  std::atomic<Algorithm> last_algorithm_{Algorithm::kOther};
  Stream last_stream_ = nullptr;
  std::unordered_map<u64, PreparedKernel> prepared_kernels_;
  PreparedKernel forced_kernel_;
  std::vector<RegisteredMemory> registered_memory_;
};

}  // namespace nvlink
}  // namespace fsccl
