#include "nvlink_path.h"

#include <functional>
#include <iterator>
#include <thread>

#include "nvlink_watchdog.h"

namespace fsccl {
namespace {

// An asynchronous operation of more bytes runs on a side stream. For fewer, the two events that
// this takes cost more than the overlap saves.
constexpr size_t kSideStreamBytes = 1 << 20;
// First character of the errors that ranks exchange while they connect: whether a rank could not
// connect for an expected reason, such as GPUs without NVLink.
const std::string kExpectedErrorMark = "=", kUnexpectedErrorMark = "!";

}  // namespace

std::exception_ptr NvlinkWork::exception() const {
  const auto kernel_error = kernels_->failure();
  if (!kernel_error) return nullptr;
  // If the host has ended the wait, the group's error names the cause.
  const auto group_error = group_->failure();
  return torch_error(group_error ? Error(kernel_error->fault, kernel_error->rank, *group_error)
                                 : *kernel_error);
}

void NvlinkWork::synchronize() {
  if (const auto error = exception()) std::rethrow_exception(error);
  const c10::Device device = stream_.device();
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (current != stream_) end().block(current);
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
}

FuturePtr NvlinkWork::getFuture() {
  auto future = new_future({stream_.device()});
  const c10::StreamGuard current(stream_);
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

c10::Event& NvlinkWork::end() {
  if (!end_event_) {
    end_event_.emplace(stream_.device_type());
    end_event_->record(stream_);
  }
  return *end_event_;
}

std::unique_ptr<NvlinkPath> NvlinkPath::connect(int device, const std::shared_ptr<Group>& group,
                                                std::chrono::milliseconds timeout,
                                                const Exchange& exchange,
                                                ConnectFailure* connect_failure) {
  std::unique_ptr<NvlinkPath> path(new NvlinkPath(group));
  const int rank = group->rank(), size = group->size();
  std::string own_info, own_error;
  const auto attempt = [&](const std::function<void()>& step) {
    try {
      if (own_error.empty()) step();
    } catch (const Error& e) {
      own_error =
          (e.fault == Fault::kMismatch ? kExpectedErrorMark : kUnexpectedErrorMark) + e.what();
    } catch (const std::exception& e) {
      own_error = kUnexpectedErrorMark + e.what();
    }
  };
  attempt([&] {
    nvlink::Engine* const engine = nvlink::Engine::find_or_install(device);
    if (engine == nullptr) throw Error(Fault::kSystem, rank, "no NVLink engine is installed");
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    guard.getStream({c10::kCUDA, static_cast<c10::DeviceIndex>(device)}).native_handle();
    const auto ns = static_cast<nvlink::u64>(std::chrono::nanoseconds(timeout).count());
    path->kernels_ = std::make_shared<nvlink::Communicator>(*engine, rank, size, ns);
    own_info = path->kernels_->peer_info();
  });
  const auto infos = exchange(own_info);
  attempt([&] { path->kernels_->connect(infos); });
  for (const std::string& error : exchange(own_error)) {
    // An error of one rank causes errors on others, so the first unexpected one is reported.
    const bool is_unexpected = error.rfind(kUnexpectedErrorMark, 0) == 0;
    if (error.empty() || connect_failure->is_unexpected ||
        (!is_unexpected && !connect_failure->text.empty()))
      continue;
    *connect_failure = {is_unexpected, error.substr(kExpectedErrorMark.size())};
  }
  if (!connect_failure->text.empty()) return nullptr;
  std::vector<std::string> names;
  for (int p = 0; p < size; ++p) names.push_back(group->name(p));
  path->kernels_->set_rank_names(std::move(names));
  NvlinkWatchdog::get().add(group, path->kernels_);
  return path;
}

NvlinkPath::~NvlinkPath() { NvlinkWatchdog::get().remove(kernels_.get()); }

void NvlinkPath::finish(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!kernels_->failure() && !kernels_->idle()) {
    if (std::chrono::steady_clock::now() > deadline) kernels_->abort();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::optional<WorkPtr> NvlinkPath::run(nvlink::Call call, const OperationInfo& info, int rank,
                                       uint64_t sequence, const at::Tensor& in,
                                       const at::Tensor& out) {
  const c10::Device device = out.device();
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream caller_stream = guard.getStream(device);
  const bool use_side_stream = info.async && out.nbytes() + in.nbytes() > kSideStreamBytes;
  const c10::Stream stream = use_side_stream ? side_stream(caller_stream) : caller_stream;
  if (use_side_stream) {
    c10::Event begin(device.type());
    begin.record(caller_stream);
    begin.block(stream);
  }
  call.stream = stream.native_handle();
  if (!kernels_->run(call)) return std::nullopt;
  std::optional<c10::Event> end;
  if (use_side_stream) {
    end.emplace(device.type()).record(stream);
    in.record_stream(stream);
    out.record_stream(stream);
  }
  return c10::make_intrusive<NvlinkWork>(rank, info, sequence, std::vector<at::Tensor>{out}, stream,
                                         kernels_, group_, std::move(end));
}

const char* NvlinkPath::last_algorithm() const {
  constexpr const char* kAlgorithmNames[] = {"NVLink",         "NVLink, flagged",
                                             "NVLink, lines",  "NVLink, two-shot",
                                             "NVLink, staged", "NVLink, direct"};
  static_assert(std::size(kAlgorithmNames) == nvlink::kAlgorithms, "one for each");
  return kAlgorithmNames[static_cast<size_t>(kernels_->last_algorithm())];
}

const c10::Stream& NvlinkPath::side_stream(const c10::Stream& caller_stream) {
  if (!side_stream_) {
    side_stream_ = c10::impl::VirtualGuardImpl(caller_stream.device_type())
                       .getStreamFromGlobalPool(caller_stream.device(), /*isHighPriority=*/true);
  }
  return *side_stream_;
}

}  // namespace fsccl
