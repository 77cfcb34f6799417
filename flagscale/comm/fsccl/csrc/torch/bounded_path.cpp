#include "bounded_path.h"

#include <algorithm>
#include <thread>

#include "../datagram/bounded_all_reduce.h"
#include "../device/device_streams.h"

namespace fsccl {
namespace {

// A tensor of the user's, and the pinned copy that the core reduces.
struct HostCopy {
  at::Tensor user, host;
  Reduction reduction;
};

// Bounded all_reduces are for gradients.
bool is_floating_gradient(const at::Tensor& t) {
  return t.defined() && t.layout() == at::kStrided && at::isFloatingType(t.scalar_type()) &&
         !c10::isFloat8Type(t.scalar_type());
}

// Waits until copies to the host have ended. Other ranks wait meanwhile, so a rank that fails here
// fails the group.
void wait_for_copies(const c10::Event& copied, Group& group, uint64_t sequence, const Deadline& d) {
  constexpr std::chrono::microseconds kPollInterval(50);
  while (!copied.query()) {
    group.check_peers();
    if (d.passed()) {
      group.fail("all_reduce", sequence,
                 Error(Fault::kTimeout, group.rank(),
                       group.name(group.rank()) + ": its device has not done within " + d.text() +
                           " what it was told to do before"));
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace

bool BoundedPath::allows(const Tensors& tensors) const {
  return queue_.group().config().settings.bounded.enabled &&
         std::all_of(tensors.begin(), tensors.end(), is_floating_gradient);
}

// Returns whether the group has a way for datagrams. The first call connects: all ranks come here
// with it.
bool BoundedPath::connect() {
  if (!connected_) {
    const auto connected = std::make_shared<bool>(false);
    queue_
        .run({c10d::OpType::BARRIER, "fsccl:tail", false, c10d::kUnsetTimeout}, {},
             [connected](Group& g, const Deadline& d) { *connected = g.has_bounded_all_reduce(d); })
        ->wait(kNoTimeout);
    connected_ = *connected;
  }
  return *connected_;
}

std::optional<WorkPtr> BoundedPath::all_reduce_as(const OperationInfo& info, Tensors& tensors,
                                                  std::vector<Reduction> reductions) {
  const BoundedSettings& settings = queue_.group().config().settings.bounded;
  bool any = false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    any = any ||
          datagram::BoundedAllReduce::is_eligible(settings, reductions[i], tensors[i].nbytes());
  }
  if (!any || router_.group_kind() == Router::GroupKind::kHost || !connect()) return std::nullopt;
  if (!tensors[0].is_cpu()) return all_reduce_through_host(info, tensors, reductions);
  auto buffers = contiguous_tensors(tensors, Access::kReadWrite, {"all_reduce", at::kCPU});
  return queue_.run(info, tensors, all_reduce_each(std::move(buffers), std::move(reductions)));
}

WorkPtr BoundedPath::all_reduce_through_host(const OperationInfo& info, Tensors& tensors,
                                             const std::vector<Reduction>& reductions) {
  queue_.check_process();
  const at::Device device = router_.placement_of(tensors[0], "all_reduce").device;
  if (!streams_) streams_ = std::make_unique<CopyStreams>(device);
  const c10::Stream to_host = streams_->to_host, to_device = streams_->to_device;
  const c10::Stream user = streams_->guard.getStream(device);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_capturing(user),
      "fsccl: all_reduce in bounded time cannot be captured in a CUDA graph: "
      "the host takes part in it; FSCCL_TAIL_GROUPS names the groups that are meant");
  const at::NoGradGuard no_grad;
  c10::Event inputs_ready(device.type());
  inputs_ready.record(user);
  inputs_ready.block(to_host);
  std::vector<HostCopy> copies;
  {
    const c10::StreamGuard current(to_host);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor t = tensors[i].detach();
      const auto options = t.options().device(at::kCPU).pinned_memory(true);
      copies.push_back({t, at::empty(t.sizes(), options), reductions[i]});
      copies.back().host.copy_(t, /*non_blocking=*/true);
      t.record_stream(to_host);
      t.record_stream(to_device);
    }
  }
  const auto copied = std::make_shared<c10::Event>(device.type());
  copied->record(to_host);
  auto work =
      c10::make_intrusive<StagedWork>(queue_.rank(), info.type, info.title, queue_.next_sequence(),
                                      tensors, queue_.shared_group(), queue_.executor(), to_device);
  return queue_.enqueue(info, work, [work, copies, copied, to_device](Group& g, const Deadline& d) {
    wait_for_copies(*copied, g, work->getSequencenumber(), d);
    const at::NoGradGuard no_grad;
    for (const HostCopy& c : copies) {
      void* const data = c.host.data_ptr();
      // Errors left out of one step are added to the next of the same bucket, which is known by the
      // address of the user's memory and not of this copy.
      g.all_reduce(data, data, elements_of(c.host, c.reduction), c.reduction, d,
                   c.user.const_data_ptr());
    }
    const c10::StreamGuard current(to_device);
    for (const HostCopy& c : copies) c.user.copy_(c.host, /*non_blocking=*/true);
    work->record_end();
  });
}

}  // namespace fsccl
