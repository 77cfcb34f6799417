#include "bounded_path.h"

#include <algorithm>
#include <thread>

#include "../datagram/bounded_all_reduce.h"
#include "../device/device_streams.h"

namespace fsccl {
namespace {

// The caller's tensor, and its copy in pinned host memory, which the core reduces.
struct HostCopy {
  at::Tensor caller_tensor, host_copy;
  Reduction reduction;
};

// Bounded all_reduces are for gradients only.
bool is_floating_gradient(const at::Tensor& t) {
  return t.defined() && t.layout() == at::kStrided && at::isFloatingType(t.scalar_type()) &&
         !c10::isFloat8Type(t.scalar_type());
}

// Waits until copies to the host have ended. Other ranks wait meanwhile, so a rank that fails here
// fails the group.
void wait_for_copies(const c10::Event& copies_done, Group& group, uint64_t sequence,
                     const Deadline& d) {
  constexpr std::chrono::microseconds kPollInterval(50);
  while (!copies_done.query()) {
    group.check_peers();
    if (d.passed()) {
      group.fail("all_reduce", sequence,
                 Error(Fault::kTimeout, group.rank(),
                       group.name(group.rank()) +
                           ": its device did not finish earlier work within " + d.text()));
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace

bool BoundedPath::supports_tensors(const Tensors& tensors) const {
  return queue_.group().config().settings.bounded.enabled &&
         std::all_of(tensors.begin(), tensors.end(), is_floating_gradient);
}

// Returns whether the group's ranks can exchange datagrams. The first call connects them, and is
// made by all ranks.
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
  bool any_eligible = false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    any_eligible = any_eligible || datagram::BoundedAllReduce::is_eligible(settings, reductions[i],
                                                                           tensors[i].nbytes());
  }
  if (!any_eligible || router_.group_kind() == Router::GroupKind::kHost || !connect())
    return std::nullopt;
  if (!tensors[0].is_cpu()) return all_reduce_through_host(info, tensors, reductions);
  auto buffers = contiguous_tensors(tensors, TensorAccess::kReadWrite, {"all_reduce", at::kCPU});
  return queue_.run(info, tensors, all_reduce_each(std::move(buffers), std::move(reductions)));
}

WorkPtr BoundedPath::all_reduce_through_host(const OperationInfo& info, Tensors& tensors,
                                             const std::vector<Reduction>& reductions) {
  queue_.check_process();
  const at::Device device = router_.placement_of(tensors[0], "all_reduce").device;
  if (!streams_) streams_ = std::make_unique<CopyStreams>(device);
  const c10::Stream to_host = streams_->to_host, to_device = streams_->to_device;
  const c10::Stream caller_stream = streams_->guard.getStream(device);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_capturing(caller_stream),
      "fsccl: all_reduce in bounded time cannot be captured in a CUDA graph: "
      "the host takes part in it; FSCCL_TAIL_GROUPS selects the groups that use it");
  const at::NoGradGuard no_grad;
  c10::Event inputs_ready(device.type());
  inputs_ready.record(caller_stream);
  inputs_ready.block(to_host);
  std::vector<HostCopy> copies;
  {
    const c10::StreamGuard current(to_host);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor t = tensors[i].detach();
      const auto options = t.options().device(at::kCPU).pinned_memory(true);
      copies.push_back({t, at::empty(t.sizes(), options), reductions[i]});
      copies.back().host_copy.copy_(t, /*non_blocking=*/true);
      t.record_stream(to_host);
      t.record_stream(to_device);
    }
  }
  const auto copies_done = std::make_shared<c10::Event>(device.type());
  copies_done->record(to_host);
  auto work =
      c10::make_intrusive<StagedWork>(queue_.rank(), info, queue_.next_sequence(),
                                      tensors, queue_.shared_group(), queue_.executor(), to_device);
  return queue_.enqueue(info, work,
                        [work, copies, copies_done, to_device](Group& g, const Deadline& d) {
                          wait_for_copies(*copies_done, g, work->getSequencenumber(), d);
                          const at::NoGradGuard no_grad;
                          for (const HostCopy& c : copies) {
                            void* const data = c.host_copy.data_ptr();
                            // Contributions that one step omits are added to the next step of the
                            // same gradient bucket, which is identified by the address of the
                            // caller's memory, not of this copy.
                            g.all_reduce(data, data, elements_of(c.host_copy, c.reduction),
                                         c.reduction, d, c.caller_tensor.const_data_ptr());
                          }
                          const c10::StreamGuard current(to_device);
                          for (const HostCopy& c : copies)
                            c.caller_tensor.copy_(c.host_copy, /*non_blocking=*/true);
                          work->record_end();
                        });
}

}  // namespace fsccl
