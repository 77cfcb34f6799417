// Collectives of GPUs that reach each other's memory: what csrc/torch calls.
//
// One Engine serves all groups of a process and device. It has a heap that peers map once; a new
// group takes an arena of it (args.h) and exchanges one card with its peers, so that making a group
// allocates nothing and costs one look at the store. Nothing here talks to peers: the caller
// carries the cards.
//
//   Communicator c(engine, rank, size, timeout);
//   c.connect(cards of all ranks, in order);   // everyone's c.card()
//   if (!c.run(call)) ...                      // not worth it at this size: use another library
//
// run() is made of launching one kernel: nothing is allocated, no event is recorded unless the
// stream is another one than last time, and it may be captured into a graph.
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
#include "plan.h"

namespace fsccl {
namespace nvlink {

// What every rank of a call agrees on, and its own memory. A part is what goes to or comes from one
// rank; all_reduce and broadcast have one part. `in` may be where its result goes in `out`.
struct Call {
  Collective collective = Collective::kAllReduce;
  const void* in = nullptr;
  void* out = nullptr;
  u64 bytes = 0;        // of a part
  Reduction reduction;  // of all_reduce and reduce_scatter
  int root = 0;         // of broadcast
  Stream stream = nullptr;
  u64 timeout_ns = 0;   // how long its kernel waits for a peer; 0: as long as the group says
};

class Engine {
 public:
  struct Options {
    // Of a channel; a group has 64 channels of 4 slots. The first groups have these, later ones
    // half as much: programs make many groups, and few of them move much. A little more than a
    // power of two: messages are powers of two, and a third or a seventh of a slot is rounded down.
    u64 slot_bytes = 65 << 10;
    u32 most_blocks = kChannels;  // of a kernel; a group takes what its ranks all allow
    u32 arenas_at_first = 8, arenas_later = 4;  // by so many the heap grows
    std::map<int, Table> tables;   // by ranks of a group; rank 0's decides; none: first guesses
  };
  Engine(std::unique_ptr<Device> device, Options options);

  // The engine of a device of this process, if one was installed. Safe to call by any thread.
  static Engine* installed(int device);
  static void install(int device, std::unique_ptr<Engine> engine);
  // As installed(), but installs the engine first, by what on_demand() was given, and throws what
  // that throws; null if nothing was given.
  static Engine* of(int device);
  // Which GPU it works on, whatever number the process knows it by.
  std::string identity() { return device_->identity(); }
  static void on_demand(std::function<void(int device)> install);

 private:
  friend class Communicator;
  static constexpr u64 kWordsOfGroup = 128;  // bytes: a line of the cache each
  static constexpr u64 kWordsAtOnce = 32 * kWordsOfGroup;

  struct Arena {
    char* at;
    u64 slot_bytes;
    bool used;
    Stream last;  // on which its last group ran, if it was used
  };

  Arena take_arena();
  Arena choose_arena();
  void give_arena(const Arena& arena);
  HostWords* take_words();
  Function function(const std::string& name);

  const std::unique_ptr<Device> device_;
  const Options options_;
  std::mutex mutex_;
  std::vector<Arena> free_;
  bool grown_ = false;
  char* words_ = nullptr;
  u64 words_left_ = 0;
  std::unordered_map<std::string, Function> functions_;
};

// One rank's part of a group. Calls are made by one thread at a time, in the same order on all
// ranks. All errors are of class Error.
class Communicator {
 public:
  // `timeout_ns`: how long a kernel waits for a peer; 0: for ever.
  Communicator(Engine& engine, int rank, int size, u64 timeout_ns);
  // Memory for ranks whose GPUs do not reach each other: zeroed arenas in memory that all of them
  // reach, as this rank's GPU sees them, which must outlive the group. `slot_bytes` as in Options.
  struct Lent {
    std::vector<char*> arenas;
    u32 channels;
    u64 slot_bytes;
    static constexpr u64 kSlots = kBoxes;
    static u64 arena_bytes(u32 channels, u64 slot_bytes) {
      return kSlots + channels * kDepth * slot_bytes;
    }
  };
  // It is connected, and its operations are `staged`: a bus takes longer than their flags do.
  Communicator(Engine& engine, int rank, u64 timeout_ns, const Lent& lent);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  std::string card() const;
  // Maps the peers' arenas. Throws if they cannot be reached or disagree; ranks may differ in that,
  // so the caller lets them agree on whether all have connected before anyone calls run().
  void connect(const std::vector<std::string>& cards);
  // What failures call the ranks, in order.
  void call_ranks(std::vector<std::string> names) { names_ = std::move(names); }

  // Registers memory, which is then read and written by peers directly: connect again, with the
  // cards of memory. All ranks register in one order, and later call with memory at one offset in
  // it. It must stay allocated until every rank has forgotten it, and begin at a multiple of 16.
  std::string memory_card(const void* at, u64 bytes) const;
  void connect_memory(const void* at, u64 bytes, const std::vector<std::string>& cards);
  // Once what was put on streams with it is over.
  void forget_memory(const void* at);

  // Whether run() would put it on the stream, by the table.
  bool takes(const Call& call);
  // Puts the operation on the stream, or says that another library should do it: all ranks get the
  // same answer. `forced` overrules the table; then false means that the shape cannot do it.
  bool run(const Call& call, const Shape* forced = nullptr);
  // Of the last operation that run() put on a stream.
  Algorithm last_algorithm() const { return last_algorithm_; }

  // Why nothing can be run any more: a rank did not come in time, or abort(). What kernels have
  // written since is worth nothing. Any thread may call this and what follows.
  std::optional<Error> failure() const;
  // Whether a kernel has waited for long since this was last asked.
  bool waited();
  // Whether all that run() put on a stream is over, as far as can be told.
  bool idle();
  // Ends all waiting, now and later.
  void abort();

 private:
  struct Launch {
    Function function = nullptr;
    u32 blocks = 0, threads = 0;
    Algorithm algorithm = Algorithm::kOther;
  };
  Communicator(Engine& engine, int rank, int size, const Engine::Arena& arena, bool lent,
               u64 timeout_ns);
  static Engine::Arena arena_for(Engine& engine, int size);

  struct Registered {
    const char* begin;
    u64 bytes;
    char* peer[kMaxRanks];
    std::vector<std::string> opened;  // as peers share it
  };

  const Launch& prepare(const Call& call, bool registered, const Shape* forced);
  const Registered* registered(const Call& call) const;
  bool early(const Launch& launch) const;

  Engine& engine_;
  const int rank_, size_;
  const bool lent_;  // the arenas are the caller's
  const Engine::Arena arena_;
  HostWords* const words_;
  std::atomic<bool> aborted_{false};
  std::atomic<u64> limit_ns_;  // of the last operation
  std::vector<std::string> names_;
  Args template_{};
  Table table_;
  u32 most_blocks_ = kChannels;
  std::mutex mutex_;
  bool connected_ = false, ran_ = false, shares_gpu_ = false;
  std::atomic<Algorithm> last_algorithm_{Algorithm::kOther};
  Stream last_stream_ = nullptr;
  std::unordered_map<u64, Launch> launches_;
  Launch forced_;
  std::vector<Registered> memory_;
};

}  // namespace nvlink
}  // namespace fsccl
