#include "engine.h"

#include <algorithm>
#include <cstring>

#include "peer_info.h"

namespace fsccl {
namespace nvlink {
namespace {

constexpr char kVersion[] = "fsccl-nvlink-5";

bool is_reduction(const Call& call) {
  return call.collective == Collective::kAllReduce || call.collective == Collective::kReduceScatter;
}

std::atomic<u32>& as_atomic(u32* word) {
  static_assert(sizeof(std::atomic<u32>) == sizeof(u32));
  return *reinterpret_cast<std::atomic<u32>*>(word);
}

struct InstalledEngines {
  std::mutex mutex;
  std::map<int, std::unique_ptr<Engine>> all;
  std::shared_ptr<const std::function<void(int)>> on_demand;
};

// Never destroyed: kernels may still run when the process ends.
InstalledEngines& installed_engines() {
  static auto* const it = new InstalledEngines;
  return *it;
}

}  // namespace

// ---------------------------------------------------------------- Engine

Engine::Engine(std::unique_ptr<Device> device, Options options)
    : device_(std::move(device)), options_(std::move(options)) {
  if (options_.slot_bytes < 2048 || options_.slot_bytes % 512 != 0) {
    fail(Fault::kUsage, -1,
         "a slot has a multiple of 512 bytes and at least 2048, found " +
             std::to_string(options_.slot_bytes));
  }
}

Engine* Engine::find(int device) {
  std::lock_guard<std::mutex> lock(installed_engines().mutex);
  const auto engine = installed_engines().all.find(device);
  return engine != installed_engines().all.end() ? engine->second.get() : nullptr;
}

void Engine::install(int device, std::unique_ptr<Engine> engine) {
  std::lock_guard<std::mutex> lock(installed_engines().mutex);
  installed_engines().all.emplace(device, std::move(engine));  // the first one stays
}

// The function may be Python's. It is copied, called and destroyed without the mutex, because a
// thread that holds the interpreter's lock may be waiting for the mutex.
Engine* Engine::find_or_install(int device) {
  if (Engine* const engine = find(device)) return engine;
  std::shared_ptr<const std::function<void(int)>> install;
  {
    std::lock_guard<std::mutex> lock(installed_engines().mutex);
    install = installed_engines().on_demand;
  }
  if (install) (*install)(device);
  return find(device);
}

void Engine::set_installer(std::function<void(int)> install) {
  auto fresh = std::make_shared<const std::function<void(int)>>(std::move(install));
  std::lock_guard<std::mutex> lock(installed_engines().mutex);
  installed_engines().on_demand.swap(fresh);
}

// Takes a free arena and clears it. Operations of its last group are waited for without the mutex,
// because other threads may have to launch what these wait for.
Engine::Arena Engine::acquire_arena() {
  const Arena arena = take_free_arena();
  if (arena.used) device_->clear(arena.memory, arena_bytes(arena.slot_bytes), &arena.last_stream);
  return arena;
}

// Takes one with the largest slots; grows the heap if none is free.
Engine::Arena Engine::take_free_arena() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    const u64 slot_bytes = grown_ ? options_.slot_bytes / 2 : options_.slot_bytes;
    const u32 count = grown_ ? options_.arenas_per_growth : options_.initial_arenas;
    const u64 bytes = arena_bytes(slot_bytes);
    char* const memory = device_->allocate(bytes * count);
    for (u32 i = count; i-- > 0;) free_.push_back({memory + i * bytes, slot_bytes, false, nullptr});
    grown_ = true;
  }
  const auto smaller = [](const Arena& x, const Arena& y) { return x.slot_bytes < y.slot_bytes; };
  const auto largest = std::max_element(free_.begin(), free_.end(), smaller);
  const Arena arena = *largest;
  free_.erase(largest);
  return arena;
}

void Engine::release_arena(const Arena& arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(arena);
}

HostFlags* Engine::take_host_flags() {
  static_assert(sizeof(HostFlags) <= kFlagBytesPerGroup);
  std::lock_guard<std::mutex> lock(mutex_);
  if (flag_bytes_left_ == 0) {
    flag_memory_ = device_->allocate_host(kFlagBytesPerAllocation);
    flag_bytes_left_ = kFlagBytesPerAllocation;
  }
  auto* const host_flags = reinterpret_cast<HostFlags*>(flag_memory_);
  flag_memory_ += kFlagBytesPerGroup;
  flag_bytes_left_ -= kFlagBytesPerGroup;
  return host_flags;
}

