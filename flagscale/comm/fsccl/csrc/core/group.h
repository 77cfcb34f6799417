// A group of ranks and its collectives: the face of the core.
//
// Making a group publishes who this rank is and waits for nobody. The first point-to-point message
// needs the others' addresses, the first collective also the cluster's shared segment; both come
// through the Rendezvous (rendezvous.h).
//
// Collectives block, are called by all ranks in the same order, and by one thread at a time.
// send() and recv() may be called by any thread. The first error of any kind, once the arguments of
// a call have been looked at, fails the group for good: it is told to all ranks, and whatever they
// call later throws it again, naming the rank at fault, in the same words everywhere (conclude()).
//
// A forked child shares memory and connections with its parent, and may use neither: all that it
// calls is refused, and it leaves and ends without touching them.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hierarchy.h"
#include "pipeline.h"
#include "rendezvous.h"
#include "transport.h"
#include "settings.h"

namespace fsccl {

namespace datagram {
class Socket;
class Tail;
}  // namespace datagram

struct GroupConfig {
  int rank = 0;
  int size = 1;
  std::string name = "group";
  std::vector<int> global_ranks;  // empty: the group's own numbers
  Settings settings;
  Native native;  // what this rank tells the others of its device
  std::shared_ptr<Device> network;  // null: this process's own
};

class Group {
 public:
  Group(std::unique_ptr<Store> store, GroupConfig config);
  ~Group();

  int rank() const { return config_.rank; }
  int size() const { return config_.size; }

