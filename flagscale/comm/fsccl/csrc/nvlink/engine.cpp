#include "engine.h"

#include <algorithm>
#include <cstring>

#include "card.h"

namespace fsccl {
namespace nvlink {
namespace {

constexpr char kVersion[] = "fsccl-nvlink-5";

bool sums(const Call& call) {
  return call.collective == Collective::kAllReduce || call.collective == Collective::kReduceScatter;
}

std::atomic<u32>& as_atomic(u32* word) {
  static_assert(sizeof(std::atomic<u32>) == sizeof(u32));
  return *reinterpret_cast<std::atomic<u32>*>(word);
}

struct Installed {
  std::mutex mutex;
  std::map<int, std::unique_ptr<Engine>> all;
  std::shared_ptr<const std::function<void(int)>> on_demand;
};

// Never destroyed: kernels may still run when the process ends.
Installed& installed_engines() {
  static auto* const it = new Installed;
  return *it;
}

}  // namespace

// ---------------------------------------------------------------- Engine

Engine::Engine(std::unique_ptr<Device> device, Options options)
    : device_(std::move(device)), options_(std::move(options)) {
  if (options_.slot_bytes < 2048 || options_.slot_bytes % 512 != 0) {
    fail(Fault::kUsage, -1, "a slot has a multiple of 512 bytes and at least 2048, found " +
                                std::to_string(options_.slot_bytes));
  }
}

Engine* Engine::installed(int device) {
  std::lock_guard<std::mutex> hold(installed_engines().mutex);
  const auto found = installed_engines().all.find(device);
  return found != installed_engines().all.end() ? found->second.get() : nullptr;
}

void Engine::install(int device, std::unique_ptr<Engine> engine) {
  std::lock_guard<std::mutex> hold(installed_engines().mutex);
  installed_engines().all.emplace(device, std::move(engine));  // the first one stays
}

// The function may be Python's: it is copied, called and destroyed without the mutex, for whoever
// holds the interpreter's lock may be waiting for that.
Engine* Engine::of(int device) {
  if (Engine* const there = installed(device)) return there;
  std::shared_ptr<const std::function<void(int)>> install;
  {
    std::lock_guard<std::mutex> hold(installed_engines().mutex);
    install = installed_engines().on_demand;
  }
  if (install) (*install)(device);
  return installed(device);
}

void Engine::on_demand(std::function<void(int)> install) {
  auto fresh = std::make_shared<const std::function<void(int)>>(std::move(install));
  std::lock_guard<std::mutex> hold(installed_engines().mutex);
  installed_engines().on_demand.swap(fresh);
}

// One that is free. What its last group put on a stream is awaited without the mutex: others may
// have to launch what that waits for.
Engine::Arena Engine::take_arena() {
  const Arena arena = choose_arena();
  if (arena.used) device_->clear(arena.at, arena_bytes(arena.slot_bytes), &arena.last);
  return arena;
}

// Of those that are free, one with the largest slots.
Engine::Arena Engine::choose_arena() {
  std::lock_guard<std::mutex> hold(mutex_);
  if (free_.empty()) {
    const u64 slot_bytes = grown_ ? options_.slot_bytes / 2 : options_.slot_bytes;
    const u32 count = grown_ ? options_.arenas_later : options_.arenas_at_first;
    const u64 each = arena_bytes(slot_bytes);
    char* const more = device_->allocate(each * count);
    for (u32 i = count; i-- > 0;) free_.push_back({more + i * each, slot_bytes, false, nullptr});
    grown_ = true;
  }
  const auto smaller = [](const Arena& x, const Arena& y) { return x.slot_bytes < y.slot_bytes; };
  const auto found = std::max_element(free_.begin(), free_.end(), smaller);
  const Arena arena = *found;
  free_.erase(found);
  return arena;
}

void Engine::give_arena(const Arena& arena) {
  std::lock_guard<std::mutex> hold(mutex_);
  free_.push_back(arena);
}

HostWords* Engine::take_words() {
  static_assert(sizeof(HostWords) <= kWordsOfGroup);
  std::lock_guard<std::mutex> hold(mutex_);
  if (words_left_ == 0) {
    words_ = device_->host_memory(kWordsAtOnce);
    words_left_ = kWordsAtOnce;
  }
  auto* const taken = reinterpret_cast<HostWords*>(words_);
  words_ += kWordsOfGroup;
  words_left_ -= kWordsOfGroup;
  return taken;
}

Function Engine::function(const std::string& name) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto& found = functions_[name];
  if (found == nullptr) found = device_->function(name);
  if (found == nullptr) fail(Fault::kSystem, -1, "there is no kernel " + name);
  return found;
}

// ---------------------------------------------------------------- Communicator

Engine::Arena Communicator::arena_for(Engine& engine, int size) {
  if (size >= 2 && size <= kMaxRanks) return engine.take_arena();
  fail(Fault::kUsage, -1, "groups have 2 to 8 ranks, found " + std::to_string(size));
}

Communicator::Communicator(Engine& engine, int rank, int size, const Engine::Arena& arena,
                           bool lent, u64 timeout_ns)
    : engine_(engine),
      rank_(rank),
      size_(size),
      lent_(lent),
      arena_(arena),
      words_(engine.take_words()),
      limit_ns_(timeout_ns) {
  for (int p = 0; p < size; ++p) names_.push_back("rank " + std::to_string(p) + " of the group");
  template_.timeout_ns = timeout_ns;
  template_.host = words_;
  template_.slots = kSlots;
  template_.slot_bytes = static_cast<u32>(arena.slot_bytes);
}

Communicator::Communicator(Engine& engine, int rank, int size, u64 timeout_ns)
    : Communicator(engine, rank, size, arena_for(engine, size), false, timeout_ns) {}

Communicator::Communicator(Engine& engine, int rank, u64 timeout_ns, const Lent& lent)
    : Communicator(
          engine, rank, static_cast<int>(lent.arenas.size()),
          {lent.arenas[static_cast<size_t>(rank)], lent.slot_bytes, false, nullptr}, true,
          timeout_ns) {
  for (int p = 0; p < size_; ++p) template_.arena[p] = lent.arenas[static_cast<size_t>(p)];
  template_.slots = Lent::kSlots;
  most_blocks_ = lent.channels;
  std::string rows;
  for (int c = 0; c < kCollectives; ++c) {
    rows += name_of(static_cast<Collective>(c));
    rows += " ordinary 1 staged " + std::to_string(lent.channels) + " 0\n";
  }
  table_ = Table::parse(rows);
  connected_ = true;
}

// All that peers send to an arena is awaited by the kernels that run here, so that it can be used
// again when these have ended; not if the group failed, as a peer may still be writing then.
Communicator::~Communicator() {
  if (lent_ || failure()) return;
  engine_.give_arena({arena_.at, arena_.slot_bytes, ran_, last_stream_});
}

std::string Communicator::card() const {
  Card card;
  card.version = kVersion;
  card.host = first_line(kBootId);  // memory can be shared within one boot of one host only
  card.device = engine_.device_->identity();
  card.slot_bytes = arena_.slot_bytes;
  card.most_blocks = engine_.options_.most_blocks;
  const auto table = engine_.options_.tables.find(size_);
  if (table != engine_.options_.tables.end()) card.table = table->second.text();
  card.shared = engine_.device_->share(arena_.at, &card.offset);
  return card.text();
}

void Communicator::connect(const std::vector<std::string>& cards) {
  if (cards.size() != static_cast<size_t>(size_)) {
    fail(Fault::kUsage, -1, "connect() takes the cards of all ranks");
  }
  std::vector<Card> all;
  for (int p = 0; p < size_; ++p) all.push_back(Card::parse(cards[static_cast<size_t>(p)], p));
  const Card& mine = all[static_cast<size_t>(rank_)];
  for (int p = 0; p < size_; ++p) {
    const Card& card = all[static_cast<size_t>(p)];
    const std::string who = "rank " + std::to_string(p);
    if (card.version != mine.version) fail_unlike(p);
    if (card.host != mine.host) fail(Fault::kMismatch, p, who + " is on another host");
    // Kernels of two processes take turns on a GPU, and would wait for each other in vain.
    if (p != rank_ && card.device == mine.device && !engine_.device_->own(card.shared)) {
      fail(Fault::kMismatch, p, who + " is another process on the same GPU");
    }
    shares_gpu_ = shares_gpu_ || (p != rank_ && card.device == mine.device);
    if (p != rank_ && !engine_.device_->linked(card.device)) {
      fail(Fault::kMismatch, p, who + "'s GPU and this rank's have no NVLink between them");
    }
    // Ranks may be in different numbers of groups: what all have room for.
    template_.slot_bytes = static_cast<u32>(std::min(u64{template_.slot_bytes}, card.slot_bytes));
    most_blocks_ = static_cast<u32>(std::min(u64{most_blocks_}, card.most_blocks));
    template_.arena[p] = p == rank_ ? arena_.at : engine_.device_->open(card.shared) + card.offset;
  }
  table_ = all[0].table.empty() ? Table::guess(size_) : Table::parse(all[0].table);
  connected_ = true;
}

std::string Communicator::memory_card(const void* at, u64 bytes) const {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(u64[2]) != 0) {
    fail(Fault::kUsage, -1, "registered memory begins at a multiple of 16 bytes");
  }
  u64 offset = 0;
  const std::string shared = engine_.device_->share(static_cast<const char*>(at), &offset);
  return pack({shared, std::to_string(offset), std::to_string(bytes)});
}