Function Engine::find_kernel(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  Function& function = functions_[name];
  if (function == nullptr) function = device_->find_kernel(name);
  if (function == nullptr) fail(Fault::kSystem, -1, "there is no kernel " + name);
  return function;
}

// ---------------------------------------------------------------- Communicator

Engine::Arena Communicator::arena_for(Engine& engine, int size) {
  if (size >= 2 && size <= kMaxRanks) return engine.acquire_arena();
  fail(Fault::kUsage, -1, "groups have 2 to 8 ranks, found " + std::to_string(size));
}

Communicator::Communicator(Engine& engine, int rank, int size, const Engine::Arena& arena,
                           bool borrowed, u64 timeout_ns)
    : engine_(engine),
      rank_(rank),
      size_(size),
      borrowed_(borrowed),
      arena_(arena),
      host_flags_(engine.take_host_flags()),
      timeout_ns_(timeout_ns) {
  for (int p = 0; p < size; ++p) names_.push_back("rank " + std::to_string(p) + " of the group");
  template_.timeout_ns = timeout_ns;
  template_.host = host_flags_;
  template_.slots = kSlots;
  template_.slot_bytes = static_cast<u32>(arena.slot_bytes);
}

Communicator::Communicator(Engine& engine, int rank, int size, u64 timeout_ns)
    : Communicator(engine, rank, size, arena_for(engine, size), false, timeout_ns) {}

Communicator::Communicator(Engine& engine, int rank, u64 timeout_ns, const BorrowedArenas& borrowed)
    : Communicator(
          engine, rank, static_cast<int>(borrowed.arenas.size()),
          {borrowed.arenas[static_cast<size_t>(rank)], borrowed.slot_bytes, false, nullptr}, true,
          timeout_ns) {
  for (int p = 0; p < size_; ++p) template_.arena[p] = borrowed.arenas[static_cast<size_t>(p)];
  template_.slots = BorrowedArenas::kSlots;
  max_blocks_ = borrowed.channels;
  std::string rows;
  for (int c = 0; c < kCollectives; ++c) {
    rows += name_of(static_cast<Collective>(c));
    rows += " ordinary 1 staged " + std::to_string(borrowed.channels) + " 0\n";
  }
  table_ = TuningTable::parse(rows);
  connected_ = true;
}

// All data that peers send to an arena is waited for by the kernels that run here, so that it can
// be used again when these have ended; not if the group failed, because a peer may still be writing
// then.
Communicator::~Communicator() {
  if (borrowed_ || failure()) return;
  engine_.release_arena({arena_.memory, arena_.slot_bytes, ran_, last_stream_});
}

std::string Communicator::peer_info() const {
  PeerInfo info;
  info.version = kVersion;
  info.host = first_line(kBootId);  // memory can be shared within one boot of one host only
  info.device = engine_.device_->identity();
  info.slot_bytes = arena_.slot_bytes;
  info.max_blocks = engine_.options_.max_blocks;
  const auto table = engine_.options_.tables.find(size_);
  if (table != engine_.options_.tables.end()) info.table = table->second.text();
  info.shared = engine_.device_->export_memory(arena_.memory, &info.offset);
  return info.text();
}

void Communicator::connect(const std::vector<std::string>& texts) {
  if (texts.size() != static_cast<size_t>(size_)) {
    fail(Fault::kUsage, -1, "connect() takes the information of all ranks");
  }
  std::vector<PeerInfo> all;
  for (int p = 0; p < size_; ++p) all.push_back(PeerInfo::parse(texts[static_cast<size_t>(p)], p));
  const PeerInfo& own = all[static_cast<size_t>(rank_)];
  for (int p = 0; p < size_; ++p) {
    const PeerInfo& info = all[static_cast<size_t>(p)];
    const std::string name = "rank " + std::to_string(p);
    if (info.version != own.version) fail_version_mismatch(p);
    if (info.host != own.host) fail(Fault::kMismatch, p, name + " is on another host");
    // Kernels of two processes take turns on a GPU, and would wait for each other in vain.
    if (p != rank_ && info.device == own.device && !engine_.device_->is_own_memory(info.shared)) {
      fail(Fault::kMismatch, p, name + " is another process on the same GPU");
    }
    shares_gpu_ = shares_gpu_ || (p != rank_ && info.device == own.device);
    if (p != rank_ && !engine_.device_->has_nvlink_to(info.device)) {
      fail(Fault::kMismatch, p, name + "'s GPU and this rank's have no NVLink between them");
    }
    // Ranks may be in different numbers of groups: the group takes the smallest slots.
    template_.slot_bytes = static_cast<u32>(std::min(u64{template_.slot_bytes}, info.slot_bytes));
    max_blocks_ = static_cast<u32>(std::min(u64{max_blocks_}, info.max_blocks));
    template_.arena[p] =
        p == rank_ ? arena_.memory : engine_.device_->import_memory(info.shared) + info.offset;
  }
  table_ =
      all[0].table.empty() ? TuningTable::default_table(size_) : TuningTable::parse(all[0].table);
  connected_ = true;
}

