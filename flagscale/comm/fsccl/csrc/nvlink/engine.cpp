// Engine and Communicator (engine.h). Terms, which kernel_args.h defines:
//
//   arena    a group's part of a rank's memory, in which its peers write
//   channel  a block of a kernel's grid, which exchanges data with the same block of each peer, so
//            the number of channels is also the largest number of blocks; at most kChannels
//   slot     a staging buffer of a channel; its size limits how much is sent in one step
//   cell     data with its flag; cells have buffers of their own in an arena (cells.h)
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
  std::shared_ptr<const std::function<void(int)>> installer;
};

// Never destroyed: kernels may still run when the process ends.
InstalledEngines& installed_engines() {
  static auto* const engines = new InstalledEngines;
  return *engines;
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

// The installer may be a Python function. It is copied, called and destroyed without the mutex,
// because a thread that holds the GIL may be waiting for the mutex.
Engine* Engine::find_or_install(int device) {
  if (Engine* const engine = find(device)) return engine;
  std::shared_ptr<const std::function<void(int)>> install;
  {
    std::lock_guard<std::mutex> lock(installed_engines().mutex);
    install = installed_engines().installer;
  }
  if (install) (*install)(device);
  return find(device);
}

void Engine::set_installer(std::function<void(int)> install) {
  auto installer = std::make_shared<const std::function<void(int)>>(std::move(install));
  std::lock_guard<std::mutex> lock(installed_engines().mutex);
  installed_engines().installer.swap(installer);
}

// Takes a free arena and clears it. It waits for operations of the arena's last group without the
// mutex, because other threads may have to launch the kernels for which these wait.
Engine::Arena Engine::acquire_arena() {
  const Arena arena = take_free_arena();
  if (arena.needs_clearing)
    device_->clear(arena.memory, arena_bytes(arena.slot_bytes), &arena.last_stream);
  return arena;
}

// Takes a free arena with the largest slots; grows the heap if none is free.
Engine::Arena Engine::take_free_arena() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_arenas_.empty()) {
    const u64 slot_bytes = has_grown_ ? options_.slot_bytes / 2 : options_.slot_bytes;
    const u32 count = has_grown_ ? options_.arenas_per_growth : options_.initial_arenas;
    const u64 bytes = arena_bytes(slot_bytes);
    char* const memory = device_->allocate(bytes * count);
    for (u32 i = count; i-- > 0;)
      free_arenas_.push_back({memory + i * bytes, slot_bytes, false, nullptr});
    has_grown_ = true;
  }
  const auto smaller = [](const Arena& x, const Arena& y) { return x.slot_bytes < y.slot_bytes; };
  const auto largest = std::max_element(free_arenas_.begin(), free_arenas_.end(), smaller);
  const Arena arena = *largest;
  free_arenas_.erase(largest);
  return arena;
}

