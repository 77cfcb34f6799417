#include "router.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "../device/device_streams.h"

namespace fsccl {
namespace {

bool on_host(const NativeLibrary& n) { return n.device == "cpu"; }

// Moved by the core itself, without a device engine.
bool moved_by_core(const NativeLibrary& n) { return on_host(n) && n.library == "own"; }

// Libraries that have all of c10d's operations, so that they can be handed whole ones.
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
  const auto held = lock();
  if (kind_) return *kind_;
  bool all_core = true, all_devices = true;
  try {
    for (const Identity& rank : group_.identities(Deadline::after(queue_.timeout()))) {
      all_core = all_core && moved_by_core(rank.native);
      all_devices = all_devices && !fsccl::on_host(rank.native);
    }
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
  kind_ = all_core ? GroupKind::kHost : all_devices ? GroupKind::kDevice : GroupKind::kMixed;
  return *kind_;
}

bool Router::is_engine_of_hosts() {
  if (!on_host() || group_kind() != GroupKind::kMixed) return false;
  for (const Identity& rank : group_.identities(Deadline::after(queue_.timeout()))) {
    if (!fsccl::on_host(rank.native)) return false;
  }
  return true;
}

// Fails the group by what body() throws, because other ranks may wait for this one.
template <class F>
auto Router::or_fail(const char* what, F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& e) {
    group_.fail(what, 0, e);
  } catch (const std::exception& e) {
    const auto* const of_torch = dynamic_cast<const c10::Error*>(&e);
    const std::string text = of_torch != nullptr ? of_torch->what_without_backtrace() : e.what();
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
      " got a tensor on ", t.device(), ", and this rank moves tensors of ", native_.device,
      " only: FSCCL_DEVICE=cpu or FSCCL_CUDA=0 make it so, or there was no usable GPU when the "
      "group was made");
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
  const auto held = lock();
  if (!group_native_) {
    try {
      const RankPartition& clusters = native_clusters();
      check_running();
      group_native_ = or_fail("connecting", [&] {
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

// All-gather of one short text per rank by the core.
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
  NvlinkPath::Refusal refusal;
  nvlink_ = NvlinkPath::connect(
      t.get_device(), queue_.shared_group(), queue_.timeout(),
      [this](const std::string& text) { return exchange(text); }, &refusal);
  queue_.set_nvlink(nvlink_->get());
  if (refusal.unexpected) {
    const char* const variable = std::getenv("FSCCL_NVLINK");
    TORCH_CHECK_NOT_IMPLEMENTED(
        variable == nullptr || std::string(variable) != "1",
        "fsccl: FSCCL_NVLINK=1, and the NVLink engine cannot be used: ", refusal.text);
    if (group_.rank() == 0) {
      group_.warn("the NVLink engine cannot be used, NCCL does its operations: " + refusal.text);
    }
  }
  group_.log_debug(
      [&] { return "NVLink engine " + (refusal.text.empty() ? "connected" : refusal.text); });
  return nvlink_->get();
}

NvlinkPath& Router::nvlink_path_for(const char* what) {
  const at::Tensor probe = on_host() ? at::Tensor() : at::empty({1}, at::TensorOptions(at::kCUDA));
  NvlinkPath* const path = on_host() ? nullptr : nvlink_path(probe);
  TORCH_CHECK_NOT_IMPLEMENTED(path != nullptr, "fsccl: ", what, ": memory is registered with the ",
                              "NVLink engine, which this group has not: it takes GPUs of one host "
                              "with NVLink between them, and no FSCCL_NVLINK=0");
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
    // Operations on any stream may be reading it.
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
  const bool device = !placement_of(t, "path_of").device.is_cpu();
  return device || group_kind() == GroupKind::kMixed ? "engine" : "core";
}

void Router::check_running() const {
  if (!make_native_) throw Error(Fault::kAborted, group_.rank(), "the group has been shut down");
}

DeviceEngine* Router::host_engine(const Deadline& d) {
  if (!on_host() || group_kind() != GroupKind::kMixed) return nullptr;
  const auto held = lock();
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
  engine_ = or_fail("connecting", [&] {
    return std::make_unique<DeviceEngine>(queue_.shared_group(), make_streams, make_native, d);
  });
  if (!on_host()) watchdog_ = std::make_unique<StreamWatchdog>(*engine_);
  return *engine_;
}

void Router::set_timeout(Milliseconds timeout) {
  const auto held = lock();
  if (group_native_ && *group_native_) (*group_native_)->setTimeout(timeout);
  if (cluster_native_) cluster_native_->setTimeout(timeout);
}

void Router::synchronize_device() {
  // A program that has given this group no tensor of a device may not even have a context there.
  if (on_host() || !(engine_ || cluster_native_ || (group_native_ && *group_native_))) return;
  const auto guard = device_guard();
  guard.synchronizeStream(guard.getStream(guard.getDevice()));
}

void Router::abort() {
  // Without the lock: an operation that never ends may hold it.
  if (engine_) {
    engine_->abort();
  } else if (cluster_native_) {
    cluster_native_->abort();
  }
  if (NvlinkPath* const path = queue_.nvlink()) path->abort();
  if (group_native_ && *group_native_) (*group_native_)->abort();
}

void Router::stop() {
  const bool device = watchdog_ != nullptr;
  if (device && !group_.failure() && !watchdog_->drain(kDeviceDrain)) {
    group_.abort("the program ended with operations under way");
    abort();
  }
  watchdog_.reset();
  if (engine_) {
    engine_->shutdown();
  } else if (cluster_native_) {
    cluster_native_->shutdown();
  }
  if (nvlink_ && *nvlink_) (*nvlink_)->finish(kDeviceDrain);
  // Memory that a device may still copy from and to stays; the process is about to end.
  if (device && group_.failure()) static_cast<void>(engine_.release());
  engine_.reset();
  cluster_native_.reset();
  queue_.set_nvlink(nullptr);
  nvlink_.reset();
  if (group_native_ && *group_native_) (*group_native_)->shutdown();
  group_native_.reset();
  make_native_ = nullptr;  // Python's: it must not outlive the interpreter
}

void Router::leak() {
  static_cast<void>(engine_.release());
  static_cast<void>(watchdog_.release());
  if (nvlink_) static_cast<void>(nvlink_->release());
  if (group_native_) static_cast<void>(group_native_->release());
  static_cast<void>(cluster_native_.release());
}

}  // namespace fsccl