std::string Communicator::memory_handle(const void* at, u64 bytes) const {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(u64[2]) != 0) {
    fail(Fault::kUsage, -1, "registered memory begins at a multiple of 16 bytes");
  }
  u64 offset = 0;
  const std::string shared = engine_.device_->export_memory(static_cast<const char*>(at), &offset);
  return pack({shared, std::to_string(offset), std::to_string(bytes)});
}

void Communicator::connect_memory(const void* at, u64 bytes,
                                  const std::vector<std::string>& handles) {
  if (handles.size() != static_cast<size_t>(size_)) {
    fail(Fault::kUsage, -1, "connect_memory() takes the handles of all ranks");
  }
  RegisteredMemory memory{static_cast<const char*>(at), bytes, {}, {}};
  for (int p = 0; p < size_; ++p) {
    const auto parts = unpack(handles[static_cast<size_t>(p)], 3, p);
    if (parse_number(parts[2], p) != bytes) {
      fail(Fault::kMismatch, p,
           "rank " + std::to_string(p) + " registers " + parts[2] + " bytes, this rank " +
               std::to_string(bytes));
    }
    if (p == rank_) {
      memory.peer[p] = const_cast<char*>(memory.begin);
      continue;
    }
    const u64 offset = parse_number(parts[1], p);
    memory.peer[p] = engine_.device_->import_memory(parts[0]) + offset;
    memory.imported.push_back(parts[0]);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  memory_.push_back(memory);
}

void Communicator::disconnect_memory(const void* at) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto m = memory_.begin(); m != memory_.end();) {
    if (m->begin != at) {
      ++m;
      continue;
    }
    for (const std::string& shared : m->imported) engine_.device_->release_memory(shared);
    m = memory_.erase(m);
  }
}

// The registered memory that peers would read or write for this call; null: none.
const Communicator::RegisteredMemory* Communicator::find_registered(const Call& call) const {
  if (memory_.empty()) return nullptr;
  const bool whole = call.collective == Collective::kAllReduce;
  if (call.collective == Collective::kBroadcast || (whole && call.in != call.out)) return nullptr;
  const auto* const at = static_cast<const char*>(is_reduction(call) ? call.in : call.out);
  const u64 bytes = whole ? call.bytes : call.bytes * static_cast<u64>(size_);
  if (reinterpret_cast<uintptr_t>(at) % 16 != 0 || (!whole && call.bytes % 16 != 0)) return nullptr;
  for (const RegisteredMemory& m : memory_) {
    if (at >= m.begin && at + bytes <= m.begin + m.bytes) return &m;
  }
  return nullptr;
}

const Communicator::PreparedKernel& Communicator::prepare_kernel(const Call& call, bool registered,
                                                                 const KernelShape* forced) {
  const u64 key = (call.bytes << 10) | (static_cast<u64>(call.reduction.dtype) << 4) |
                  (static_cast<u64>(call.collective) << 1) | (registered ? 1 : 0);
  if (forced == nullptr) {
    const auto prepared = prepared_.find(key);
    if (prepared != prepared_.end()) return prepared->second;
  }
  const bool whole =
      call.collective == Collective::kAllReduce || call.collective == Collective::kBroadcast;
  const u64 total = whole ? call.bytes : call.bytes * static_cast<u64>(size_);
  const auto make = [&](const KernelShape& shape) {
    PreparedKernel kernel;
    kernel.algorithm = shape.algorithm;
    if (shape.algorithm == Algorithm::kDirect && !registered) return kernel;
    if (shape.algorithm != Algorithm::kStaged && borrowed_) return kernel;
    const u32 most = forced != nullptr && !borrowed_ ? kChannels : max_blocks_;
    const KernelPlan plan =
        plan_kernel(call.collective, shape, call.reduction.dtype, call.bytes, size_, most);
    if (plan.kernel.empty()) return kernel;
    kernel.function = engine_.find_kernel(plan.kernel);
    kernel.blocks = plan.blocks;
    kernel.threads = plan.threads;
    return kernel;
  };
  if (forced != nullptr) return forced_kernel_ = make(*forced);
  const KernelShape shape = table_.find(call.collective, registered, total);
  PreparedKernel kernel = make(shape);
  // A table may ask for more than boxes hold.
  if (kernel.function == nullptr && shape.algorithm == Algorithm::kFlagged) {
    kernel = make({Algorithm::kLines, 0, 0});
  }
  if (kernel.function == nullptr && shape.algorithm != Algorithm::kOther) {
    kernel = make({Algorithm::kStaged, 0, 0});
  }
  constexpr size_t kMaxPrepared = 4096;  // of a program whose sizes never repeat
  if (prepared_.size() >= kMaxPrepared) prepared_.clear();
  return prepared_[key] = kernel;
}

