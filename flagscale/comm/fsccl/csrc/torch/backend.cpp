// The group's life, and how a call becomes a work. The operations are in operations.cpp.
#include "backend.h"

#include <Python.h>

#include <set>

#include "../core/per_process.h"
#include "store.h"

namespace fsccl {
namespace {

GroupConfig group_config(int rank, int size, const TorchBackend::Options& options,
                         const Native& native) {
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
    config.settings.tail.bounded = TailSettings::says_bounded(*options.tail);
    config.settings.tail.groups.clear();  // this one is meant
  }
  config.settings.check_pipeline();
  // torch gives the default group, of all ranks, an empty list.
  if (config.global_ranks.empty()) config.settings.check_clusters(size);
  config.native = native;
  return config;
}

// Threads that end here may want the interpreter for a callback.
class WithoutGil {
 public:
  WithoutGil() : saved_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }

 private:
  PyThreadState* saved_;
};

struct Living {
  std::mutex mutex;
  std::set<TorchBackend*> all;
};

Living& living() { return per_process<Living>(); }

}  // namespace

void TorchBackend::shutdown_all() {
  WithoutGil released;
  std::unique_lock<std::mutex> hold(living().mutex);
  const std::vector<TorchBackend*> all(living().all.begin(), living().all.end());
  for (TorchBackend* one : all) {
    // One may hold another, of its native cluster, and end it.
    if (living().all.count(one) == 0) continue;
    hold.unlock();
    one->shutdown();
    hold.lock();
  }
  Segment::await_kept(kLastOfDevice);
}

