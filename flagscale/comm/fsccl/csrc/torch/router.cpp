#include "router.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "../device/device_streams.h"

namespace fsccl {
namespace {

bool on_host(const NativeLibrary& n) { return n.device == "cpu"; }

// Returns whether the core itself transfers the rank's tensors, without a device engine.
bool is_moved_by_core(const NativeLibrary& n) { return on_host(n) && n.library == "own"; }

// Returns whether the library supports all operations of c10d, so that whole calls can be passed to
// it.
bool has_all_operations(const NativeLibrary& n) {
  return n.library.rfind("nccl", 0) == 0 || n.library == "fsccl";
}

}  // namespace

Router::Router(OperationQueue& queue, NativeLibrary native, DeviceEngine::MakeNative make_native)
    : queue_(queue),
      group_(queue.group()),
      native_(std::move(native)),
      make_native_(std::move(make_native)) {}

bool Router::on_host() const { return fsccl::on_host(native_); }

c10::impl::VirtualGuardImpl Router::device_guard() const {
  return c10::impl::VirtualGuardImpl(c10::Device(native_.device).type());
}

Router::GroupKind Router::group_kind() {
  const auto router_lock = lock();
  if (kind_) return *kind_;
  bool all_moved_by_core = true, all_on_devices = true;
  try {
    for (const Identity& rank : group_.identities(Deadline::after(queue_.timeout()))) {
      all_moved_by_core = all_moved_by_core && is_moved_by_core(rank.native);
      all_on_devices = all_on_devices && !fsccl::on_host(rank.native);
    }
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
  kind_ = all_moved_by_core ? GroupKind::kHost
          : all_on_devices  ? GroupKind::kDevice
                            : GroupKind::kMixed;
  return *kind_;
}

bool Router::is_engine_of_hosts() {
  if (!on_host() || group_kind() != GroupKind::kMixed) return false;
  for (const Identity& rank : group_.identities(Deadline::after(queue_.timeout()))) {
    if (!fsccl::on_host(rank.native)) return false;
  }
  return true;
}

// Calls body(). If it throws, fails the group with that error, because other ranks may wait for
// this one.
template <class F>
auto Router::fail_group_on_error(const char* what, F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& e) {
    group_.fail(what, 0, e);
  } catch (const std::exception& e) {
    const auto* const c10_error = dynamic_cast<const c10::Error*>(&e);
    const std::string text = c10_error != nullptr ? c10_error->what_without_backtrace() : e.what();
    group_.fail(what, 0,
                Error(Fault::kSystem, group_.rank(), group_.name(group_.rank()) + ": " + text));
  }
}

Placement Router::placement_of(const at::Tensor& t, const char* op) {
  if (!t.defined()) return {op, at::kCPU};
  if (t.is_cpu()) {
    if (on_host() || group_kind() != GroupKind::kMixed) return {op, at::kCPU};
    return {op, device_guard().getDevice()};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !on_host() && t.device().type() == c10::Device(native_.device).type(), "fsccl: ", op,
      " got a tensor on ", t.device(), ", and this rank supports tensors on ", native_.device,
      " only: because of FSCCL_DEVICE=cpu or FSCCL_CUDA=0, or because there was no usable GPU when "
      "the group was created");
  return {op, t.device()};
}

const RankPartition& Router::native_clusters() {
  if (!clusters_) {
    const Deadline d = Deadline::after(queue_.timeout());
    const GroupConfig& config = group_.config();
    clusters_ = partition_by_native_library(group_.rank(), group_.identities(d),
                                            config.global_ranks, config.settings);
  }
  return *clusters_;
}

NativePtr Router::group_native(const at::Tensor& t) {
  queue_.check_process();
  if (!t.defined() || !has_all_operations(native_)) return nullptr;
  if (t.is_cpu() != on_host()) return nullptr;
  if (group_kind() == GroupKind::kHost) return nullptr;
  const auto router_lock = lock();
  if (!group_native_) {
    try {
      const RankPartition& clusters = native_clusters();
      check_running();
      group_native_ = fail_group_on_error("connecting", [&] {
        return clusters.count() == 1 ? make_native_(0, group_.rank(), clusters.own_ranks())
                                     : nullptr;
      });
    } catch (const Error& e) {
      std::rethrow_exception(torch_error(e));
    }
    if (*group_native_) group_.log_debug([&] { return native_.library + " joins all ranks"; });
  }
  return *group_native_;
}

// All-gather of one string per rank, by the core.
std::vector<std::string> Router::exchange(const std::string& text) {
  constexpr size_t kEntryBytes = MemoryRegistration::kMaxExchangeBytes + sizeof(uint32_t);
  std::string entry = text.substr(0, MemoryRegistration::kMaxExchangeBytes);
  const auto entries = std::make_shared<std::vector<std::string>>(
      static_cast<size_t>(group_.size()), std::string(kEntryBytes, '\0'));
  const auto size = static_cast<uint32_t>(entry.size());
  entry.insert(0, reinterpret_cast<const char*>(&size), sizeof size);
  entry.resize(kEntryBytes, '\0');
  queue_
      .run({c10d::OpType::ALLGATHER, "fsccl:exchange", false, c10d::kUnsetTimeout}, {},
           [entry, entries](Group& g, const Deadline& d) {
             BufferLists out;
             for (std::string& e : *entries) out.emplace_back(e.data(), e.size());
             g.all_gather(BufferList(entry.data(), entry.size()), out, d);
           })
      ->wait(kNoTimeout);
  std::vector<std::string> texts;
  for (const std::string& e : *entries) {
    uint32_t length = 0;
    memcpy(&length, e.data(), sizeof length);
    texts.push_back(e.substr(sizeof length, length));
  }
  return texts;
}

NvlinkPath* Router::nvlink_path(const at::Tensor& t) {
  if (native_.library.find("+nvlink") == std::string::npos) return nullptr;
  const int size = group_.size();
  if (size < 2 || size > nvlink::kMaxRanks || !t.is_cuda() || !group_native(t)) return nullptr;
  if (nvlink_) return nvlink_->get();
  NvlinkPath::ConnectFailure connect_failure;
  nvlink_ = NvlinkPath::connect(
      t.get_device(), queue_.shared_group(), queue_.timeout(),
      [this](const std::string& text) { return exchange(text); }, &connect_failure);
  queue_.set_nvlink(nvlink_->get());
  if (connect_failure.is_unexpected) {
    const char* const variable = std::getenv("FSCCL_NVLINK");
    TORCH_CHECK_NOT_IMPLEMENTED(
        variable == nullptr || std::string(variable) != "1",
        "fsccl: FSCCL_NVLINK=1, and the NVLink engine cannot be used: ", connect_failure.text);
    if (group_.rank() == 0) {
      group_.warn("the NVLink engine cannot be used, so NCCL runs its operations: " +
                  connect_failure.text);
    }
  }
  group_.log_debug([&] {
    return "NVLink engine " + (connect_failure.text.empty() ? "connected" : connect_failure.text);
  });
  return nvlink_->get();
}

NvlinkPath& Router::nvlink_path_for(const char* what) {
  const at::Tensor probe = on_host() ? at::Tensor() : at::empty({1}, at::TensorOptions(at::kCUDA));
  NvlinkPath* const path = on_host() ? nullptr : nvlink_path(probe);
  TORCH_CHECK_NOT_IMPLEMENTED(path != nullptr, "fsccl: ", what, ": memory is registered with the ",
                              "NVLink engine, which this group does not use: it needs "
                              "GPUs of one host with NVLink between them, and not FSCCL_NVLINK=0");
  return *path;
}

void Router::register_memory(const std::string& name, Regions regions) {
  NvlinkPath& path = nvlink_path_for("register_mem_pool");
  TORCH_CHECK_VALUE(registered_.count(name) == 0, "fsccl: this pool is registered already");
  try {
    path.registration([this](const std::string& text) { return exchange(text); }).add(regions);
    registered_[name] = std::move(regions);
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

void Router::deregister_memory(const std::string& name) {
  NvlinkPath& path = nvlink_path_for("deregister_mem_pool");
  const auto pool = registered_.find(name);
  TORCH_CHECK_VALUE(pool != registered_.end(), "fsccl: this pool is not registered");
  try {
    // Operations on any stream may be accessing the memory.
    const auto guard = device_guard();
    guard.synchronizeDevice(guard.getDevice().index());
    path.registration([this](const std::string& text) { return exchange(text); })
        .remove(pool->second);
    registered_.erase(pool);
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

std::string Router::path_of(const at::Tensor& t) {
  if (group_native(t)) return native_.library;
  const bool is_on_device = !placement_of(t, "path_of").device.is_cpu();
  return is_on_device || group_kind() == GroupKind::kMixed ? "engine" : "core";
}

void Router::check_running() const {
  if (!make_native_) throw Error(Fault::kAborted, group_.rank(), kShutDown);
}

DeviceEngine* Router::host_engine(const Deadline& d) {
  if (!on_host() || group_kind() != GroupKind::kMixed) return nullptr;
  const auto router_lock = lock();
  return &engine(d);
}

NativePtr Router::cluster_native(int cluster, int index, const std::vector<int>& ranks) {
  if (!cluster_native_) cluster_native_ = make_native_(cluster, index, ranks);
  return cluster_native_;
}

DeviceEngine& Router::engine(const Deadline& d) {
  if (engine_) return *engine_;
  check_running();
  const auto make_streams =
      [&](std::function<void(int peer)> check_wait) -> std::unique_ptr<Streams> {
    if (!on_host()) return std::make_unique<DeviceStreams>(device_guard().getDevice());
    return std::make_unique<HostStreams>(SpinPolicy::for_ranks(group_.size()),
                                         std::move(check_wait));
  };
  const auto make_native = [this](int cluster, int index, const std::vector<int>& ranks) {
    return cluster_native(cluster, index, ranks);
  };
  engine_ = fail_group_on_error("connecting", [&] {
    return std::make_unique<DeviceEngine>(queue_.shared_group(), make_streams, make_native, d);
  });
  if (!on_host()) watchdog_ = std::make_unique<StreamWatchdog>(*engine_);
  return *engine_;
}

void Router::set_timeout(Milliseconds timeout) {
  const auto router_lock = lock();
  if (group_native_ && *group_native_) (*group_native_)->setTimeout(timeout);
  if (cluster_native_) cluster_native_->setTimeout(timeout);
}

void Router::synchronize_device() {
  // If the group has not used a tensor on a device, the program may not have created a context.
  if (on_host() || !(engine_ || cluster_native_ || (group_native_ && *group_native_))) return;
  const auto guard = device_guard();
  guard.synchronizeStream(guard.getStream(guard.getDevice()));
}

void Router::abort() {
  // Does not take the lock: an operation that never ends may hold it.
  if (engine_) {
    engine_->abort();
  } else if (cluster_native_) {
    cluster_native_->abort();
  }
  if (NvlinkPath* const path = queue_.nvlink()) path->abort();
  if (group_native_ && *group_native_) (*group_native_)->abort();
}

void Router::stop() {
  const bool has_device_operations = watchdog_ != nullptr;
  if (has_device_operations && !group_.failure() && !watchdog_->drain(kDeviceDrainTimeout)) {
    group_.abort("the program ended with operations under way");
    abort();
  }
  watchdog_.reset();
  if (engine_) {
    engine_->shutdown();
  } else if (cluster_native_) {
    cluster_native_->shutdown();
  }
  if (nvlink_ && *nvlink_) (*nvlink_)->finish(kDeviceDrainTimeout);
  // A device may still access the engine's memory, so the engine is leaked; the process is about to
  // end.
  if (has_device_operations && group_.failure()) static_cast<void>(engine_.release());
  engine_.reset();
  cluster_native_.reset();
  queue_.set_nvlink(nullptr);
  nvlink_.reset();
  if (group_native_ && *group_native_) (*group_native_)->shutdown();
  group_native_.reset();
  make_native_ = nullptr;  // a Python function: it must not outlive the interpreter
}

void Router::leak() {
  static_cast<void>(engine_.release());
  static_cast<void>(watchdog_.release());
  if (nvlink_) static_cast<void>(nvlink_->release());
  if (group_native_) static_cast<void>(group_native_->release());
  static_cast<void>(cluster_native_.release());
}

}  // namespace fsccl