bool Communicator::supports(const Call& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_reduction(call) && !has_reduction_kernel(call.reduction)) return false;
  return call.bytes == 0 ||
         prepare_kernel(call, find_registered(call) != nullptr, nullptr).function != nullptr;
}

// Kernels of ranks that wait for each other must all fit on their GPUs, whatever waits there
// already: a kernel that waits for the previous one occupies multiprocessors, too. So only small
// ones begin early, and none where ranks share a GPU.
bool Communicator::can_launch_early(const PreparedKernel& launch) const {
  constexpr u32 kSmall = 16 * kMaxThreads;
  return uses_cells(launch.algorithm) && launch.blocks * launch.threads <= kSmall && !shares_gpu_;
}

bool Communicator::run(const Call& call, const KernelShape* forced) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!connected_) fail(Fault::kUsage, -1, "run() before connect()");
  if (const auto error = failure()) throw *error;
  if (is_reduction(call) && !has_reduction_kernel(call.reduction)) return false;
  if (call.bytes == 0) return true;
  const RegisteredMemory* const memory = find_registered(call);
  const PreparedKernel& launch = prepare_kernel(call, memory != nullptr, forced);
  if (launch.function == nullptr) return false;

  KernelArgs args =
      make_kernel_args(call.collective, call.in, call.out, call.bytes, rank_, size_, call.root);
  memcpy(args.arena, template_.arena, sizeof args.arena);
  args.timeout_ns = call.timeout_ns > 0 ? call.timeout_ns : template_.timeout_ns;
  timeout_ns_ = args.timeout_ns;
  args.host = template_.host;
  args.slots = template_.slots;
  args.slot_bytes = template_.slot_bytes;
  set_partition(call.collective, launch.algorithm, launch.blocks, &args);
  args.math = math_of(call.reduction);
  args.factor = call.reduction.factor;
  if (launch.algorithm == Algorithm::kDirect) {
    const u64 offset = static_cast<u64>(
        static_cast<const char*>(is_reduction(call) ? call.in : call.out) - memory->begin);
    for (int p = 0; p < size_; ++p) args.peer[p] = memory->peer[p] + offset;
  }
  if (ran_ && call.stream != last_stream_)
    engine_.device_->order_streams(last_stream_, call.stream);
  engine_.device_->launch(launch.function, launch.blocks, launch.threads, args, call.stream,
                          can_launch_early(launch));
  last_stream_ = call.stream;
  last_algorithm_ = launch.algorithm;
  ran_ = true;
  return true;
}

std::optional<Error> Communicator::failure() const {
  if (const u32 late = as_atomic(&host_flags_->late).load(std::memory_order_relaxed); late != 0) {
    const int rank = static_cast<int>(late) - 1;
    return Error(Fault::kTimeout, rank,
                 "NVLink engine: " + names_[static_cast<size_t>(rank)] + " did not come within " +
                     std::to_string(timeout_ns_ / 1000000) + " ms");
  }
  if (aborted_) return Error(Fault::kAborted, -1, "NVLink engine: the group was aborted");
  return std::nullopt;
}

bool Communicator::has_waited_long() {
  return as_atomic(&host_flags_->waits).exchange(0, std::memory_order_relaxed) != 0;
}

bool Communicator::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !ran_ || engine_.device_->is_idle(last_stream_);
}

void Communicator::abort() {
  aborted_ = true;
  as_atomic(&host_flags_->stop).store(1, std::memory_order_relaxed);
}

}  // namespace nvlink
}  // namespace fsccl
