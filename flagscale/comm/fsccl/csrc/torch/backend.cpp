// Construction, shutdown and point-to-point messages of a group's backend. The collectives are in
// operations.cpp.
#include "backend.h"

#include <set>

#include "../core/per_process.h"
#include "gil.h"
#include "store.h"

namespace fsccl {
namespace {

GroupConfig make_group_config(int rank, int size, const TorchBackend::Options& options,
                              const NativeLibrary& native) {
  GroupConfig config;
  config.rank = rank;
  config.size = size;
  config.name = options.group_name.empty() ? "default" : options.group_name;
  for (const uint64_t r : options.global_ranks_in_group) {
    config.global_ranks.push_back(static_cast<int>(r));
  }
  config.settings = Settings::from_environment();
  if (options.algorithm) config.settings.algorithm = algorithm_of(*options.algorithm, "algorithm");
  if (options.pipeline_k) config.settings.pipeline_k = *options.pipeline_k;
  if (options.pipeline_nelem) {
    config.settings.pipeline_nelem = static_cast<size_t>(*options.pipeline_nelem);
  }
  if (options.tail) {
    config.settings.bounded.enabled = BoundedSettings::parse_mode(*options.tail);
    config.settings.bounded.group_patterns.clear();  // the option is for this group itself
  }
  config.settings.check_pipeline();
  // torch gives the default group, of all ranks, an empty list.
  if (config.global_ranks.empty()) config.settings.check_node_sizes(size);
  config.native = native;
  return config;
}

struct LiveBackends {
  std::mutex mutex;
  std::set<TorchBackend*> all;
};

LiveBackends& live_backends() { return per_process<LiveBackends>(); }

std::shared_ptr<Group> make_group(c10::intrusive_ptr<c10d::Store> store, GroupConfig config) {
  try {
    return std::make_shared<Group>(std::make_unique<TorchStore>(std::move(store)),
                                   std::move(config));
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

}  // namespace

void TorchBackend::shutdown_all() {
  const GilRelease gil_release;
  std::unique_lock<std::mutex> lock(live_backends().mutex);
  const std::vector<TorchBackend*> all(live_backends().all.begin(), live_backends().all.end());
  for (TorchBackend* backend : all) {
    // A backend may own another one, of its cluster's native library, and have shut it down.
    if (live_backends().all.count(backend) == 0) continue;
    lock.unlock();
    backend->shutdown();
    lock.lock();
  }
  Segment::wait_until_released(Router::kDeviceDrainTimeout);
}

TorchBackend::TorchBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                           c10::intrusive_ptr<Options> options, NativeLibrary native,
                           DeviceEngine::MakeNative make_native)
    : Backend(rank, size),
      options_(std::move(options)),
      group_(make_group(std::move(store), make_group_config(rank, size, *options_, native))),
      callbacks_(std::make_shared<Executor>()),
      queue_(rank, group_, options_),
      router_(queue_, std::move(native), std::move(make_native)),
      bounded_(queue_, router_) {
  init();
  std::lock_guard<std::mutex> lock(live_backends().mutex);
  live_backends().all.insert(this);
}

TorchBackend::~TorchBackend() {
  if (group_->is_forked_child()) {  // all resources belong to the parent process
    router_.leak();
    return;
  }
  const GilRelease gil_release;
  {
    std::lock_guard<std::mutex> lock(live_backends().mutex);
    live_backends().all.erase(this);
  }
  TorchBackend::shutdown();
}

void TorchBackend::check_settings(int rank, int size, const Options& options) {
  try {
    const GroupConfig config = make_group_config(rank, size, options, {});
    if (size > 1) Device::of_this_process(config.settings);  // selects the network interface
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

void TorchBackend::setTimeout(Milliseconds timeout) {
  const GilRelease gil_release;
  options_->timeout = timeout;
  router_.set_timeout(timeout);
}

c10d::ErrorType TorchBackend::getError() {
  const GilRelease gil_release;
  return queue_.failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void TorchBackend::eagerConnectSingleDevice(at::Device) {
  queue_
      .run({c10d::OpType::BARRIER, "fsccl:connect", false, options_->timeout}, {},
           [](Group& g, const Deadline& d) { g.barrier(d); })
      ->wait(kNoTimeout);
}

void TorchBackend::abort() {
  if (group_->is_forked_child()) return;
  const GilRelease gil_release;
  group_->abort("the program aborted the group");
  router_.abort();
}

// Lets queued operations finish. Once they make no progress, leaves the group, which ends them; for
// other ranks this one has left.
void TorchBackend::shutdown() {
  if (group_->is_forked_child()) return;
  const GilRelease gil_release;
  if (!queue_.finish()) {
    group_->shutdown();
    router_.abort();
  }
  queue_.executor()->stop();
  router_.stop();
  group_->shutdown();
  callbacks_->stop();
}

namespace {

std::map<int, std::pair<uint64_t, uint64_t>> traffic_by_rank(
    const std::vector<Transport::Traffic>& sent) {
  std::map<int, std::pair<uint64_t, uint64_t>> out;
  for (const Transport::Traffic& t : sent) {
    const int rank = static_cast<int>(out.size());
    out[rank] = {t.messages, t.bytes};
  }
  return out;
}

}  // namespace

std::map<int, std::pair<uint64_t, uint64_t>> TorchBackend::traffic() const {
  return traffic_by_rank(group_->traffic());
}

std::map<int, std::pair<uint64_t, uint64_t>> TorchBackend::datagrams() const {
  return traffic_by_rank(group_->datagram_traffic());
}

WorkPtr TorchBackend::send(Tensors& tensors, int to, int tag) {
  return send_or_receive(c10d::OpType::SEND, "fsccl:send", tensors, to, tag);
}

WorkPtr TorchBackend::recv(Tensors& tensors, int from, int tag) {
  return send_or_receive(c10d::OpType::RECV, "fsccl:recv", tensors, from, tag);
}

WorkPtr TorchBackend::recvAnysource(Tensors& tensors, int tag) {
  return send_or_receive(c10d::OpType::RECVANYSOURCE, "fsccl:recvAnySource", tensors, Group::kAnySource,
                         tag);
}

}  // namespace fsccl