void Engine::release_arena(const Arena& arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_arenas_.push_back(arena);
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
      has_borrowed_arenas_(borrowed),
      arena_(arena),
      host_flags_(engine.take_host_flags()),
      timeout_ns_(timeout_ns) {
  for (int p = 0; p < size; ++p)
    rank_names_.push_back("rank " + std::to_string(p) + " of the group");
  base_args_.timeout_ns = timeout_ns;
  base_args_.host_flags = host_flags_;
  base_args_.slots = kSlotsOffset;
  base_args_.slot_bytes = static_cast<u32>(arena.slot_bytes);
}

Communicator::Communicator(Engine& engine, int rank, int size, u64 timeout_ns)
    : Communicator(engine, rank, size, arena_for(engine, size), false, timeout_ns) {}

Communicator::Communicator(Engine& engine, int rank, u64 timeout_ns, const BorrowedArenas& borrowed)
    : Communicator(
          engine, rank, static_cast<int>(borrowed.arenas.size()),
          {borrowed.arenas[static_cast<size_t>(rank)], borrowed.slot_bytes, false, nullptr}, true,
          timeout_ns) {
  for (int p = 0; p < size_; ++p) base_args_.arena[p] = borrowed.arenas[static_cast<size_t>(p)];
  base_args_.slots = BorrowedArenas::kSlotsOffset;
  max_blocks_ = borrowed.channels;
  std::string rows;
  for (int c = 0; c < kCollectives; ++c) {
    rows += name_of(static_cast<Collective>(c));
    // A row for ordinary (not registered) memory and all sizes.
    rows += " ordinary 1 staged " + std::to_string(borrowed.channels) + " 0\n";
  }
  table_ = TuningTable::parse(rows);
  connected_ = true;
}

// Kernels of this rank wait for all data that peers send to its arena, so the arena can be used
// again when these have ended. If the group failed, a peer may still be writing, so the arena is
// not used again.
Communicator::~Communicator() {
  if (has_borrowed_arenas_ || failure()) return;
  engine_.release_arena({arena_.memory, arena_.slot_bytes, has_launched_, last_stream_});
}

std::string Communicator::peer_info() const {
  PeerInfo info;
  info.version = kVersion;
  info.host = read_first_line(kBootId);  // memory can be shared within one boot of one host only
  info.device = engine_.device_->identity();
  info.slot_bytes = arena_.slot_bytes;
  info.max_blocks = engine_.options_.max_blocks;
  const auto table = engine_.options_.tables.find(size_);
  if (table != engine_.options_.tables.end()) info.table = table->second.text();
  info.heap_handle = engine_.device_->export_memory(arena_.memory, &info.offset);
  return info.text();
}

void Communicator::connect(const std::vector<std::string>& peer_infos) {
  if (peer_infos.size() != static_cast<size_t>(size_)) {
    fail(Fault::kUsage, -1, "connect() takes the information of all ranks");
  }
  std::vector<PeerInfo> all;
  for (int p = 0; p < size_; ++p)
    all.push_back(PeerInfo::parse(peer_infos[static_cast<size_t>(p)], p));
  const PeerInfo& own = all[static_cast<size_t>(rank_)];
  for (int p = 0; p < size_; ++p) {
    const PeerInfo& info = all[static_cast<size_t>(p)];
    const std::string name = "rank " + std::to_string(p);
    if (info.version != own.version) fail_version_mismatch(p);
    if (info.host != own.host) fail(Fault::kMismatch, p, name + " is on another host");
    // A GPU runs kernels of two processes in turns, so they would wait for each other for ever.
    if (p != rank_ && info.device == own.device &&
        !engine_.device_->is_own_memory(info.heap_handle)) {
      fail(Fault::kMismatch, p, name + " is another process on the same GPU");
    }
    shares_gpu_ = shares_gpu_ || (p != rank_ && info.device == own.device);
    if (p != rank_ && !engine_.device_->has_nvlink_to(info.device)) {
      fail(Fault::kMismatch, p, name + "'s GPU and this rank's have no NVLink between them");
    }
    // Ranks may be in different numbers of groups: the group takes the smallest slots.
    base_args_.slot_bytes = static_cast<u32>(std::min(u64{base_args_.slot_bytes}, info.slot_bytes));
    max_blocks_ = static_cast<u32>(std::min(u64{max_blocks_}, info.max_blocks));
    base_args_.arena[p] =
        p == rank_ ? arena_.memory : engine_.device_->import_memory(info.heap_handle) + info.offset;
  }
  table_ =
      all[0].table.empty() ? TuningTable::default_table(size_) : TuningTable::parse(all[0].table);
  connected_ = true;
}

std::string Communicator::memory_handle(const void* address, u64 bytes) const {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(u64[2]) != 0) {
    fail(Fault::kUsage, -1, "registered memory begins at a multiple of 16 bytes");
  }
  u64 offset = 0;
  const std::string shared =
      engine_.device_->export_memory(static_cast<const char*>(address), &offset);
  return pack({shared, std::to_string(offset), std::to_string(bytes)});
}

