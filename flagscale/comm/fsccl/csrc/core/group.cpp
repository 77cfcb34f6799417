// How a group comes together. How it fails and ends is in group_ends.cpp, its collectives are in
// collectives.cpp.
#include "group.h"

#include "../datagram/tail.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <thread>

namespace fsccl {
namespace {

// Forgets a note where the waiting ends.
class Noted {
 public:
  explicit Noted(std::atomic<int>& note) : note_(note) {}
  ~Noted() { note_ = -1; }  // nobody

 private:
  std::atomic<int>& note_;
};

}  // namespace

Group::Group(std::unique_ptr<Store> store, GroupConfig config)
    : config_(std::move(config)), rendezvous_(std::move(store), config_.rank, config_.size) {
  if (config_.size < 1 || config_.rank < 0 || config_.rank >= config_.size) {
    fail_usage("rank " + std::to_string(config_.rank) + " of " + std::to_string(config_.size));
  }
  for (int r = 0;
       r < config_.size && config_.global_ranks.size() < static_cast<size_t>(config_.size); ++r) {
    config_.global_ranks.push_back(r);
  }
  for (int r = 0; r < config_.size; ++r) names_.push_back(describe(r));
  publish();
  enroll();
}

std::string Group::describe(int rank) const {
  const int global = config_.global_ranks[static_cast<size_t>(rank)];
  std::string out = "rank " + std::to_string(global);
  if (global != rank) out += " (" + std::to_string(rank) + " in the group)";
  if (static_cast<size_t>(rank) < who_.size()) {
    const Identity& w = who_[static_cast<size_t>(rank)];
    out += " [" + w.host + ", pid " + std::to_string(w.pid) + "]";
  }
  return out;
}

void Group::publish() {
  me_ = Identity::of_this_process(config_.settings);
  me_.native = config_.native;
  if (config_.rank == 0) me_.key = random_key();
  if (config_.size > 1) {
    if (!config_.network) config_.network = Device::of_this_process(config_.settings);
    transport_ = config_.network->open();
    transport_->on_ask([this] { return awaited(); });
    transport_->on_abort([this](const Error& why) { conclude(why); });
    me_.address = transport_->address();
  }
  rendezvous_.publish(me_);
}

// Polls: a blocking wait would hold the store's lock, which other groups of this process need.
// `from` is who has to come, or kWhoeverIsAbsent.
void Group::wait_at_rendezvous(int from, const Deadline& d, const std::function<bool()>& come) {
  // However many wait, the store is asked so often at most.
  const std::chrono::microseconds longest(std::max(10000, 50 * config_.size));
  auto nap = std::chrono::microseconds(200);
  const Noted noted(absent_);
  while (!come()) {
    if (const auto why = verdict()) throw Error(*why);
    // Where the segment is there it has the verdict, and the rendezvous may not.
    if (open_.load(std::memory_order_acquire)) shm_->throw_if_aborted();
    if (nap.count() > 4000) {
      absent_ = from;
      try {
        hear_failure();
        if (met_ && transport_) transport_->throw_trouble();
      } catch (const Error&) {
        // What has come meanwhile lets this rank go on, and others may wait for it to tell.
        if (!come()) throw;
      }
      if (from >= 0) check_leader(from);
    }
    if (d.passed()) {
      std::vector<int> absent{from};
      if (from < 0) absent = rendezvous_.absent();
      if (absent.empty()) return;
      std::string names;
      for (const int r : absent) {
        names += (names.empty() ? "" : ", ") + names_[static_cast<size_t>(r)];
      }
      throw Error(Fault::kTimeout, absent[0],
                  names + " did not come to connect within " + d.text());
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, longest);
  }
}

std::string Group::await_key(const std::string& key, int from, const Deadline& d) {
  Store& store = rendezvous_.store();
  wait_at_rendezvous(from, d, [&] { return store.has({key}); });
  return store.get({key})[0];
}

void Group::meet(const Deadline& d) {
  if (met_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> hold(meeting_);
  if (met_.load(std::memory_order_relaxed)) return;
  who_.clear();
  wait_at_rendezvous(kWhoeverIsAbsent, d, [this] { return rendezvous_.complete(); });
  who_ = rendezvous_.everyone();
  for (int r = 0; r < config_.size; ++r) names_[static_cast<size_t>(r)] = describe(r);
  check_compatible(who_, names_);
  clusters_ = form_clusters(config_.rank, who_, config_.global_ranks, config_.settings);
  if (transport_) {
    Peers peers;
    peers.rank = config_.rank;
    peers.names = names_;
    peers.near.resize(who_.size());
    const Key& fresh = who_[0].key;
    const auto& secret = config_.settings.secret;
    peers.key = secret ? derived(*secret, std::array<uint64_t, 3>{1, fresh.lo, fresh.hi}) : fresh;
    for (const Identity& w : who_) peers.addresses.push_back(w.address);
    for (const int mate : clusters_.own()) peers.near[static_cast<size_t>(mate)] = true;
    transport_->meet(std::move(peers));
  }
  met_.store(true, std::memory_order_release);
  try {
    hear_failure();  // others may have met, failed and gone, without having known this rank
  } catch (const Error& why) {
    const Error root = conclude(why);
    if (transport_)
      transport_->abort(root);  // and yet others wait for it, which cannot hear by now
    throw;
  }
}

int Group::awaited() const {
  if (!open_.load(std::memory_order_acquire)) return -1;
  const int by_pipeline = pipeline_ ? pipeline_->awaited() : -1;
  return by_pipeline >= 0 ? by_pipeline : shm_->awaited();
}

std::string Group::awaited_name(const Deadline& d) {
  const int waits_for = absent_;
  int at = waits_for >= 0 ? waits_for : awaited();
  if (waits_for == kWhoeverIsAbsent) {
    const std::vector<int> absent = rendezvous_.absent();
    at = absent.empty() ? kNobody : absent[0];
  }
  if (at < 0) return "";
  // The names of a group that is still meeting are about to become longer.
  if (!met_) return "rank " + std::to_string(config_.global_ranks[static_cast<size_t>(at)]);
  if (waits_for == kNobody && hierarchical()) at = transport_->trace(at, d, [] {});
  return names_[static_cast<size_t>(at)];
}

// A failure of the one that makes it is told to the others as it is.
Segment Group::shared_segment(const std::string& what, const std::vector<int>& sharers,
                              size_t bytes, size_t first, const Deadline& d) {
  const int leader = sharers[0];
  const std::string key = what + "/" + std::to_string(leader);
  const std::string& directory = config_.settings.shm_directory;
  if (leader == config_.rank) {
    Segment segment = Segment::create(bytes, first, directory);
    if (sharers.size() > 1) tell(key, segment.address());
    return segment;
  }
  const std::string address = await_key(key, leader, d);
  check_leader(leader);
  try {
    return Segment::open(address, bytes, directory);
  } catch (const Error& e) {
    throw Error(Fault::kPeerLost, leader,
                names_[static_cast<size_t>(leader)] + " made a segment that cannot be opened: " +
                    e.what() + "; FSCCL_SHM=0 does without shared memory");
  }
}

void Group::open_shm(const Deadline& d) {
  if (open_.load(std::memory_order_acquire)) return;
  meet(d);
  if (hierarchical()) transport_->listen();  // others may ask while this rank waits for its mates
  const int ranks = static_cast<int>(clusters_.own().size());
  ShmConfig config;
  config.members = clusters_.own();
  config.names = names_;
  config.process = me_.process;
  config.slot_bytes = config_.settings.slot_bytes != 0 ? config_.settings.slot_bytes
                                                       : ShmSteps::default_slot_bytes(ranks);
  if (config.slot_bytes < static_cast<size_t>(ranks) * kCacheLine) {
    fail_usage("FSCCL_SLOT_BYTES=" + std::to_string(config.slot_bytes) + " is too small for " +
               std::to_string(ranks) + " ranks on a host");
  }
  config.runs = [who = std::make_shared<std::vector<Identity>>(who_)](int r) {
    return (*who)[static_cast<size_t>(r)].runs();
  };
  int on_host = 0;
  for (const Identity& w : who_) on_host += w.domain == me_.domain ? 1 : 0;
  config.spin = SpinPolicy::for_ranks(on_host);
  Segment segment = shared_segment("segment", clusters_.own(),
                                   ShmSteps::segment_bytes(ranks, config.slot_bytes),
                                   ShmSteps::first_bytes(ranks, config.slot_bytes), d);
  shm_ = std::make_unique<ShmSteps>(std::move(segment), clusters_.index, std::move(config));
  shm_->set_watch([this] {
    if (const auto why = verdict()) throw Error(*why);
    if (transport_) transport_->throw_trouble();
    if (!shm_->complete()) hear_failure();  // who fails before it joins says so there alone
  });
  if (hierarchical()) {
    shm_->set_trace([this](int rank) {
      return transport_->trace(rank, patience_, [this] { shm_->throw_if_aborted(); });
    });
  }
  local_ = std::make_unique<Local>(*shm_);
  hierarchy_ = std::make_unique<Hierarchy>(*local_, clusters_, config_.settings.chunk_bytes);
  if (config_.settings.pipeline_k > 0) {
    const auto make = [this](size_t bytes, size_t first, int n) {
      return shared_segment("channels/" + std::to_string(n), clusters_.own(), bytes, first,
                            shm_->deadline());
    };
    pipelined_text_ = "pipelined, k=" + std::to_string(config_.settings.pipeline_k) + ", " +
                      std::to_string(config_.settings.pipeline_nelem) + " elements a send";
    pipeline_ = std::make_unique<Pipeline>(*shm_, clusters_, config_.settings, make);
  }
  open_.store(true, std::memory_order_release);
}

uint64_t Group::progress() const {
  uint64_t moved = sequence_;
  if (open_) moved += shm_->posted();
  if (transport_) moved += transport_->moved();
  return moved;
}

std::vector<Transport::Traffic> Group::traffic() const {
  return met_ && transport_ ? transport_->sent()
                            : std::vector<Transport::Traffic>(static_cast<size_t>(config_.size));
}

void Group::print(const std::string& words) const {
  std::fprintf(stderr, "[fsccl] rank %d group '%s': %s\n",
               config_.global_ranks[static_cast<size_t>(config_.rank)], config_.name.c_str(),
               words.c_str());
}

std::string Group::clusters_text() { return clusters_.text(); }

const std::vector<Identity>& Group::everyone(const Deadline& d) {
  if (!met_) or_fail("meeting", 0, [&] { meet(d); });
  return who_;
}

std::string Group::learn(const std::string& key, int from, const Deadline& d) {
  return await_key(key, from, d);
}

// A ring, so that one rank that is gone, or neighbours that are, leave the others connected.
void Group::keep_in_touch(const Deadline& d) {
  meet(d);
  if (config_.size > 1) transport_->touch((config_.rank + 1) % config_.size);
}

void Group::check_rank(int rank, const char* what) const {
  if (rank < 0 || rank >= config_.size) {
    fail_usage(std::string(what) + " " + std::to_string(rank) + " is not in the group of " +
               std::to_string(config_.size) + " ranks");
  }
}

RequestPtr Group::send(int peer, uint64_t tag, const BufferList& memory, const Deadline& d,
                       const OpCard& card) {
  check_here();
  check_rank(peer, "destination");
  or_fail("send", tag, [&] {
    check();
    meet(d);
  });
  return transport().send(peer, tag, memory, card);
}

RequestPtr Group::recv(int peer, uint64_t tag, const BufferList& memory, const Deadline& d,
                       const OpCard& card) {
  check_here();
  if (peer != kAnySource) check_rank(peer, "source");
  or_fail("recv", tag, [&] {
    check();
    meet(d);
  });
  return transport().recv(peer, tag, memory, card);
}

Transport& Group::transport() const {
  if (!transport_) fail_usage("a group of one rank has nobody to send to or to receive from");
  return *transport_;
}

void Group::wait(OpCode op, const RequestPtr& request, const Deadline& d) {
  check_process();
  or_fail(name_of(op), request->tag, [&] {
    transport_->wait(request, d, [this] {
      if (open_) shm_->throw_if_aborted();
    });
  });
}

}  // namespace fsccl