void Communicator::connect_memory(const void* at, u64 bytes,
                                  const std::vector<std::string>& cards) {
  if (cards.size() != static_cast<size_t>(size_)) {
    fail(Fault::kUsage, -1, "connect_memory() takes the cards of all ranks");
  }
  Registered memory{static_cast<const char*>(at), bytes, {}, {}};
  for (int p = 0; p < size_; ++p) {
    const auto parts = unpack(cards[static_cast<size_t>(p)], 3, p);
    if (number(parts[2], p) != bytes) {
      fail(Fault::kMismatch, p, "rank " + std::to_string(p) + " registers " + parts[2] +
                                    " bytes, this rank " + std::to_string(bytes));
    }
    if (p == rank_) {
      memory.peer[p] = const_cast<char*>(memory.begin);
      continue;
    }
    const u64 offset = number(parts[1], p);
    memory.peer[p] = engine_.device_->open(parts[0]) + offset;
    memory.opened.push_back(parts[0]);
  }
  std::lock_guard<std::mutex> hold(mutex_);
  memory_.push_back(memory);
}

void Communicator::forget_memory(const void* at) {
  std::lock_guard<std::mutex> hold(mutex_);
  for (auto m = memory_.begin(); m != memory_.end();) {
    if (m->begin != at) {
      ++m;
      continue;
    }
    for (const std::string& shared : m->opened) engine_.device_->close(shared);
    m = memory_.erase(m);
  }
}

