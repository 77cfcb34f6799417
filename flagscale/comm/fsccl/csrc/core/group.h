// A group of ranks and its collectives: the public interface of the core.
//
// The constructor publishes the identity of this rank and does not wait for other ranks. The first
// point-to-point message needs the identities of all ranks, the first collective also the shared
// segment of the node. Both are exchanged through the Rendezvous (rendezvous.h).
//
// Collectives block. All ranks call them in the same order, from one thread at a time. send() and
// recv() may be called by any thread. The first error of any kind, except invalid arguments, fails
// the group permanently: it is sent to all ranks, and every later call on any rank throws it again,
// with the same message, which names the rank at fault (record_error()).
//
// A forked child has copies of its parent's memory and connections and must not use them. All calls
// in it throw, and its shutdown() and destructor leave them alone.
//
// group.cpp contains the setup, group_failure.cpp failure and shutdown, collectives.cpp the choice
// of algorithms, datagram/group_bounded_all_reduce.cpp the setup of the bounded all_reduce.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives.h"
#include "hierarchical.h"
#include "pipeline.h"
#include "rendezvous.h"
#include "transport.h"
#include "settings.h"

namespace fsccl {

namespace datagram {
class Socket;
class BoundedAllReduce;
}  // namespace datagram

// Parameters of a Group on one rank. `size` and the settings in Settings::agreed_settings() are
// equal on all ranks.
struct GroupConfig {
  int rank = 0;
  int size = 1;
  std::string name = "group";
  std::vector<int> global_ranks;  // ranks in the whole job; empty: the same as in the group
  Settings settings;
  NativeLibrary native;             // native library of the device of this rank
  std::shared_ptr<Device> network;  // null: Device::of_this_process(settings)
};

// One rank's end of a group.
class Group final : public Collectives {
 public:
  Group(std::unique_ptr<Store> store, GroupConfig config);
  ~Group();

  int rank() const { return config_.rank; }
  int size() const { return config_.size; }

