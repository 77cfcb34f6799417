// Which of core, engine and native library does an operation; the operations of devices.
#include "devices.h"

#include <cstdlib>

#include "device_work.h"

namespace fsccl {
namespace {

bool on_host(const Native& n) { return n.device == "cpu"; }

// Moved by the core itself, without an engine.
bool plain(const Native& n) { return on_host(n) && n.library == "own"; }

// Does all of c10d: it can be handed whole operations when it joins all ranks.
bool complete(const Native& n) { return n.library.rfind("nccl", 0) == 0 || n.library == "fsccl"; }

}  // namespace

TorchBackend::Kinds TorchBackend::kinds() {
  std::lock_guard<std::mutex> hold(device_mutex_);
  if (kinds_) return *kinds_;
  bool hosts = true, devices = true;
  try {
    for (const Identity& who : group_->everyone(Deadline::after(options_->timeout))) {
      hosts = hosts && plain(who.native);
      devices = devices && !on_host(who.native);
    }
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
  kinds_ = hosts ? Kinds::kHosts : devices ? Kinds::kDevices : Kinds::kBoth;
  return *kinds_;
}

// Whether an engine does operations, and all of its ranks are on their hosts.
bool TorchBackend::engine_of_hosts() {
  if (!on_host(home_.native) || kinds() != Kinds::kBoth) return false;
  for (const Identity& who : group_->everyone(Deadline::after(options_->timeout))) {
    if (!on_host(who.native)) return false;
  }
  return true;
}

// Fails the group by what body() throws: others may wait for this rank.
template <class F>
auto TorchBackend::or_fail(const char* what, F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& e) {
    group_->fail(what, 0, e);
  } catch (const std::exception& e) {
    const auto* const torchs = dynamic_cast<const c10::Error*>(&e);
    const std::string why = torchs != nullptr ? torchs->what_without_backtrace() : e.what();
    group_->fail(what, 0, Error(Fault::kSystem, rank_, group_->name(rank_) + ": " + why));
  }
}

Site TorchBackend::site_of(const at::Tensor& t, const char* op) {
  if (!t.defined()) return {op, at::kCPU};
  const bool device_rank = !on_host(home_.native);
  if (t.is_cpu()) {
    if (!device_rank || kinds() != Kinds::kBoth) return {op, at::kCPU};
    return {op, c10::impl::VirtualGuardImpl(c10::Device(home_.native.device).type()).getDevice()};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      device_rank && t.device().type() == c10::Device(home_.native.device).type(), "fsccl: ", op,
      " got a tensor on ", t.device(), ", and this rank moves tensors of ", home_.native.device,
      " only: FSCCL_DEVICE=cpu or FSCCL_CUDA=0 make it so, or there was no usable GPU when the "
      "group was made");
  return {op, t.device()};
}

// Ranks that a native library joins, as everyone tells of themselves.
const Clusters& TorchBackend::native_clusters() {
  if (!clusters_) {
    const Deadline d = Deadline::after(options_->timeout);
    const GroupConfig& config = group_->config();
    clusters_ = form_native_clusters(rank_, group_->everyone(d), config.global_ranks,
                                     config.settings);
  }
  return *clusters_;
}

TorchBackend::NativePtr TorchBackend::whole_native(const at::Tensor& t) {
  check_process();
  if (!t.defined() || !complete(home_.native)) return nullptr;
  if (t.is_cpu() != on_host(home_.native)) return nullptr;
  if (kinds() == Kinds::kHosts) return nullptr;
  std::lock_guard<std::mutex> hold(device_mutex_);
  if (!whole_) {
    try {
      const Clusters& clusters = native_clusters();
      check_alive();
      whole_ = or_fail("connecting", [&] {
        return clusters.count() == 1 ? home_.make_native(0, rank_, clusters.own()) : nullptr;
      });
    } catch (const Error& e) {
      std::rethrow_exception(torch_error(e));
    }
    if (*whole_) group_->say([&] { return home_.native.library + " joins all ranks"; });
  }
  return *whole_;
}

// Everyone's words, by the core.
std::vector<std::string> TorchBackend::exchange_words(const std::string& own) {
  constexpr size_t kMost = Registration::kMostWords + sizeof(uint32_t);
  std::string mine = own.substr(0, Registration::kMostWords);
  const auto all = std::make_shared<std::vector<std::string>>(static_cast<size_t>(size_),
                                                              std::string(kMost, '\0'));
  const auto size = static_cast<uint32_t>(mine.size());
  mine.insert(0, reinterpret_cast<const char*>(&size), sizeof size);
  mine.resize(kMost, '\0');
  run_on_host({c10d::OpType::ALLGATHER, "fsccl:words", false, c10d::kUnsetTimeout}, {},
              [mine, all](Group& g, const Deadline& d) {
                BufferLists out;
                for (std::string& one : *all) out.emplace_back(one.data(), one.size());
                g.all_gather(BufferList(mine.data(), mine.size()), out, d);
              })
      ->wait(kNoTimeout);
  std::vector<std::string> words;
  for (const std::string& one : *all) {
    uint32_t length = 0;
    memcpy(&length, one.data(), sizeof length);
    words.push_back(one.substr(sizeof length, length));
  }
  return words;
}

NvlinkPath& TorchBackend::path_of_registered(const char* what) {
  const bool device = !on_host(home_.native);
  const at::Tensor here = device ? at::empty({1}, at::TensorOptions(at::kCUDA)) : at::Tensor();
  NvlinkPath* const path = device ? nvlink_path(here) : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(path != nullptr, "fsccl: ", what, ": memory is registered with the ",
                              "NVLink engine, which this group has not: it takes GPUs of one host "
                              "with NVLink between them, and no FSCCL_NVLINK=0");
  return *path;
}

void TorchBackend::register_memory(const std::string& name, Regions regions) {
  NvlinkPath& path = path_of_registered("register_mem_pool");
  TORCH_CHECK_VALUE(registered_.count(name) == 0, "fsccl: this pool is registered already");
  try {
    path.registration([this](const std::string& own) { return exchange_words(own); }).add(regions);
    registered_[name] = std::move(regions);
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

void TorchBackend::deregister_memory(const std::string& name) {
  NvlinkPath& path = path_of_registered("deregister_mem_pool");
  const auto found = registered_.find(name);
  TORCH_CHECK_VALUE(found != registered_.end(), "fsccl: this pool is not registered");
  try {
    // Operations on any stream may be reading it.
    const c10::impl::VirtualGuardImpl guard(c10::Device(home_.native.device).type());
    guard.synchronizeDevice(guard.getDevice().index());
    path.registration([this](const std::string& own) { return exchange_words(own); })
        .forget(found->second);
    registered_.erase(found);
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

// The first collective that could take this way connects it: all ranks come here with it.
NvlinkPath* TorchBackend::nvlink_path(const at::Tensor& t) {
  if (home_.native.library.find("+nvlink") == std::string::npos) return nullptr;
  if (size_ < 2 || size_ > nvlink::kMaxRanks || !t.is_cuda() || !whole_native(t)) return nullptr;
  if (nvlink_) return nvlink_->get();
  const auto exchange = [this](const std::string& own) { return exchange_words(own); };
  NvlinkPath::Trouble why;
  nvlink_ = NvlinkPath::connect(t.get_device(), group_, options_->timeout, exchange, &why);
  connected_ = nvlink_->get();
  if (why.unforeseen) {
    const char* const wanted = std::getenv("FSCCL_NVLINK");
    TORCH_CHECK_NOT_IMPLEMENTED(wanted == nullptr || std::string(wanted) != "1",
                                "fsccl: FSCCL_NVLINK=1, and the NVLink engine cannot be used: ",
                                why.text);
    if (rank_ == 0) {
      group_->warn("the NVLink engine cannot be used, NCCL does its operations: " + why.text);
    }
  }
  group_->say([&] { return "NVLink engine " + (why.text.empty() ? "connected" : why.text); });
  return nvlink_->get();
}

// Throws if the group has failed, or its kernels have, of which everyone is told then.
void TorchBackend::check_kernels(const char* title) {
  const NvlinkPath* const path = connected_;
  if (path == nullptr) return;
  try {
    if (const auto why = path->failure()) group_->fail(title, sequence_, *why);
    group_->check();
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

// Ranks must come to the same answer: it follows from what is the same in all of their calls.
std::optional<TorchBackend::WorkPtr> TorchBackend::by_nvlink(
    const Call& call, nvlink::Collective what, const at::Tensor& in, const at::Tensor& out,
    const c10d::ReduceOp* op, int root) {
  const auto fits = [](const at::Tensor& t) {  // NCCL refuses others
    return t.defined() && t.is_cuda() && t.layout() == at::kStrided && t.is_contiguous();
  };
  if (coalescing_ || !fits(in) || !fits(out)) return std::nullopt;
  NvlinkPath* const path = nvlink_path(out);
  if (path == nullptr) return std::nullopt;
  check_kernels(call.title);
  nvlink::Call made;
  made.collective = what;
  made.timeout_ns = static_cast<nvlink::u64>(std::chrono::nanoseconds(limit(call.timeout)).count());
  made.in = in.const_data_ptr();
  made.out = out.data_ptr();
  made.bytes = what == nvlink::Collective::kAllGather ? in.nbytes() : out.nbytes();
  made.root = root;
  if (what == nvlink::Collective::kAllToAll) made.bytes /= static_cast<size_t>(size_);
  if (op != nullptr) {
    // 8-bit floats have no kernel here.
    if (factor_is_tensor(*op) || c10::isFloat8Type(out.scalar_type())) return std::nullopt;
    made.reduction = reduction_of(out, *op, size_);
  }
  try {
    auto work = path->run(made, call.async, rank_, call.type, call.title, ++sequence_, in, out);
    if (work) {
      group_->took(path->last_algorithm());
      group_->say([&] {
        return std::string(call.title) + " #" + std::to_string(sequence_) + " of " +
               std::to_string(out.nbytes()) + " bytes: " + path->last_algorithm();
      });
    }
    return work;
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

std::string TorchBackend::path_of(const at::Tensor& t) {
  if (whole_native(t)) return home_.native.library;
  const bool device = !site_of(t, "path_of").device.is_cpu();
  return device || kinds() == Kinds::kBoth ? "engine" : "core";
}

void TorchBackend::check_alive() const {
  if (!home_.make_native) throw Error(Fault::kAborted, rank_, "the group has been shut down");
}

// For a rank on its host; one on a device has moved its tensors there.
Engine* TorchBackend::host_engine(const Deadline& d) {
  if (!on_host(home_.native) || kinds() != Kinds::kBoth) return nullptr;
  std::lock_guard<std::mutex> hold(device_mutex_);
  return &engine(d);
}

// The native library among this rank's like. Made by the first who needs it, it waits for nobody.
TorchBackend::NativePtr TorchBackend::cluster_native(int cluster, int index,
                                                     const std::vector<int>& ranks) {
  if (!cluster_native_) cluster_native_ = home_.make_native(cluster, index, ranks);
  return cluster_native_;
}

Engine& TorchBackend::engine(const Deadline& d) {
  if (engine_) return *engine_;
  check_alive();
  const bool host = on_host(home_.native);
  const auto make_tracks = [&](std::function<void(int)> look) -> std::unique_ptr<Tracks> {
    if (!host) {
      const c10::DeviceType type = c10::Device(home_.native.device).type();
      return std::make_unique<StreamTracks>(c10::impl::VirtualGuardImpl(type).getDevice());
    }
    return std::make_unique<HostTracks>(SpinPolicy::for_ranks(size_), std::move(look));
  };
  const auto native = [this](int cluster, int index, const std::vector<int>& ranks) {
    return cluster_native(cluster, index, ranks);
  };
  engine_ = or_fail("connecting", [&] {
    return std::make_unique<Engine>(group_, make_tracks, native, d);
  });
  if (!host) watch_ = std::make_unique<Watch>(*engine_);
  return *engine_;
}

// Enqueues the operation on the engine's streams, between the caller's work so far and, unless it
// is asynchronous, all that the caller does later.
TorchBackend::WorkPtr TorchBackend::run_on_device(
    const Call& call, const Site& site, Tensors outputs,
    std::function<void(Engine&, const Deadline&)> body) {
  check_process();
  const Deadline d = Deadline::after(limit(call.timeout));
  TORCH_CHECK_VALUE(!coalescing_native_, "fsccl: ", site.op,
                    " between clusters cannot be coalesced with messages inside one");
  const c10::Stream user = c10::impl::VirtualGuardImpl(site.device.type()).getStream(site.device);
  kinds();
  std::lock_guard<std::mutex> hold(device_mutex_);
  try {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_capturing(user), "fsccl: ", site.op,
        " between clusters cannot be captured in a CUDA graph: what other clusters send is not "
        "part of the graph; groups of one cluster can be captured");
    Engine& engine = this->engine(d);
    auto& tracks = static_cast<StreamTracks&>(engine.tracks());
    TORCH_CHECK_VALUE(site.device == tracks.device(), "fsccl: ", site.op, " got a tensor on ",
                      site.device, ", but this group works on ", tracks.device());
    tracks.wait(Track::kNative, tracks.mark_of(user));
    const OnTrack native(tracks, Track::kNative);
    body(engine, d);
    auto pending = std::make_shared<Pending>(call.title, ++sequence_, tracks.mark(Track::kNative),
                                             d, tracks.take_awaited());
    // The operation's tensors live in its body, those of the caller as well as copies of them.
    pending->keep = std::make_shared<decltype(body)>(std::move(body));
    if (!call.async && !coalescing_) pending->end->block(user);
    watch_->add(pending);
    return collect(c10::make_intrusive<DeviceWork>(rank_, call.type, call.title, sequence_,
                                                   std::move(outputs), std::move(pending),
                                                   *tracks.stream(Track::kNative)));
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

// Messages of a device's tensors inside a cluster are the native library's. All others go through
// host memory. Two ranks alone know of a message: an engine, for which all ranks come together, is
// not asked.
std::optional<TorchBackend::WorkPtr> TorchBackend::message_inside(c10d::OpType type,
                                                                  Tensors& tensors, int peer,
                                                                  int tag) {
  const at::Tensor& t = tensors[0];
  const auto call = [&](int to) {
    return [&, to](c10d::Backend& b) {
      if (type == c10d::OpType::RECVANYSOURCE) return b.recvAnysource(tensors, tag);
      return type == c10d::OpType::SEND ? b.send(tensors, to, tag) : b.recv(tensors, to, tag);
    };
  };
  if (auto work = by_native(t, call(peer))) return work;
  if (site_of(t, "send or recv").device.is_cpu() || t.is_cpu()) return std::nullopt;
  kinds();
  std::lock_guard<std::mutex> hold(device_mutex_);
  try {
    check_alive();
    const Clusters& clusters = native_clusters();
    const auto& mates = clusters.own();
    const bool from_anyone = type == c10d::OpType::RECVANYSOURCE;
    TORCH_CHECK_NOT_IMPLEMENTED(!from_anyone || mates.size() == 1,
                                "fsccl: receiving from any source into a tensor on ", t.device(),
                                ": ", home_.native.library, " does not offer that");
    const auto mate = std::find(mates.begin(), mates.end(), peer);
    if (from_anyone || mate == mates.end()) return std::nullopt;
    return call_native(cluster_native(clusters.mine, clusters.index, mates),
                       call(static_cast<int>(mate - mates.begin())));
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

void TorchBackend::wait_for_device() {
  // A program that has given this group no tensor of a device may not even have a context there.
  if (on_host(home_.native) || !(engine_ || cluster_native_ || (whole_ && *whole_))) return;
  const c10::impl::VirtualGuardImpl guard(c10::Device(home_.native.device).type());
  guard.synchronizeStream(guard.getStream(guard.getDevice()));
}

void TorchBackend::abort_devices() {
  // Not under the mutex: an operation that waits for ever may hold it.
  if (engine_) {
    engine_->abort();
  } else if (cluster_native_) {
    cluster_native_->abort();
  }
  if (NvlinkPath* const path = connected_) path->abort();
  if (whole_ && *whole_) (*whole_)->abort();
}

void TorchBackend::stop_devices() {
  const bool device = watch_ != nullptr;
  if (device && !group_->failure() && !watch_->drain(kLastOfDevice)) {
    group_->abort("the program ended with operations under way");
    abort_devices();
  }
  watch_.reset();
  if (engine_) {
    engine_->shutdown();
  } else if (cluster_native_) {
    cluster_native_->shutdown();
  }
  if (nvlink_ && *nvlink_) (*nvlink_)->finish(kLastOfDevice);
  // What a device may still copy from and to stays; the process is about to end.
  if (device && group_->failure()) static_cast<void>(engine_.release());
  engine_.reset();
  cluster_native_.reset();
  connected_ = nullptr;
  nvlink_.reset();
  if (whole_ && *whole_) (*whole_)->shutdown();
  whole_.reset();
  home_.make_native = nullptr;  // Python's: it must not outlive the interpreter
}

}  // namespace fsccl