// The registered memory that peers would read or write for this call.
const Communicator::Registered* Communicator::registered(const Call& call) const {
  if (memory_.empty()) return nullptr;
  const bool whole = call.collective == Collective::kAllReduce;
  if (call.collective == Collective::kBroadcast || (whole && call.in != call.out)) return nullptr;
  const auto* const at = static_cast<const char*>(sums(call) ? call.in : call.out);
  const u64 bytes = whole ? call.bytes : call.bytes * static_cast<u64>(size_);
  if (reinterpret_cast<uintptr_t>(at) % 16 != 0 || (!whole && call.bytes % 16 != 0)) return nullptr;
  for (const Registered& m : memory_) {
    if (at >= m.begin && at + bytes <= m.begin + m.bytes) return &m;
  }
  return nullptr;
}

const Communicator::Launch& Communicator::prepare(const Call& call, bool registered,
                                                  const Shape* forced) {
  const u64 key = (call.bytes << 10) | (static_cast<u64>(call.reduction.dtype) << 4) |
                  (static_cast<u64>(call.collective) << 1) | (registered ? 1 : 0);
  if (forced == nullptr) {
    const auto found = launches_.find(key);
    if (found != launches_.end()) return found->second;
  }
  const bool whole = call.collective == Collective::kAllReduce ||
                     call.collective == Collective::kBroadcast;
  const u64 total = whole ? call.bytes : call.bytes * static_cast<u64>(size_);
  const auto make = [&](const Shape& shape) {
    Launch made;
    made.algorithm = shape.algorithm;
    if (shape.algorithm == Algorithm::kDirect && !registered) return made;
    if (shape.algorithm != Algorithm::kStaged && lent_) return made;
    const u32 most = forced != nullptr && !lent_ ? kChannels : most_blocks_;
    const Plan p = plan(call.collective, shape, call.reduction.dtype, call.bytes, size_, most);
    if (p.kernel.empty()) return made;
    made.function = engine_.function(p.kernel);
    made.blocks = p.blocks;
    made.threads = p.threads;
    return made;
  };
  if (forced != nullptr) return forced_ = make(*forced);
  const Shape shape = table_.find(call.collective, registered, total);
  Launch made = make(shape);
  // A table may ask for more than boxes hold.
  if (made.function == nullptr && shape.algorithm == Algorithm::kFlagged) {
    made = make({Algorithm::kLines, 0, 0});
  }
  if (made.function == nullptr && shape.algorithm != Algorithm::kOther) {
    made = make({Algorithm::kStaged, 0, 0});
  }
  constexpr size_t kMost = 4096;  // of a program whose sizes never repeat
  if (launches_.size() >= kMost) launches_.clear();
  return launches_[key] = made;
}

