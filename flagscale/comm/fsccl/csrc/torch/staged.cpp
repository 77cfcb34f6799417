// all_reduces in bounded time of groups that have ranks on devices: whose memory that is, and how it
// comes to the core.
#include <algorithm>
#include <thread>

#include "../datagram/tail.h"
#include "../device/stream_tracks.h"
#include "backend.h"
#include "devices.h"

namespace fsccl {
namespace {

// A tensor of the user's, and its copy that the core sums.
struct StagedPart {
  at::Tensor user, host;
  Reduction how;
};

bool boundable(const at::Tensor& t) {
  return t.defined() && t.layout() == at::kStrided && at::isFloatingType(t.scalar_type()) &&
         !c10::isFloat8Type(t.scalar_type());
}

// Other ranks wait meanwhile: who fails here tells them.
void await_device(const c10::Event& copied, Group& group, uint64_t sequence, const Deadline& d) {
  constexpr std::chrono::microseconds kGlance(50);
  while (!copied.query()) {
    group.look();
    if (d.passed()) {
      group.fail("all_reduce", sequence,
                 Error(Fault::kTimeout, group.rank(),
                       group.name(group.rank()) + ": its device has not done within " + d.text() +
                           " what it was told to do before"));
    }
    std::this_thread::sleep_for(kGlance);
  }
}

}  // namespace

// Whether the group has a way for datagrams. The first call connects: all ranks come here with it.
bool TorchBackend::has_tail() {
  if (!has_tail_) {
    const auto has = std::make_shared<bool>(false);
    run_on_host({c10d::OpType::BARRIER, "fsccl:tail", false, c10d::kUnsetTimeout}, {},
                [has](Group& g, const Deadline& d) { *has = g.has_tail(d); })
        ->wait(kNoTimeout);
    has_tail_ = *has;
  }
  return *has_tail_;
}

// Ranks must come to the same answer: it follows from what is the same in all of their calls.
std::optional<TorchBackend::WorkPtr> TorchBackend::in_bounded_time(const Call& call,
                                                                   Tensors& tensors,
                                                                   const c10d::ReduceOp& op) {
  const TailSettings& tail = group_->config().settings.tail;
  if (!tail.bounded || !std::all_of(tensors.begin(), tensors.end(), boundable)) return std::nullopt;
  std::vector<Reduction> how;
  bool any = false;
  for (const at::Tensor& t : tensors) {
    how.push_back(all_reduction_of(t, op));
    any = any || datagram::Tail::takes(tail, how.back(), t.nbytes());
  }
  // Where all ranks are hosts' the core does all, and asks itself.
  if (!any || kinds() == Kinds::kHosts || !has_tail()) return std::nullopt;
  if (!tensors[0].is_cpu()) return staged(call, tensors, how);
  auto list = flats(tensors, Flat::kReadWrite, {"all_reduce", at::kCPU});
  return run_on_host(call, tensors, all_reduces_of(std::move(list), std::move(how)));
}

TorchBackend::WorkPtr TorchBackend::staged(const Call& call, Tensors& tensors,
                                           const std::vector<Reduction>& how) {
  check_process();
  const at::Device device = site_of(tensors[0], "all_reduce").device;
  if (!staging_) staging_ = std::make_unique<Staging>(device);
  const c10::Stream away = staging_->away, back = staging_->back;
  const c10::Stream user = staging_->guard.getStream(device);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_capturing(user), "fsccl: all_reduce in bounded time cannot be captured in a CUDA graph: "
      "the host takes part in it; FSCCL_TAIL_GROUPS names the groups that are meant");
  const at::NoGradGuard no_grad;
  c10::Event given(device.type());
  given.record(user);
  given.block(away);
  std::vector<StagedPart> parts;
  {
    const c10::StreamGuard on(away);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor t = tensors[i].detach();
      const auto options = t.options().device(at::kCPU).pinned_memory(true);
      parts.push_back({t, at::empty(t.sizes(), options), how[i]});
      parts.back().host.copy_(t, /*non_blocking=*/true);
      t.record_stream(away);
      t.record_stream(back);
    }
  }
  const auto copied = std::make_shared<c10::Event>(device.type());
  copied->record(away);
  auto work = c10::make_intrusive<StagedWork>(rank_, call.type, call.title, ++sequence_, tensors,
                                              group_, executor_, back);
  return start(call, work, [work, parts, copied, back](Group& g, const Deadline& d) {
    await_device(*copied, g, work->getSequencenumber(), d);
    const at::NoGradGuard alone;
    for (const StagedPart& p : parts) {
      void* const data = p.host.data_ptr();
      g.all_reduce(data, data, elements_of(p.host, p.how), p.how, d, p.user.const_data_ptr());
    }
    const c10::StreamGuard on(back);
    for (const StagedPart& p : parts) p.user.copy_(p.host, /*non_blocking=*/true);
    work->enqueued();
  });
}

}  // namespace fsccl
