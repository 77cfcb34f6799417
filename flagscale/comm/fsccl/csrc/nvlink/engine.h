// Collectives of GPUs that reach each other's memory, for csrc/torch and csrc/device.
//
// One Engine serves all groups of a process and device. It has a heap that peers map once; a new
// group takes an arena of it (kernel_args.h) and exchanges one PeerInfo with its peers, so that
// making a group allocates nothing and costs one exchange at the store. Nothing here talks to
// peers: the caller carries the texts.
//
//   Communicator c(engine, rank, size, timeout);
//   c.connect(texts of all ranks, in order);   // every rank's c.peer_info()
//   if (!c.run(call)) ...                      // another library is faster at this size
//
// run() launches one kernel: nothing is allocated, no event is recorded unless the stream is
// another one than last time, and it may be captured into a graph.
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

// A collective: what all ranks agree on, and this rank's memory. A part is the data that goes to or
// comes from one rank; all_reduce and broadcast have one part. `in` may be the place of its result
// in `out`.
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
    // Bytes of a slot; a group has 64 channels of 4 slots. The first groups have slots of this
    // size, later ones of half of it: programs make many groups, and few of them move much. The
    // default is a little more than a power of two: messages are powers of two, and a third or a
    // seventh of a slot is rounded down.
    u64 slot_bytes = 65 << 10;
    u32 max_blocks = kChannels;  // of a kernel; a group takes the minimum of its ranks
    u32 initial_arenas = 8, arenas_per_growth = 4;  // allocated at once
    std::map<int, TuningTable> tables;  // by size of a group; rank 0's counts; none: defaults
  };
  Engine(std::unique_ptr<Device> device, Options options);

  // Returns the engine of a device of this process, null if none was installed. Any thread may
  // call.
  static Engine* find(int device);
  static void install(int device, std::unique_ptr<Engine> engine);
  // As find(), but installs the engine first, by the function of set_installer(), and throws what
  // that throws; null if there is no such function.
  static Engine* find_or_install(int device);
  // Identity of the GPU, independent of its number in the process.
  std::string identity() { return device_->identity(); }
  // The function that find_or_install() calls; null: none.
  static void set_installer(std::function<void(int device)> install);

 private:
  friend class Communicator;
  static constexpr u64 kFlagBytesPerGroup = 128;  // bytes: a cache line each
  static constexpr u64 kFlagBytesPerAllocation = 32 * kFlagBytesPerGroup;

  struct Arena {
    char* memory;
    u64 slot_bytes;
    bool used;           // by an earlier group
    Stream last_stream;  // of that group
  };

  Arena acquire_arena();
  Arena take_free_arena();
  void release_arena(const Arena& arena);
  HostFlags* take_host_flags();
  Function find_kernel(const std::string& name);

  const std::unique_ptr<Device> device_;
  const Options options_;
  std::mutex mutex_;
  std::vector<Arena> free_;
  bool grown_ = false;
  char* flag_memory_ = nullptr;  // of the next groups
  u64 flag_bytes_left_ = 0;
  std::unordered_map<std::string, Function> functions_;
};

// One rank of a group. Calls are made by one thread at a time, in the same order on all ranks. All
// errors are of class Error.
class Communicator {
 public:
  // `timeout_ns`: how long a kernel waits for a peer; 0: without a timeout.
  Communicator(Engine& engine, int rank, int size, u64 timeout_ns);
  // Memory for ranks whose GPUs do not reach each other: zeroed arenas in memory that all of them
  // reach, at the addresses of this rank's GPU, which must outlive the group. `slot_bytes` as in
  // Options.
  struct BorrowedArenas {
    std::vector<char*> arenas;
    u32 channels;
    u64 slot_bytes;
    static constexpr u64 kSlots = kBoxes;
    static u64 arena_bytes(u32 channels, u64 slot_bytes) {
      return kSlots + channels * kDepth * slot_bytes;
    }
  };
  // Makes a connected communicator whose operations are `staged`: on a bus, the transfer takes
  // longer than the flags.
  Communicator(Engine& engine, int rank, u64 timeout_ns, const BorrowedArenas& borrowed);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  std::string peer_info() const;
  // Maps the peers' arenas. Throws if they cannot be reached or disagree. Ranks may differ in that,
  // so the caller makes them agree on whether all have connected before any calls run().
  void connect(const std::vector<std::string>& texts);
  // Names of the ranks in errors, in order.
  void set_rank_names(std::vector<std::string> names) { names_ = std::move(names); }

  // Registers memory, which peers then read and write directly: connect_memory() takes all ranks'
  // memory_handle(). All ranks register in one order, and later call with memory at one offset in
  // it. The memory must stay allocated until every rank has disconnected it, and begin at a
  // multiple of 16.
  std::string memory_handle(const void* at, u64 bytes) const;
  void connect_memory(const void* at, u64 bytes, const std::vector<std::string>& handles);
  // Called when operations with the memory that were put on streams are over.
  void disconnect_memory(const void* at);

  // Returns whether run() would put the call on the stream, by the table.
  bool supports(const Call& call);
  // Puts the operation on the stream; false if another library should do it: all ranks get the same
  // answer. `forced` overrules the table; then false means that the shape cannot do it.
  bool run(const Call& call, const KernelShape* forced = nullptr);
  // Algorithm of the last operation that run() put on a stream.
  Algorithm last_algorithm() const { return last_algorithm_; }

  // The error after which nothing can be run: a rank did not come in time, or abort(). Results that
  // kernels have written since are worth nothing. Any thread may call this method and the following
  // ones.
  std::optional<Error> failure() const;
  // Returns whether a kernel has waited for long since the last call.
  bool has_waited_long();
  // Returns whether all that run() put on a stream is over, as far as that is known.
  bool idle();
  // Ends all waiting, now and later.
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
    char* peer[kMaxRanks];
    std::vector<std::string> imported;  // handles of peers
  };

  const PreparedKernel& prepare_kernel(const Call& call, bool registered,
                                       const KernelShape* forced);
  const RegisteredMemory* find_registered(const Call& call) const;
  bool can_launch_early(const PreparedKernel& launch) const;

  Engine& engine_;
  const int rank_, size_;
  const bool borrowed_;  // the arenas are the caller's
  const Engine::Arena arena_;
  HostFlags* const host_flags_;
  std::atomic<bool> aborted_{false};
  std::atomic<u64> timeout_ns_;  // of the last operation
  std::vector<std::string> names_;
  KernelArgs template_{};
  TuningTable table_;
  u32 max_blocks_ = kChannels;
  std::mutex mutex_;
  bool connected_ = false, ran_ = false, shares_gpu_ = false;
  std::atomic<Algorithm> last_algorithm_{Algorithm::kOther};
  Stream last_stream_ = nullptr;
  std::unordered_map<u64, PreparedKernel> prepared_;
  PreparedKernel forced_kernel_;
  std::vector<RegisteredMemory> memory_;
};

}  // namespace nvlink
}  // namespace fsccl
