// Bounded all_reduce: all_reduce of gradients over datagrams (UDP) in bounded time. Pieces of the
// gradients that are lost, or do not arrive before a deadline, are excluded: the result there is
// zero on all ranks. docs/design/bounded-all-reduce.md describes it.
//
// A bucket is the buffer of one all_reduce, such as a gradient bucket of DDP. A node is a set of
// ranks that share memory; all nodes must have equal numbers of ranks. The ranks with the same
// index in every node form a rail. The nodes sum the bucket in shared memory, each rail reduces an
// equal part of it over datagrams (session.h), and the nodes gather the result in shared memory.
// With one rank per node there is a single rail of all ranks.
//
// BoundedSettings limit the excluded share of a bucket. If more is excluded on any rail, the
// operation is repeated with the exact algorithm, or its result is zero on all ranks
// (`skip_above_limit`). All ranks have the same data for this decision.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "../core/intra_node.h"
#include "../core/settings.h"
#include "../core/topology.h"
#include "endpoint.h"
#include "error_feedback.h"
#include "rate_controller.h"

namespace fsccl::datagram {

// The bounded all_reduce of one group. The thread of the collectives calls, except where noted.
class BoundedAllReduce {
 public:
  // Dependencies, which its group owns. Everything outlives it except the transport; stop() is
  // called before that closes.
  struct Context {
    Transport& transport;
    ShmSteps& shm;
    IntraNodeCollectives& intra_node;
    const RankPartition& nodes;
    Key key;
    std::function<void()> check_failure;  // throws if the group has failed
    std::function<void(const std::string&)> warn;
  };
  using ExactAllReduce = std::function<void()>;

  // Returns whether the settings select the bounded all_reduce for an operation on `bytes` bytes.
  static bool is_eligible(const BoundedSettings& settings, const Reduction& r, size_t bytes);
  // Returns the reason why these nodes cannot use it, empty if they can.
  static std::string unsupported_reason(const RankPartition& nodes);
  // Returns the group ranks of this rank's rail.
  static std::vector<int> rail_of(const RankPartition& nodes);

  // `max_packet_bytes`: largest packet including its header, the same on all ranks.
  BoundedAllReduce(const BoundedSettings& settings, Context context, std::unique_ptr<Socket> socket,
                   size_t max_packet_bytes);

  // `bucket`: address by which error feedback identifies the bucket. `run_exact` executes the same
  // operation with the exact algorithm. Returns a description of the algorithm.
  const char* all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                         const void* bucket, const ExactAllReduce& run_exact);
  // Returns counters by name. Any thread may call.
  std::map<std::string, double> statistics();
  // Returns datagrams sent so far, by group rank. Any thread may call.
  std::map<int, Transport::Traffic> sent() { return endpoint_.sent(); }
  void stop() { endpoint_.stop(); }

 private:
  struct RailPart;  // the part of an operation's bucket that this rank's rail reduces

  const Outcome& run(const AllReduceJob& job);
  bool exceeds_limit(const Outcome& outcome);
  void count_outcome(const Outcome& outcome, Time elapsed);
  void store_result(const RailPart& rail_part, const Outcome& outcome, bool skip, void* out);
  const char* repeat_exactly(const Outcome& outcome, const ExactAllReduce& run_exact);

  const BoundedSettings settings_;
  Context context_;
  Endpoint endpoint_;
  RateController rate_controller_;
  ErrorFeedback error_feedback_;
  std::vector<std::byte> scratch_;
  std::mutex mutex_;  // guards the members below
  std::map<std::string, double> statistics_;
};

}  // namespace fsccl::datagram