bool Communicator::takes(const Call& call) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (sums(call) && !reduces(call.reduction)) return false;
  return call.bytes == 0 || prepare(call, registered(call) != nullptr, nullptr).function != nullptr;
}

// Kernels of ranks that wait for each other must all find room on their GPUs, whatever waits there
// already: one that waits for the one before takes room, too. So only small ones begin early, and
// none where ranks share a GPU.
bool Communicator::early(const Launch& launch) const {
  constexpr u32 kSmall = 16 * kMaxThreads;
  return of_cells(launch.algorithm) && launch.blocks * launch.threads <= kSmall && !shares_gpu_;
}

bool Communicator::run(const Call& call, const Shape* forced) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (!connected_) fail(Fault::kUsage, -1, "run() before connect()");
  if (const auto why = failure()) throw *why;
  if (sums(call) && !reduces(call.reduction)) return false;
  if (call.bytes == 0) return true;
  const Registered* const memory = registered(call);
  const Launch& launch = prepare(call, memory != nullptr, forced);
  if (launch.function == nullptr) return false;

  Args args = arguments(call.collective, call.in, call.out, call.bytes, rank_, size_, call.root);
  memcpy(args.arena, template_.arena, sizeof args.arena);
  args.timeout_ns = call.timeout_ns > 0 ? call.timeout_ns : template_.timeout_ns;
  limit_ns_ = args.timeout_ns;
  args.host = template_.host;
  args.slots = template_.slots;
  args.slot_bytes = template_.slot_bytes;
  cut(call.collective, launch.algorithm, launch.blocks, &args);
  args.math = math_of(call.reduction);
  args.factor = call.reduction.factor;
  if (launch.algorithm == Algorithm::kDirect) {
    const u64 offset = static_cast<u64>(
        static_cast<const char*>(sums(call) ? call.in : call.out) - memory->begin);
    for (int p = 0; p < size_; ++p) args.peer[p] = memory->peer[p] + offset;
  }
  if (ran_ && call.stream != last_stream_) engine_.device_->order(last_stream_, call.stream);
  engine_.device_->launch(launch.function, launch.blocks, launch.threads, args, call.stream,
                          early(launch));
  last_stream_ = call.stream;
  last_algorithm_ = launch.algorithm;
  ran_ = true;
  return true;
}

std::optional<Error> Communicator::failure() const {
  if (const u32 late = as_atomic(&words_->late).load(std::memory_order_relaxed); late != 0) {
    const int rank = static_cast<int>(late) - 1;
    return Error(Fault::kTimeout, rank,
                 "NVLink engine: " + names_[static_cast<size_t>(rank)] + " did not come within " +
                     std::to_string(limit_ns_ / 1000000) + " ms");
  }
  if (aborted_) return Error(Fault::kAborted, -1, "NVLink engine: the group was aborted");
  return std::nullopt;
}

bool Communicator::waited() {
  return as_atomic(&words_->waits).exchange(0, std::memory_order_relaxed) != 0;
}

bool Communicator::idle() {
  std::lock_guard<std::mutex> hold(mutex_);
  return !ran_ || engine_.device_->idle(last_stream_);
}

void Communicator::abort() {
  aborted_ = true;
  as_atomic(&words_->stop).store(1, std::memory_order_relaxed);
}

}  // namespace nvlink
}  // namespace fsccl