  // Sizes are in elements where there is a reduction, else in bytes inside BufferList. `in` may be
  // `out`. Lists have one entry a rank; entries may differ in size if all ranks agree on them.
  // `of`: whose memory it is, where `in` is a copy (datagram/feedback.h).
  void all_reduce(const void* in, void* out, size_t count, const Reduction& r, const Deadline& d,
                  const void* of = nullptr);
  void reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
              const Deadline& d);
  void reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                      const Deadline& d);
  // `width` is the size of an element, in which pipelined schedules count.
  void all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                  size_t width = 1);
  void broadcast(const BufferList& buffer, int root, const Deadline& d);
  void gather(const BufferList& in, const BufferLists& out, int root, const Deadline& d);
  void scatter(const BufferLists& in, const BufferList& out, int root, const Deadline& d);
  // Ranks need to know only their own sizes.
  void all_to_all(const BufferLists& send, const BufferLists& recv, const Deadline& d);
  void barrier(const Deadline& d);
  // By messages to rank 0 and back, so that the error names every rank that did not come.
  void monitored_barrier(const Deadline& d);

  static constexpr int kAnySource = Transport::kAnySource;
  // The deadline is for meeting the group, wait() has its own.
  RequestPtr send(int peer, uint64_t tag, const BufferList& memory, const Deadline& d,
                  const OpCard& card = {});
  RequestPtr recv(int peer, uint64_t tag, const BufferList& memory, const Deadline& d,
                  const OpCard& card = {});
  void wait(OpCode op, const RequestPtr& request, const Deadline& d);
  void notify(const RequestPtr& request, std::function<void()> then) {
    transport().notify(request, std::move(then));
  }

  // Fails the group: who waits, here or elsewhere, stops waiting. Any thread may call.
  void abort(const std::string& why);
  // Leaves in good order.
  void shutdown();
  std::optional<std::string> failure() const;
  // A number that changes while operations move. Any thread may call.
  uint64_t progress() const;
  // What the last operation took, in words; whoever does operations beside the core says it too.
  const char* last_algorithm() const { return last_algorithm_.load(std::memory_order_relaxed); }
  void took(const char* algorithm) {  // which must live as long as the group
    last_algorithm_.store(algorithm, std::memory_order_relaxed);
  }
  // What this rank has sent to each rank by messages: nothing to those beside it. Any thread.
  std::vector<Transport::Traffic> traffic() const;
  // And by datagrams, all of them, with their headers. Any thread.
  std::vector<Transport::Traffic> datagrams() const;
  // Whether all_reduces may go by datagrams here, if the settings ask for it. The first call
  // connects: all ranks come to it as to a collective.
  bool has_tail(const Deadline& d);
  // What all_reduces by datagrams have met (datagram/tail.h), by name; empty where there are none.
  std::map<std::string, double> tail_statistics() const;
  // Tells who has set FSCCL_DEBUG what words() makes, if anyone has.
  template <class F>
  void say(F words) const {
    if (config_.settings.debug) print(words());
  }
  // "2+2 ranks"; needs a connected group.
  std::string clusters_text();

  // For an engine beside the core's own, which moves the memory of devices (csrc/device).
  const GroupConfig& config() const { return config_; }
  const std::vector<Identity>& everyone(const Deadline& d);  // waits until all are known
  // Whom the collective under way waits for, by name; empty when nobody is known. Any thread may
  // call; other clusters' ranks are asked, until the deadline.
  std::string awaited_name(const Deadline& d);
  const std::string& name(int rank) const { return names_[static_cast<size_t>(rank)]; }
  void tell(const std::string& key, const std::string& value) {
    rendezvous_.store().set(key, value);
  }
  // What these ranks of a host share: the first makes it, and reserves its first bytes.
  Segment shared_segment(const std::string& what, const std::vector<int>& sharers, size_t bytes,
                         size_t first, const Deadline& d);
  std::string learn(const std::string& key, int from, const Deadline& d);  // what `from` tells
  void check() const;  // throws what failed the group, if anything did
  // Throws Error(kAborted) in a child forked from the process that has made the group.
  void check_process() const;
  // The same, and Error(kAborted) after shutdown(): no failure of the group's, and told to nobody.
  void check_here() const;
  bool forked() const;
  // As check(), and if a rank that shares memory with this one is gone. Any thread may call.
  void look() const;
  // Sees to it that every rank hears of a failure, also one that no message has connected: who
  // waits elsewhere than here (in a native library) may need it. All ranks call it.
  void keep_in_touch(const Deadline& d);
  // Fails the group, tells everyone, and throws `why` with the operation's name.
  [[noreturn]] void fail(const char* what, uint64_t sequence, const Error& why);
  // As fail(), where nobody waits for the exception.
  void give_up(const char* what, uint64_t sequence, const Error& why);
  // Tells the user, also one who has not asked.
  void warn(const std::string& words) const { print(words); }

 private:
  void print(const std::string& words) const;
  template <class F>
  void collective(OpCard card, const Deadline& d, F&& body);
  void exchange_pairs(const OpCard& what, const BufferLists& send, const BufferLists& recv,
                      const Deadline& d);
  void chose(const OpCard& card, const char* algorithm);

  void publish();
  void meet(const Deadline& d);      // learn who the others are
  void open_shm(const Deadline& d);  // map the cluster's segment
  std::string await_key(const std::string& key, int from, const Deadline& d);
  void wait_at_rendezvous(int from, const Deadline& d, const std::function<bool()>& come);
  void hear_failure();  // throws what a rank has told at the rendezvous
  void check_leader(int leader) const;
  bool near(int rank) const;
  bool has_witness(int rank) const;
  Error seen_closer(const Error& why);
  Error conclude(const Error& why);
  void enroll();
  void tell_other_groups(const Error& why);
  void hear_of_end(uint64_t process, const char* how);
  std::optional<Error> verdict() const;
  // Calls body(), and fails the group by what it throws.
  template <class F>
  auto or_fail(const char* what, uint64_t sequence, F&& body) -> decltype(body());
  void check_rank(int rank, const char* what) const;
  Transport& transport() const;
  std::string describe(int rank) const;
  static constexpr int kNobody = -1, kWhoeverIsAbsent = -2;
  bool hierarchical() const { return clusters_.count() > 1; }
  bool pipelined(const OpCard& card);
  void all_reduce_exactly(const OpCard& card, const void* in, void* out, size_t count,
                          const Reduction& r);
  void open_tail(const Deadline& d);
  size_t meet_datagrams(datagram::Socket* socket, const std::string& address, const Deadline& d);
  RequestBatch batch();
  int awaited() const;
  void hear_all(const OpCard& card, const Deadline& d);

  GroupConfig config_;
  Rendezvous rendezvous_;
  Identity me_;
  std::vector<std::string> names_;
  Clusters clusters_;
  std::vector<Identity> who_;
  std::unique_ptr<datagram::Tail> tail_;  // its memory is that of messages
  std::atomic<bool> tail_open_{false};
  bool tail_asked_ = false;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<ShmSteps> shm_;
  std::unique_ptr<Local> local_;
  std::unique_ptr<Hierarchy> hierarchy_;
  std::unique_ptr<Pipeline> pipeline_;  // where the settings ask for it
  std::string pipelined_text_;          // and what it is called
  std::atomic<const char*> last_algorithm_{"none yet"};
  std::atomic<uint64_t> sequence_{0};  // of collectives
  // When the collective under way must have failed. Its waits end a little earlier where the rank
  // at fault may have to be asked for.
  Deadline patience_ = Deadline::after(Deadline::Ms(0));
  std::mutex meeting_;
  std::atomic<bool> met_{false}, open_{false};
  std::atomic<int> absent_{kNobody};  // who is awaited at the rendezvous
  mutable std::mutex verdict_mutex_;
  std::unique_ptr<Error> verdict_;
  std::atomic<bool> failed_{false}, left_{false};
};

template <class F>
auto Group::or_fail(const char* what, uint64_t sequence, F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& e) {
    fail(what, sequence, e);
  } catch (const std::exception& e) {  // such as no memory, or a store that is gone
    fail(what, sequence,
         Error(Fault::kSystem, config_.rank,
               names_[static_cast<size_t>(config_.rank)] + ": " + e.what()));
  }
}

}  // namespace fsccl