  // As declared in Collectives. `bucket` is the address that identifies the bucket for error
  // feedback (datagram/error_feedback.h), if `in` is a copy of the bucket; null: `in`.
  void all_reduce(const void* in, void* out, size_t count, const Reduction& r, const Deadline& d,
                  const void* bucket);
  void all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                  const Deadline& d) override {
    all_reduce(in, out, count, r, d, nullptr);
  }
  void reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
              const Deadline& d) override;
  void reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                      const Deadline& d) override;
  // `width` is the element size in bytes, the unit in which pipelined schedules count.
  void all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                  size_t width = 1) override;
  void broadcast(const BufferList& buffer, int root, const Deadline& d) override;
  void gather(const BufferList& in, const BufferLists& out, int root, const Deadline& d) override;
  void scatter(const BufferLists& in, const BufferList& out, int root, const Deadline& d) override;
  // Ranks need to know only their own sizes.
  void all_to_all(const BufferLists& send, const BufferLists& recv, const Deadline& d) override;
  void barrier(const Deadline& d) override;
  // Barrier by messages to rank 0 and back. If it times out, the error names every rank that did
  // not arrive.
  void monitored_barrier(const Deadline& d);

  static constexpr int kAnySource = Transport::kAnySource;
  // Start a send or a receive. The deadline is that of the exchange of identities; wait() has its
  // own.
  RequestPtr send(int peer, uint64_t tag, const BufferList& memory, const Deadline& d,
                  const CollectiveFingerprint& fingerprint = {});
  RequestPtr recv(int peer, uint64_t tag, const BufferList& memory, const Deadline& d,
                  const CollectiveFingerprint& fingerprint = {});
  void wait(OpCode op, const RequestPtr& request, const Deadline& d);
  void notify(const RequestPtr& request, std::function<void()> callback) {
    transport().notify(request, std::move(callback));
  }

  // Fails the group, which ends waits on all ranks. Any thread may call.
  void abort(const std::string& error);
  // Leaves the group in an orderly way: data already sent still arrives. The destructor calls it,
  // too.
  void shutdown();
  // Returns the message of the error that has failed the group; empty if it has not failed.
  std::optional<std::string> failure() const;
  // Returns a number that changes while operations make progress. Any thread may call.
  uint64_t progress() const;
  // Description of the algorithm of the last operation. A device engine sets it, too.
  const char* last_algorithm() const { return last_algorithm_.load(std::memory_order_relaxed); }
  void set_last_algorithm(const char* algorithm) {  // `algorithm` must live as long as the group
    last_algorithm_.store(algorithm, std::memory_order_relaxed);
  }
  // Messages and bytes that this rank has sent to each rank; data in shared memory does not count.
  // Any thread may call.
  std::vector<Transport::Traffic> traffic() const;
  // The same for datagrams, including their headers. Any thread may call.
  std::vector<Transport::Traffic> datagram_traffic() const;
  // Returns whether this group can use the bounded all_reduce. The first call connects: all ranks
  // call it, as they call a collective.
  bool has_bounded_all_reduce(const Deadline& d);
  // Counters of the bounded all_reduce (datagram/bounded_all_reduce.h), by name; empty if there is
  // none.
  std::map<std::string, double> bounded_statistics() const;
  // Prints the text that make_text() returns, if FSCCL_DEBUG=INFO.
  template <class F>
  void log_debug(F make_text) const {
    if (config_.settings.debug) print(make_text());
  }
  // Returns the numbers of ranks per node, such as "2+2 ranks". Only after identities() or a
  // collective.
  std::string nodes_text();

  // All functions below are for DeviceEngine (csrc/device) and csrc/torch.

  const GroupConfig& config() const { return config_; }
  const std::vector<Identity>& identities(const Deadline& d);  // waits until all are known
  // Returns the name of the rank that the collective in progress waits for, empty if it is unknown.
  // Queries ranks of other nodes, until the deadline. Any thread may call.
  std::string awaited_rank_name(const Deadline& d);
  const std::string& name(int rank) const { return names_[static_cast<size_t>(rank)]; }
  void set_key(const std::string& key, const std::string& value) {
    rendezvous_.store().set(key, value);
  }
  // Opens a segment that ranks of one host share. The first of `sharing_ranks` creates it and
  // reserves its first `reserved_bytes` bytes.
  Segment open_shared_segment(const std::string& segment_name,
                              const std::vector<int>& sharing_ranks, size_t bytes,
                              size_t reserved_bytes, const Deadline& d);
  // Waits until rank `expected_rank` has set the key, and returns its value.
  std::string wait_for_key(const std::string& key, int expected_rank, const Deadline& d);
  void throw_if_failed() const;  // throws the recorded error, if there is one
  // Throws Error(kAborted) in a child forked from the process that created the group.
  void check_not_forked() const;
  // As check_not_forked(), and throws Error(kAborted) after shutdown(). These errors do not fail
  // the group and are not reported to other ranks.
  void check_usable() const;
  bool is_forked_child() const;
  // As throw_if_failed(), and throws if a rank of this node has ended. Any thread may call.
  void check_peers() const;
  // Throws if a rank that shares no memory with this one yet has left the group, or its process, on
  // this host, has ended. Connects to the rank, so that it can tell, and does not wait for its
  // answer: a later call finds it.
  void check_presence(int rank);
  // Connects each rank to the next, so that an abort reaches every rank, even if no message has
  // connected it. Needed by ranks that wait in a native library, outside the core. All ranks call
  // it.
  void connect_abort_ring(const Deadline& d);
  // Fails the group, reports to all ranks, and throws `error` with the name of the operation.
  [[noreturn]] void fail(const char* operation, uint64_t sequence, const Error& error);
  // As fail(), for callers that do not need the exception.
  void fail_without_throw(const char* operation, uint64_t sequence, const Error& error);
  // Prints a warning at any level of FSCCL_DEBUG.
  void warn(const std::string& message) const { print(message); }

 private:
  void print(const std::string& message) const;
  template <class F>
  void collective(CollectiveFingerprint fingerprint, const Deadline& d, F&& body);
  void exchange_pairs(const CollectiveFingerprint& operation, const BufferLists& send,
                      const BufferLists& recv, const Deadline& d);
  void log_algorithm(const CollectiveFingerprint& fingerprint, const char* algorithm);

  void publish();
  enum class KeyPurpose : uint64_t { kGroup = 1, kFarewell = 2 };
  Key secret_key(const Key& published, KeyPurpose purpose) const;
  void exchange_identities(const Deadline& d);  // waits for the identities of all ranks
  void open_shared_memory(const Deadline& d);   // maps the segment of the node
  std::string poll_key(const std::string& key, int expected_rank, const Deadline& d);
  void wait_at_rendezvous(int expected_rank, const Deadline& d,
                          const std::function<bool()>& has_arrived);
  void poll_failure();  // throws a failure that a rank has reported through the store
  // As poll_failure(), now and then while this rank waits for one that has never connected.
  void poll_failure_of_silent_peers();
  void check_segment_owner(int owner) const;
  void check_has_not_left(int rank);
  bool is_same_host(int rank) const;
  Error refine_peer_loss(const Error& error);
  Error record_error(const Error& error);
  void register_group();
  void report_to_other_groups(const Error& error);
  void on_process_end(uint64_t process);
  std::optional<Error> recorded_error() const;
  // Calls body(). Fails the group if it throws.
  template <class F>
  auto run_or_fail(const char* operation, uint64_t sequence, F&& body) -> decltype(body());
  void check_rank(int rank, const char* role) const;
  Transport& transport() const;
  std::string describe_rank(int rank) const;
  static constexpr int kNobody = -1, kAnyAbsentRank = -2;  // values of awaited_at_rendezvous_
  bool spans_nodes() const { return nodes_.count() > 1; }
  bool use_pipeline(const CollectiveFingerprint& fingerprint);
  void all_reduce_exactly(const CollectiveFingerprint& fingerprint, const void* in, void* out,
                          size_t count, const Reduction& r);
  void open_bounded_all_reduce(const Deadline& d);
  size_t exchange_datagram_addresses(datagram::Socket* socket, const std::string& address,
                                     const Deadline& d);
  RequestBatch make_request_batch();
  int awaited_rank() const;
  void collect_barrier_reports(const CollectiveFingerprint& fingerprint, const Deadline& d);

  GroupConfig config_;
  Rendezvous rendezvous_;
  Identity identity_;
  std::vector<std::string> names_;
  RankPartition nodes_;
  std::vector<Identity> identities_;
  std::unique_ptr<datagram::BoundedAllReduce> bounded_all_reduce_;  // uses the transport's memory
  std::atomic<bool> bounded_all_reduce_open_{false};
  bool bounded_all_reduce_attempted_ = false;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<ShmSteps> shm_;
  std::unique_ptr<IntraNodeCollectives> intra_node_;
  std::unique_ptr<HierarchicalCollectives> hierarchical_;
  std::unique_ptr<Pipeline> pipeline_;  // null unless Settings::pipeline_k is set
  std::string pipeline_description_;    // name of its algorithm
  std::atomic<const char*> last_algorithm_{"none yet"};
  std::atomic<uint64_t> sequence_{0};  // number of collectives so far
  // Deadline of the collective in progress. Waits inside it may end a little earlier, so that there
  // is time to find the rank at fault.
  Deadline deadline_ = Deadline::after(Deadline::Ms(0));
  std::mutex identities_mutex_;
  std::atomic<bool> identities_known_{false}, shared_memory_open_{false};
  std::atomic<Deadline::Clock::time_point> next_failure_poll_{Deadline::Clock::time_point()};
  std::atomic<int> awaited_at_rendezvous_{kNobody};  // rank that wait_at_rendezvous() waits for
  mutable std::mutex recorded_error_mutex_;
  std::unique_ptr<Error> recorded_error_;
  std::atomic<bool> failed_{false}, shut_down_{false};
};

template <class F>
auto Group::run_or_fail(const char* operation, uint64_t sequence, F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& e) {
    fail(operation, sequence, e);
  } catch (const std::exception& e) {  // such as bad_alloc, or a lost store
    fail(operation, sequence,
         Error(Fault::kSystem, config_.rank,
               names_[static_cast<size_t>(config_.rank)] + ": " + e.what()));
  }
}

}  // namespace fsccl