void Communicator::connect_memory(const void* address, u64 bytes,
                                  const std::vector<std::string>& handles) {
  if (handles.size() != static_cast<size_t>(size_)) {
    fail(Fault::kUsage, -1, "connect_memory() takes the handles of all ranks");
  }
  RegisteredMemory memory{static_cast<const char*>(address), bytes, {}, {}};
  for (int p = 0; p < size_; ++p) {
    const auto fields = unpack(handles[static_cast<size_t>(p)], 3, p);
    if (parse_number(fields[2], p) != bytes) {
      fail(Fault::kMismatch, p,
           "rank " + std::to_string(p) + " registers " + fields[2] + " bytes, this rank " +
               std::to_string(bytes));
    }
    if (p == rank_) {
      memory.rank_address[p] = const_cast<char*>(memory.begin);
      continue;
    }
    const u64 offset = parse_number(fields[1], p);
    memory.rank_address[p] = engine_.device_->import_memory(fields[0]) + offset;
    memory.imported_handles.push_back(fields[0]);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  registered_memory_.push_back(memory);
}

void Communicator::disconnect_memory(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto m = registered_memory_.begin(); m != registered_memory_.end();) {
    if (m->begin != address) {
      ++m;
      continue;
    }
    for (const std::string& handle : m->imported_handles) engine_.device_->release_memory(handle);
    m = registered_memory_.erase(m);
  }
}

// Returns the registered memory that peers would read or write for this call; null if there is
// none.
const Communicator::RegisteredMemory* Communicator::find_registered(const Call& call) const {
  if (registered_memory_.empty()) return nullptr;
  const bool is_all_reduce = call.collective == Collective::kAllReduce;
  if (call.collective == Collective::kBroadcast || (is_all_reduce && call.in != call.out))
    return nullptr;
  const auto* const address = static_cast<const char*>(is_reduction(call) ? call.in : call.out);
  const u64 bytes = is_all_reduce ? call.bytes : call.bytes * static_cast<u64>(size_);
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0 || (!is_all_reduce && call.bytes % 16 != 0))
    return nullptr;
  for (const RegisteredMemory& m : registered_memory_) {
    if (address >= m.begin && address + bytes <= m.begin + m.bytes) return &m;
  }
  return nullptr;
}

const Communicator::PreparedKernel& Communicator::prepare_kernel(const Call& call, bool registered,
                                                                 const KernelShape* forced_shape) {
  const u64 key = (call.bytes << 10) | (static_cast<u64>(call.reduction.dtype) << 4) |
                  (static_cast<u64>(call.collective) << 1) | (registered ? 1 : 0);
  if (forced_shape == nullptr) {
    const auto prepared = prepared_kernels_.find(key);
    if (prepared != prepared_kernels_.end()) return prepared->second;
  }
  // The message has one part (Call), or one for each rank.
  const bool has_one_part =
      call.collective == Collective::kAllReduce || call.collective == Collective::kBroadcast;
  const u64 total = has_one_part ? call.bytes : call.bytes * static_cast<u64>(size_);
  const auto plan_kernel_of_shape = [&](const KernelShape& shape) {
    PreparedKernel kernel;
    kernel.algorithm = shape.algorithm;
    if (shape.algorithm == Algorithm::kDirect && !registered) return kernel;
    if (shape.algorithm != Algorithm::kStaged && has_borrowed_arenas_) return kernel;
    const u32 max_blocks =
        forced_shape != nullptr && !has_borrowed_arenas_ ? kChannels : max_blocks_;
    const KernelPlan plan =
        plan_kernel(call.collective, shape, call.reduction.dtype, call.bytes, size_, max_blocks);
    if (plan.kernel.empty()) return kernel;
    kernel.function = engine_.find_kernel(plan.kernel);
    kernel.blocks = plan.blocks;
    kernel.threads = plan.threads;
    return kernel;
  };
  if (forced_shape != nullptr) return forced_kernel_ = plan_kernel_of_shape(*forced_shape);
  const KernelShape shape = table_.choose_shape(call.collective, registered, total);
  PreparedKernel kernel = plan_kernel_of_shape(shape);
  // A table may select an algorithm whose cell buffers are too small for the message. Bundles have
  // larger buffers than packets, and staging has no limit.
  if (kernel.function == nullptr && shape.algorithm == Algorithm::kFlagged) {
    kernel = plan_kernel_of_shape({Algorithm::kLines, 0, 0});
  }
  if (kernel.function == nullptr && shape.algorithm != Algorithm::kOther) {
    kernel = plan_kernel_of_shape({Algorithm::kStaged, 0, 0});
  }
  constexpr size_t kMaxPreparedKernels = 4096;  // of a program whose sizes never repeat
  if (prepared_kernels_.size() >= kMaxPreparedKernels) prepared_kernels_.clear();
  return prepared_kernels_[key] = kernel;
}

