// Setup, failure and shutdown of the device engine. Its operations are in reductions.cpp,
// all_gather_broadcast.cpp and pairwise.cpp.
#include "engine.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <thread>

#include "operation.h"

namespace fsccl {
namespace {

// Time that shutdown() waits for other ranks.
constexpr std::chrono::seconds kShutdownTimeout(5);

// Returns whether the tensors are consecutive in memory.
bool is_consecutive(const std::vector<at::Tensor>& list) {
  const auto* next = static_cast<const std::byte*>(list[0].const_data_ptr());
  for (const at::Tensor& t : list) {
    if (t.const_data_ptr() != next) return false;
    next += t.nbytes();
  }
  return true;
}

// Polls a condition. Returns false if it is not met within `timeout`.
template <class Condition>
bool wait_until(Condition&& met, std::chrono::milliseconds timeout) {
  const Deadline d = Deadline::after(timeout);
  while (!met()) {
    if (d.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

DeviceEngine::DeviceEngine(std::shared_ptr<Group> group, const MakeStreams& make_streams,
                           const MakeNative& make_native, const Deadline& d)
    : group_(std::move(group)),
      config_(group_->config().settings),
      rank_(group_->rank()),
      deadline_(d) {
  const GroupConfig& group_config = group_->config();
  identities_ = group_->identities(d);
  clusters_ = partition_by_native_library(rank_, identities_, group_config.global_ranks, config_);
  for (const Identity& identity : identities_) {
    all_on_devices_ = all_on_devices_ && identity.native.device != "cpu";
  }
  streams_ = make_streams([this](int peer) { check_wait(peer); });
  scratch_ = std::make_unique<ScratchAllocator>(streams_->device());
  open_control_block(d);
  if (!is_single_host()) group_->connect_abort_ring(d);  // the control block reaches one host only
  open_kernels(d);
  proxy_ = std::make_unique<ProxyThread>(*group_, [this](const Error& e) {
    std::lock_guard<std::mutex> lock(proxy_error_mutex_);
    if (!proxy_error_) proxy_error_ = std::make_unique<Error>(e);
  });
  const std::vector<int>& members = clusters_.own_ranks();
  const int size = static_cast<int>(members.size());
  const std::string& library = identities_[static_cast<size_t>(rank_)].native.library;
  std::string description = library + " in the cluster of rank";
  for (int i = 0; i < size; ++i) {
    const int r = rank_of(clusters_.own_part, static_cast<size_t>(i));
    description +=
        (i == 0 ? "s " : ", ") + std::to_string(group_config.global_ranks[static_cast<size_t>(r)]);
  }
  LocalCommunicator::Hooks hooks;
  hooks.on_call = [this](bool begins) {
    control_block_->set_waiting_for(begins ? SharedControlBlock::kInNativeLibrary
                                           : SharedControlBlock::kNobody);
  };
  if (library == "gloo") hooks.check_group = [this] { check_peers(); };
  local_ = std::make_unique<LocalCommunicator>(
      size > 1 ? make_native(clusters_.own_part, clusters_.own_index, members) : nullptr, size,
      clusters_.own_index, description, std::move(hooks));
}

DeviceEngine::~DeviceEngine() { shutdown(); }

bool DeviceEngine::is_same_host(int rank) const {
  return rank == rank_ ||
         (config_.shared_memory && identities_[static_cast<size_t>(rank)].domain ==
                                       identities_[static_cast<size_t>(rank_)].domain);
}

void DeviceEngine::open_control_block(const Deadline& d) {
  std::vector<int> members;
  std::vector<std::string> names;
  for (int r = 0; r < group_->size(); ++r) {
    if (is_same_host(r)) members.push_back(r);
    names.push_back(group_->name(r));
  }
  const size_t area = (config_.tiny_bytes + kCacheLine) * members.size();
  const size_t bytes = SharedControlBlock::segment_bytes(static_cast<int>(members.size()), area);
  Segment segment = group_->open_shared_segment("control-block", members, bytes, bytes, d);
  control_block_ = std::make_unique<SharedControlBlock>(
      std::move(segment), rank_, std::move(members), clusters_.ranks, std::move(names), area);
  control_block_registration_ =
      streams_->register_host_memory(control_block_->memory(), control_block_->bytes());
}

// Opens the kernels for host memory, if all ranks support them. All ranks decide the same, because
// the decision follows from values that all of them publish in the store.
void DeviceEngine::open_kernels(const Deadline& d) {
  const int size = group_->size();
  if (!has_other_clusters() || !is_single_host() || size < 2 || size > nvlink::kMaxRanks) return;
  if (config_.kernel_bytes == 0) return;
  for (const Identity& identity : identities_) {
    if (identity.native.library.find("+nvlink") == std::string::npos) return;
  }
  const std::string key = "kernels/", none = "none";
  nvlink::Engine* engine = nullptr;
  try {
    engine = nvlink::Engine::find_or_install(streams_->device().index());
  } catch (const std::exception& e) {  // operations then use pipes and the control block
    group_->log_debug([&] { return std::string("no kernels for host memory: ") + e.what(); });
  }
  group_->set_key(key + std::to_string(rank_), engine != nullptr ? engine->identity() : none);
  std::set<std::string> gpus;
  for (int p = 0; p < size; ++p) {
    gpus.insert(group_->wait_for_key(key + std::to_string(p), p, d));
  }
  if (gpus.count(none) > 0 || gpus.size() != static_cast<size_t>(size)) return;
  const size_t bytes = HostMemoryKernels::bytes(size);
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  Segment segment = group_->open_shared_segment("host-kernels", all, bytes, bytes, d);
  kernels_ =
      std::make_unique<HostMemoryKernels>(*engine, rank_, size, std::move(segment), *streams_);
}

// Runs an operation of equal parts as one kernel. Returns false, on all ranks, if there is none for
// it. A kernel needs consecutive parts. Whether this rank's parts are consecutive is not known to
// other ranks, so parts that are not are copied.
bool DeviceEngine::run_as_kernel(nvlink::Collective collective, const Tensors& in,
                                 const Tensors& out, const Reduction& r,
                                 const CollectiveFingerprint& fingerprint, int root) {
  if (!kernels_ || r.op == RedOp::kPremulSum) return false;
  const size_t part_bytes = std::min(in[0].nbytes(), out[0].nbytes());
  for (const Tensors* list : {&in, &out}) {
    for (const at::Tensor& t : *list) {
      if (t.nbytes() != part_bytes) return false;
    }
  }
  nvlink::Call call;
  call.collective = collective;
  call.bytes = part_bytes;
  call.reduction = r;
  call.root = root;
  const size_t written =
      HostMemoryKernels::written_bytes(call, static_cast<size_t>(group_->size()));
  if (written > config_.kernel_bytes || !kernels_->supports(call)) return false;
  const bool scattered = !is_consecutive(out);
  const at::Tensor from = is_consecutive(in) ? in[0] : at::cat(in);
  const auto total = static_cast<int64_t>(part_bytes * out.size());
  const at::Tensor to = scattered ? scratch_->allocate(total, at::kByte) : out[0];
  call.in = from.const_data_ptr();
  call.out = to.data_ptr();
  call.stream = streams_->stream(StreamId::kNative)->native_handle();
  const std::chrono::nanoseconds timeout = deadline_.limit();
  call.timeout_ns = static_cast<nvlink::u64>(timeout.count());
  kernels_->run(call);
  for (size_t i = 0; scattered && i < out.size(); ++i) {
    as_bytes(out[i]).copy_(slice(to, i * part_bytes, part_bytes));
  }
  log_algorithm(fingerprint, "slots in host memory");
  return true;
}

Pipe& DeviceEngine::send_pipe(int peer) {
  const auto existing = send_pipes_.find(peer);
  if (existing != send_pipes_.end()) return existing->second;
  const size_t bytes = Ring::bytes(config_.pipe_bytes);
  std::vector<int> ends{rank_};
  if (is_same_host(peer)) ends.push_back(peer);
  Segment segment =
      group_->open_shared_segment("pipe/" + std::to_string(peer), ends, bytes, bytes, deadline_);
  auto ring = std::make_shared<Ring>(std::move(segment), config_.pipe_bytes, *streams_);
  Pipe pipe(peer, group_->name(peer), std::move(ring), is_same_host(peer) ? nullptr : proxy_.get());
  return send_pipes_.emplace(peer, std::move(pipe)).first->second;
}

Pipe& DeviceEngine::receive_pipe(int peer) {
  const auto existing = receive_pipes_.find(peer);
  if (existing != receive_pipes_.end()) return existing->second;
  const size_t bytes = Ring::bytes(config_.pipe_bytes);
  std::vector<int> ends{rank_};
  if (is_same_host(peer)) ends.insert(ends.begin(), peer);
  Segment segment =
      group_->open_shared_segment("pipe/" + std::to_string(rank_), ends, bytes, bytes, deadline_);
  auto ring = std::make_shared<Ring>(std::move(segment), config_.pipe_bytes, *streams_);
  ring->receiver_mapped().store(1, std::memory_order_release);
  Pipe pipe(peer, group_->name(peer), std::move(ring), is_same_host(peer) ? nullptr : proxy_.get());
  return receive_pipes_.emplace(peer, std::move(pipe)).first->second;
}

void DeviceEngine::check_peers() const {
  control_block_->check_peers();
  group_->throw_if_failed();
  check_kernels();
  std::lock_guard<std::mutex> lock(proxy_error_mutex_);
  if (proxy_error_) throw Error(*proxy_error_);
}

// Called during a wait for a word that `peer` writes, and with -1 after the wait. Throws if the
// group has failed or the deadline has passed.
//
// A rank that waits for a rank of another host cannot see for which rank that one waits. It gives
// that host's ranks extra time to report the rank at fault, as the core does.
void DeviceEngine::check_wait(int peer) {
  control_block_->set_waiting_for(peer < 0 ? SharedControlBlock::kNobody : peer);
  if (peer < 0) return;
  check_peers();
  if (control_block_->has_member(peer)) {
    if (!control_block_->has_joined(peer)) group_->check_presence(peer);
    // It may have written the word before it left. The caller checks the word between two calls.
    const bool has_left = control_block_->has_left(peer);
    if (has_left && peer_that_left_.exchange(peer) == peer)
      throw Error(Fault::kPeerLost, peer, group_->name(peer) + kLeftGroup);
  }
  if (!deadline_.passed()) return;
  const int at_fault = control_block_->find_stalled_rank(peer);
  const auto margin = std::min(Deadline::Ms(500), deadline_.limit() / 5);
  if (!control_block_->has_member(at_fault) && !deadline_.earlier_by(-margin).passed()) return;
  throw Error(Fault::kTimeout, at_fault,
              group_->name(at_fault) + " did not come within the timeout of " + deadline_.text());
}

// Finds the rank at fault for an error of a native library, which does not report it; the ranks of
// this host often know it. Returns the error that they report, or a timeout of the rank for which
// they wait, or else `error`.
Error DeviceEngine::attribute_error(const Error& error) {
  if (error.fault != Fault::kSystem || error.rank >= 0) return error;
  const std::string library_error_text = std::string(" (") + error.what() + ")";
  std::unique_ptr<Error> reported;
  const auto is_reported = [&] {
    try {
      check_peers();
    } catch (const Error& e) {
      reported = std::make_unique<Error>(e.fault, e.rank, e.what() + library_error_text);
    }
    return reported != nullptr;
  };
  if (wait_until(is_reported, std::chrono::milliseconds(500))) return *reported;
  const int at_fault = control_block_->find_stalled_rank(rank_);
  if (at_fault == rank_ || !deadline_.passed()) return error;
  return Error(
      Fault::kTimeout, at_fault,
      group_->name(at_fault) + " did not come within the timeout of " + deadline_.text() + library_error_text);
}

void DeviceEngine::barrier(const Deadline& d) {
  run_operation(dense_fingerprint(OpCode::kBarrier, 0, DType::kOpaque, -1), d,
                [&](const CollectiveFingerprint&) { group_->barrier(d); });
}

void DeviceEngine::abort() {
  // The core's error does not reach ranks of this host that wait in the control block.
  if (const auto failure = group_->failure()) {
    control_block_->abort(Error(Fault::kAborted, -1, *failure));
  }
  local_->abort();
  if (kernels_) kernels_->abort();
}

void DeviceEngine::fail(const char* operation, uint64_t sequence, const Error& error) {
  Error reason = attribute_error(error);
  if (reason.rank < 0) {
    const std::string text =
        std::string(reason.what()) + " (reported by " + group_->name(rank_) + ")";
    reason = Error(Fault::kAborted, -1, text);
  }
  reason = control_block_->abort(reason);
  abort();
  group_->fail(operation, sequence, reason);
}

// Before it ends, waits until other ranks have mapped all shared memory of this rank and all
// messages have been sent, unless the group has failed.
void DeviceEngine::shutdown() {
  if (shut_down_) return;
  shut_down_ = true;
  const auto healthy = [this] {
    try {
      control_block_->check_peers();
      return !group_->failure();
    } catch (const Error&) {
      return false;
    }
  };
  if (healthy()) {
    proxy_->flush(kShutdownTimeout);
    const auto all_opened = [this, &healthy] {
      for (const auto& [peer, pipe] : send_pipes_) {
        if (pipe.shared() && pipe.ring().receiver_mapped().load(std::memory_order_acquire) == 0) {
          return !healthy();
        }
      }
      return control_block_->all_joined() || !healthy();
    };
    wait_until(all_opened, kShutdownTimeout);
  }
  proxy_.reset();
  control_block_->leave();
  local_->shutdown();
}

void DeviceEngine::log_algorithm(const CollectiveFingerprint& fingerprint,
                                 const char* algorithm) const {
  group_->set_last_algorithm(algorithm);
  group_->log_debug([&] {
    return fingerprint.text() + ": " + algorithm + ", " + clusters_.text() +
           " by native library (" + identities_[static_cast<size_t>(rank_)].native.library +
           " here)";
  });
}

bool DeviceEngine::is_single_host() const {
  return control_block_->members().size() == static_cast<size_t>(group_->size());
}

bool DeviceEngine::is_tiny(size_t bytes) const {
  return bytes <= config_.tiny_bytes && is_single_host();
}

int DeviceEngine::cluster_of(int rank) const {
  for (int c = 0; c < clusters_.count(); ++c) {
    const auto& members = clusters_.ranks[static_cast<size_t>(c)];
    if (std::find(members.begin(), members.end(), rank) != members.end()) return c;
  }
  return -1;
}

size_t DeviceEngine::smallest_cluster_size() const {
  size_t smallest = clusters_.own_ranks().size();
  for (const auto& members : clusters_.ranks) smallest = std::min(smallest, members.size());
  return smallest;
}

// Returns the elements per chunk for a pipelined operation of `count` elements of `width` bytes. A
// chunk is divided into `parts` parts, each of which must fit a slot of a pipe.
//
// Many chunks keep all streams busy. But a host takes some 150 us to enqueue a chunk, in which time
// 6 MiB can be transferred over a GPU's bus, and less over a network.
size_t DeviceEngine::chunk_elements(size_t count, size_t width, size_t parts) const {
  if (!has_other_clusters()) return count;
  size_t chunks = 8, min_bytes = 256 << 10;
  if (all_on_devices_) {
    chunks = is_single_host() ? 2 : 4;
    min_bytes = is_single_host() ? 2 << 20 : 1 << 20;
  }
  const size_t slot_elements = config_.pipe_bytes / width;
  const size_t elements = std::max(ceil_div(count, chunks * parts), min_bytes / width);
  return std::min(elements, slot_elements) * parts;
}

// Returns a flat tensor that refers to memory of the device and does not own it.
at::Tensor DeviceEngine::wrap_memory(const void* data, size_t count, at::ScalarType type) const {
  const auto options = at::TensorOptions(type).device(streams_->device());
  if (count == 0) return at::empty({0}, options);
  return at::for_blob(const_cast<void*>(data), {static_cast<int64_t>(count)})
      .options(options)
      .target_device(streams_->device())
      .make_tensor();
}

DeviceEngine::Tensors DeviceEngine::wrap_buffers(const BufferLists& list,
                                                 at::ScalarType type) const {
  const size_t width = at::elementSize(type);
  Tensors out;
  for (const BufferList& p : list) {
    const void* data = p.bytes() > 0 ? p.buffers()[0].data : nullptr;
    out.push_back(wrap_memory(data, p.bytes() / width, type));
  }
  return out;
}

}  // namespace fsccl
