// Dispatch of collectives to the paths that dispatch.h lists, and of point-to-point messages.
#include "dispatch.h"

#include <algorithm>
#include <memory>

#include "../device/device_streams.h"
#include "backend.h"
#include "device_work.h"

namespace fsccl {

WorkPtr TorchBackend::dispatch(const CollectiveCall& call, NativeCall native_call,
                               Prepare prepare) {
  if (call.in_place) {
    const auto& [tensors, reduce_op] = *call.in_place;
    const auto reductions = [&, &list = tensors, &op = reduce_op] {
      std::vector<Reduction> out;
      for (const at::Tensor& t : list) out.push_back(all_reduction_of(t, op));
      return out;
    };
    if (auto work = bounded_.all_reduce(call.info, tensors, reductions)) return *work;
  }
  if (call.nvlink) {
    if (auto work = run_on_nvlink(call.info, *call.nvlink)) return *work;
  }
  if (auto work = run_natively(call.reference, native_call)) return *work;
  const Placement placement = router_.placement_of(call.reference, call.op);
  PreparedCollective prepared = prepare(placement);
  if (placement.device.is_cpu()) return run_on_host(call.info, std::move(prepared));
  return run_on_device(call.info, placement, std::move(prepared));
}

// All ranks must choose the same path, so the choice follows from properties that are the same in
// all of their calls.
std::optional<WorkPtr> TorchBackend::run_on_nvlink(const OperationInfo& info,
                                                   const NvlinkOperands& operands) {
  const auto [collective, in, out, reduce_op, root] = operands;
  const auto supported = [](const at::Tensor& t) {  // NCCL refuses others
    return t.defined() && t.is_cuda() && t.layout() == at::kStrided && t.is_contiguous();
  };
  if (queue_.coalescing() || !supported(in) || !supported(out)) return std::nullopt;
  NvlinkPath* const path = router_.nvlink_path(out);
  if (path == nullptr) return std::nullopt;
  queue_.check_failure(info.title);
  nvlink::Call call;
  call.collective = collective;
  call.timeout_ns =
      static_cast<nvlink::u64>(std::chrono::nanoseconds(queue_.timeout_of(info.timeout)).count());
  call.in = in.const_data_ptr();
  call.out = out.data_ptr();
  call.bytes = collective == nvlink::Collective::kAllGather ? in.nbytes() : out.nbytes();
  call.root = root;
  if (collective == nvlink::Collective::kAllToAll) call.bytes /= static_cast<size_t>(size_);
  if (reduce_op != nullptr) {
    // 8-bit floats have no kernel here.
    if (factor_is_tensor(*reduce_op) || c10::isFloat8Type(out.scalar_type())) return std::nullopt;
    call.reduction = reduction_of(out, *reduce_op, size_);
  }
  try {
    const uint64_t sequence = queue_.next_sequence();
    auto work = path->run(call, info, rank_, sequence, in, out);
    if (work) {
      queue_.record(info, sequence, out, path->completion_query());
      group_->set_last_algorithm(path->last_algorithm());
      group_->log_debug([&] {
        return std::string(info.title) + " #" + std::to_string(sequence) + " of " +
               std::to_string(out.nbytes()) + " bytes: " + path->last_algorithm();
      });
    }
    return work;
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

std::optional<WorkPtr> TorchBackend::run_natively(const at::Tensor& reference, NativeCall call) {
  const NativePtr native = router_.group_native(reference);
  if (!native) return std::nullopt;
  queue_.check_failure("a collective");
  group_->set_last_algorithm(router_.native_library().c_str());
  return queue_.call_native(native, call);
}

WorkPtr TorchBackend::run_on_host(const OperationInfo& info, PreparedCollective prepared) {
  return queue_.run(info, std::move(prepared.outputs),
                    [this, body = std::move(prepared.body)](Group& group, const Deadline& d) {
                      DeviceEngine* const engine = router_.host_engine(d);
                      if (engine == nullptr) return body(group, d);
                      try {
                        body(*engine, d);
                      } catch (const Error&) {
                        // The abandoned call may still write to its tensors, so they are leaked.
                        if (engine->abandoned()) new CollectiveBody(body);
                        throw;
                      }
                    });
}

// Enqueues the operation on the engine's streams, after the caller's work so far and, unless it is
// asynchronous, before the caller's later work.
WorkPtr TorchBackend::run_on_device(const OperationInfo& info, const Placement& placement,
                                    PreparedCollective prepared) {
  queue_.check_process();
  const Deadline d = Deadline::after(queue_.timeout_of(info.timeout));
  TORCH_CHECK_VALUE(!queue_.coalesces_native(), "fsccl: ", placement.op,
                    " between clusters cannot be coalesced with messages inside one");
  const c10::Stream caller_stream =
      c10::impl::VirtualGuardImpl(placement.device.type()).getStream(placement.device);
  router_.group_kind();
  const auto router_lock = router_.lock();
  try {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_capturing(caller_stream), "fsccl: ", placement.op,
        " between clusters cannot be captured in a CUDA graph, because the data that other "
        "clusters "
        "send is not part of the graph; groups of one cluster can be captured");
    DeviceEngine& engine = router_.engine(d);
    auto& streams = static_cast<DeviceStreams&>(engine.streams());
    TORCH_CHECK_VALUE(placement.device == streams.device(), "fsccl: ", placement.op,
                      " got a tensor on ", placement.device, ", but this group works on ",
                      streams.device());
    streams.wait_event(StreamId::kNative, streams.record_on(caller_stream));
    const StreamScope native(streams, StreamId::kNative);
    prepared.body(engine, d);
    auto pending = std::make_shared<PendingOperation>(info.title, queue_.next_sequence(),
                                                      streams.record(StreamId::kNative), d,
                                                      streams.take_word_waits());
    // The body holds references to the operation's tensors, the caller's as well as copies of them.
    pending->keep_alive = std::make_shared<CollectiveBody>(std::move(prepared.body));
    if (!info.async && !queue_.coalescing()) pending->end_event->block(caller_stream);
    router_.watchdog().add(pending);
    queue_.record(info, queue_.sequence(), prepared.outputs,
                  [weak = std::weak_ptr<PendingOperation>(pending)] {
                    const auto operation = weak.lock();
                    return !operation || operation->finished || operation->end_event->query();
                  });
    return queue_.collect(c10::make_intrusive<DeviceWork>(
        rank_, info, queue_.sequence(), std::move(prepared.outputs), std::move(pending),
        *streams.stream(StreamId::kNative)));
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

WorkPtr TorchBackend::send_or_receive(c10d::OpType type, const char* title, Tensors& tensors,
                                      int peer, int tag) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "fsccl: ", title, " takes one tensor, got ",
                    digits(tensors.size()));
  queue_.check_process();
  if (auto work = send_or_receive_natively(type, tensors, peer, tag)) return *work;
  const bool sends = type == c10d::OpType::SEND;
  ContiguousTensor buffer(tensors[0], sends ? TensorAccess::kRead : TensorAccess::kWrite,
                          {title, at::kCPU});
  const auto core_tag = static_cast<uint64_t>(static_cast<uint32_t>(tag));
  CollectiveFingerprint fingerprint;
  fingerprint.dtype = moved_dtype_of(buffer.get());
  const Deadline deadline = Deadline::after(options_->timeout);
  RequestPtr request;
  try {
    const BufferList memory = buffers_of(buffer.get());
    request = sends ? group_->send(peer, core_tag, memory, deadline, fingerprint)
                    : group_->recv(peer, core_tag, memory, deadline, fingerprint);
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
  queue_.record_message({type, title, true, c10d::kUnsetTimeout, tensors}, peer,
                        [weak = std::weak_ptr<Request>(request)] {
                          const auto message = weak.lock();
                          return !message || message->finished();
                        });
  return queue_.collect(c10::make_intrusive<MessageWork>(
      rank_, type, title, group_, std::move(request), std::move(buffer), options_->timeout,
      tensors[0], callbacks_));
}

// The native library sends messages of device tensors inside a cluster. All other messages go
// through host memory. The device engine sends none, because all ranks create it together, and only
// two ranks take part in a message.
std::optional<WorkPtr> TorchBackend::send_or_receive_natively(c10d::OpType type, Tensors& tensors,
                                                              int peer, int tag) {
  const at::Tensor& t = tensors[0];
  const auto call_for = [&](int native_peer) {
    return [&, native_peer](c10d::Backend& b) {
      if (type == c10d::OpType::RECVANYSOURCE) return b.recvAnysource(tensors, tag);
      return type == c10d::OpType::SEND ? b.send(tensors, native_peer, tag)
                                        : b.recv(tensors, native_peer, tag);
    };
  };
  if (auto work = run_natively(t, call_for(peer))) return work;
  if (router_.placement_of(t, "send or recv").device.is_cpu() || t.is_cpu()) return std::nullopt;
  router_.group_kind();
  const auto router_lock = router_.lock();
  try {
    router_.check_running();
    const RankPartition& clusters = router_.native_clusters();
    const auto& members = clusters.own_ranks();
    const bool any_source = type == c10d::OpType::RECVANYSOURCE;
    TORCH_CHECK_NOT_IMPLEMENTED(!any_source || members.size() == 1,
                                "fsccl: receiving from any source into a tensor on ", t.device(),
                                ": ", router_.native_library(), " does not offer that");
    const auto member = std::find(members.begin(), members.end(), peer);
    if (any_source || member == members.end()) return std::nullopt;
    return queue_.call_native(
        router_.cluster_native(clusters.own_part, clusters.own_index, members),
        call_for(static_cast<int>(member - members.begin())));
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

}  // namespace fsccl