bool Communicator::supports(const Call& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_reduction(call) && !has_reduction_kernel(call.reduction)) return false;
  return call.bytes == 0 ||
         prepare_kernel(call, find_registered(call) != nullptr, nullptr).function != nullptr;
}

// Kernels of ranks that wait for each other must all fit on their GPUs in addition to kernels that
// wait there already: a kernel that waits for the previous one occupies multiprocessors, too. So
// only small kernels begin early, and none if ranks share a GPU.
bool Communicator::can_launch_early(const PreparedKernel& launch) const {
  constexpr u32 kMaxEarlyThreads = 16 * kMaxThreads;
  return uses_cells(launch.algorithm) && launch.blocks * launch.threads <= kMaxEarlyThreads &&
         !shares_gpu_;
}

bool Communicator::run(const Call& call, const KernelShape* forced_shape) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!connected_) fail(Fault::kUsage, -1, "run() before connect()");
  if (const auto error = failure()) throw *error;
  if (is_reduction(call) && !has_reduction_kernel(call.reduction)) return false;
  if (call.bytes == 0) return true;
  const RegisteredMemory* const memory = find_registered(call);
  const PreparedKernel& launch = prepare_kernel(call, memory != nullptr, forced_shape);
  if (launch.function == nullptr) return false;

  KernelArgs args =
      make_kernel_args(call.collective, call.in, call.out, call.bytes, rank_, size_, call.root);
  memcpy(args.arena, base_args_.arena, sizeof args.arena);
  args.timeout_ns = call.timeout_ns > 0 ? call.timeout_ns : base_args_.timeout_ns;
  timeout_ns_ = args.timeout_ns;
  args.host_flags = base_args_.host_flags;
  args.slots = base_args_.slots;
  args.slot_bytes = base_args_.slot_bytes;
  set_partition(call.collective, launch.algorithm, launch.blocks, &args);
  args.op = kernel_op_of(call.reduction);
  args.factor = call.reduction.factor;
  if (launch.algorithm == Algorithm::kDirect) {
    const u64 offset = static_cast<u64>(
        static_cast<const char*>(is_reduction(call) ? call.in : call.out) - memory->begin);
    for (int p = 0; p < size_; ++p) args.registered_buffer[p] = memory->rank_address[p] + offset;
  }
  if (has_launched_ && call.stream != last_stream_)
    engine_.device_->order_streams(last_stream_, call.stream);
  engine_.device_->launch(launch.function, launch.blocks, launch.threads, args, call.stream,
                          can_launch_early(launch));
  last_stream_ = call.stream;
  last_algorithm_ = launch.algorithm;
  has_launched_ = true;
  return true;
}

std::optional<Error> Communicator::failure() const {
  if (const u32 late = as_atomic(&host_flags_->late_rank_plus_1).load(std::memory_order_relaxed);
      late != 0) {
    const int rank = static_cast<int>(late) - 1;
    return Error(Fault::kTimeout, rank,
                 "NVLink engine: " + rank_names_[static_cast<size_t>(rank)] +
                     " did not come within " + std::to_string(timeout_ns_ / 1000000) + " ms");
  }
  if (aborted_) return Error(Fault::kAborted, -1, "NVLink engine: the group was aborted");
  return std::nullopt;
}

bool Communicator::has_waited_long() {
  return as_atomic(&host_flags_->long_wait).exchange(0, std::memory_order_relaxed) != 0;
}

bool Communicator::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !has_launched_ || engine_.device_->is_idle(last_stream_);
}

void Communicator::abort() {
  aborted_ = true;
  as_atomic(&host_flags_->stop).store(1, std::memory_order_relaxed);
}

}  // namespace nvlink
}  // namespace fsccl