TorchBackend::TorchBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                           c10::intrusive_ptr<Options> options, Home home)
    : Backend(rank, size),
      options_(std::move(options)),
      home_(std::move(home)),
      executor_(std::make_shared<Executor>()),
      callbacks_(std::make_shared<Executor>()) {
  try {
    group_ = std::make_shared<Group>(std::make_unique<TorchStore>(std::move(store)),
                                     group_config(rank, size, *options_, home_.native));
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
  init();
  std::lock_guard<std::mutex> hold(living().mutex);
  living().all.insert(this);
}

TorchBackend::~TorchBackend() {
  if (group_->forked()) {  // all of it is the parent's, and stays as it is
    static_cast<void>(engine_.release());
    static_cast<void>(watch_.release());
    if (nvlink_) static_cast<void>(nvlink_->release());
    if (whole_) static_cast<void>(whole_->release());
    static_cast<void>(cluster_native_.release());
    return;
  }
  WithoutGil released;
  {
    std::lock_guard<std::mutex> hold(living().mutex);
    living().all.erase(this);
  }
  TorchBackend::shutdown();
}

void TorchBackend::check_process() const {
  try {
    group_->check_process();
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

void TorchBackend::setTimeout(Ms timeout) {
  options_->timeout = timeout;
  std::lock_guard<std::mutex> hold(device_mutex_);
  if (whole_ && *whole_) (*whole_)->setTimeout(timeout);
  if (cluster_native_) cluster_native_->setTimeout(timeout);
}

void TorchBackend::startCoalescing() { coalescing_ = true; }

TorchBackend::WorkPtr TorchBackend::endCoalescing() {
  coalescing_ = false;
  if (const NativePtr native = std::move(coalescing_native_)) {
    if (WorkPtr work = native->endCoalescing()) collected_.push_back(std::move(work));
  }
  auto all = std::move(collected_);
  collected_.clear();
  return c10::make_intrusive<ManyWork>(std::move(all));
}

TorchBackend::WorkPtr TorchBackend::collect(WorkPtr work) {
  if (coalescing_) collected_.push_back(work);
  return work;
}

c10d::ErrorType TorchBackend::getError() {
  const NvlinkPath* const path = connected_;
  const bool failed = group_->failure() || (path != nullptr && path->failure());
  return failed ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void TorchBackend::eagerConnectSingleDevice(at::Device) {
  run_on_host({c10d::OpType::BARRIER, "fsccl:connect", false, options_->timeout}, {},
              [](Group& g, const Deadline& d) { g.barrier(d); })
      ->wait(kNoTimeout);
}

void TorchBackend::abort() {
  if (group_->forked()) return;
  group_->abort("the program aborted the group");
  abort_devices();
}

// What is queued may still finish; what then still waits for others is given up.
void TorchBackend::shutdown() {
  if (group_->forked()) return;
  WithoutGil released;
  if (!finish_operations()) {
    group_->abort("the program ended with operations under way");
    abort_devices();
  }
  executor_->stop();
  stop_devices();
  group_->shutdown();
  callbacks_->stop();
}

bool TorchBackend::finish_operations() {
  for (uint64_t moved = group_->progress();;) {
    if (executor_->drain(kStandsStill)) return true;
    const uint64_t now = group_->progress();
    if (now == moved) return false;
    moved = now;
  }
}

TorchBackend::WorkPtr TorchBackend::run_on_host(const Call& call, Tensors outputs,
                                                std::function<void(Group&, const Deadline&)> body) {
  check_process();
  check_kernels(call.title);
  return start(call,
               c10::make_intrusive<CollectiveWork>(rank_, call.type, call.title, ++sequence_,
                                                   std::move(outputs), group_, executor_),
               std::move(body));
}

TorchBackend::WorkPtr TorchBackend::start(const Call& call,
                                          c10::intrusive_ptr<CollectiveWork> work,
                                          std::function<void(Group&, const Deadline&)> body) {
  const auto deadline_in = limit(call.timeout);
  auto job = [work, group = group_, deadline_in, body = std::move(body)] {
    std::exception_ptr error;
    try {
      body(*group, Deadline::after(deadline_in));
    } catch (const c10::Error&) {
      error = std::current_exception();
    } catch (const std::exception& e) {
      error = torch_error(e);
    }
    work->end(error);
  };
  executor_->run({std::move(job), [work] { work->tell(); }}, !call.async && !coalescing_);
  return collect(std::move(work));
}

namespace {

std::map<int, std::pair<uint64_t, uint64_t>> by_rank(const std::vector<Transport::Traffic>& sent) {
  std::map<int, std::pair<uint64_t, uint64_t>> out;
  for (const Transport::Traffic& t : sent) {
    const int rank = static_cast<int>(out.size());
    out[rank] = {t.messages, t.bytes};
  }
  return out;
}

}  // namespace

std::map<int, std::pair<uint64_t, uint64_t>> TorchBackend::traffic() const {
  return by_rank(group_->traffic());
}

std::map<int, std::pair<uint64_t, uint64_t>> TorchBackend::datagrams() const {
  return by_rank(group_->datagrams());
}

TorchBackend::WorkPtr TorchBackend::message(c10d::OpType type, const char* title, Tensors& tensors,
                                            int peer, int tag) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "fsccl: ", title, " takes one tensor, got ",
                    digits(tensors.size()));
  check_process();
  if (auto work = message_inside(type, tensors, peer, tag)) return *work;
  const bool sends = type == c10d::OpType::SEND;
  Flat flat(tensors[0], sends ? Flat::kRead : Flat::kWrite, Site{title, at::kCPU});
  const auto core_tag = static_cast<uint64_t>(static_cast<uint32_t>(tag));
  const Deadline deadline = Deadline::after(options_->timeout);
  RequestPtr request;
  try {
    request = sends ? group_->send(peer, core_tag, buffers_of(flat.get()), deadline)
                    : group_->recv(peer, core_tag, buffers_of(flat.get()), deadline);
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
  return collect(c10::make_intrusive<MessageWork>(rank_, type, title, group_, std::move(request),
                                                  std::move(flat), options_->timeout, tensors[0],
                                                  callbacks_));
}

TorchBackend::WorkPtr TorchBackend::send(Tensors& tensors, int to, int tag) {
  return message(c10d::OpType::SEND, "fsccl:send", tensors, to, tag);
}

TorchBackend::WorkPtr TorchBackend::recv(Tensors& tensors, int from, int tag) {
  return message(c10d::OpType::RECV, "fsccl:recv", tensors, from, tag);
}

TorchBackend::WorkPtr TorchBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(c10d::OpType::RECVANYSOURCE, "fsccl:recv_any", tensors, Group::kAnySource, tag);
}

}  // namespace fsccl
