// A group's collectives of CUDA tensors on the NVLink engine: one kernel on a stream.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../nvlink/engine.h"
#include "registration.h"
#include "work.h"

namespace fsccl {

// An operation on a stream. Nothing is recorded unless someone on another stream waits for it;
// waiting for what was put on the stream later too is then correct, only later.
class NvlinkWork : public c10d::Work {
 public:
  NvlinkWork(int rank, c10d::OpType type, const char* title, uint64_t sequence,
             std::vector<at::Tensor> outputs, c10::Stream stream,
             std::shared_ptr<nvlink::Communicator> group)
      : Work(rank, type, title, outputs),
        outputs_(std::move(outputs)),
        stream_(stream),
        group_(std::move(group)),
        sequence_(sequence) {}

  bool isCompleted() override { return exception() || end().query(); }
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override {
    const auto why = group_->failure();
    return why ? torch_error(*why) : nullptr;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  void synchronize() override {
    if (const auto error = exception()) std::rethrow_exception(error);
    const c10::Device device = stream_.device();
    const c10::Stream now = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (now != stream_) end().block(now);
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_.device()});
    const c10::StreamGuard on(stream_);
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  c10::Event& end() {
    if (!end_) {
      end_.emplace(stream_.device_type());
      end_->record(stream_);
    }
    return *end_;
  }

  std::vector<at::Tensor> outputs_;
  c10::Stream stream_;
  std::shared_ptr<nvlink::Communicator> group_;
  uint64_t sequence_;
  std::optional<c10::Event> end_;
};

class NvlinkPath {
 public:
  using Exchange = Registration::Exchange;

  // Every rank calls it. Null, on all of them, if any cannot; `why` then says why, if it knows.
  static std::unique_ptr<NvlinkPath> connect(int device, int rank, int size,
                                             std::chrono::milliseconds timeout,
                                             const Exchange& exchange, std::string* why) {
    std::unique_ptr<NvlinkPath> path(new NvlinkPath);
    std::string card, trouble;
    const auto attempt = [&](const std::function<void()>& step) {
      try {
        if (trouble.empty()) step();
      } catch (const std::exception& e) {
        trouble = e.what();
      }
    };
    attempt([&] {
      nvlink::Engine* const engine = nvlink::Engine::of(device);
      if (engine == nullptr) throw Error(Fault::kSystem, rank, "no NVLink engine is installed");
      const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
      guard.getStream({c10::kCUDA, static_cast<c10::DeviceIndex>(device)}).native_handle();
      const auto ns = static_cast<nvlink::u64>(std::chrono::nanoseconds(timeout).count());
      path->group_ = std::make_shared<nvlink::Communicator>(*engine, rank, size, ns);
      card = path->group_->card();
    });
    const auto cards = exchange(card);
    attempt([&] { path->group_->connect(cards); });
    for (const std::string& other : exchange(trouble)) {
      if (why->empty()) *why = other;
    }
    return why->empty() ? std::move(path) : nullptr;
  }

  // What is asynchronous and takes long goes to a stream of its own, so that the caller's next
  // kernels run beside it. That is this rank's own affair: which library does the operation is not,
  // so it does not depend on whether the call is asynchronous.
  std::optional<c10::intrusive_ptr<c10d::Work>> run(nvlink::Call call, bool async, int rank,
                                                    c10d::OpType type, const char* title,
                                                    uint64_t sequence, const at::Tensor& in,
                                                    const at::Tensor& out) {
    const c10::Device device = out.device();
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream user = guard.getStream(device);
    const bool beside = async && out.nbytes() + in.nbytes() > kWorthAStream;
    const c10::Stream stream = beside ? side(user) : user;
    if (beside) {
      c10::Event begin(device.type());
      begin.record(user);
      begin.block(stream);
    }
    call.stream = stream.native_handle();
    if (!group_->run(call)) return std::nullopt;
    if (beside) {
      in.record_stream(stream);
      out.record_stream(stream);
    }
    return c10::make_intrusive<NvlinkWork>(rank, type, title, sequence,
                                           std::vector<at::Tensor>{out}, stream, group_);
  }

  Registration registration(Exchange exchange) {
    return Registration(*group_, std::move(exchange));
  }

  const char* last_algorithm() const {
    constexpr const char* kWords[] = {"NVLink", "NVLink, flagged", "NVLink, two-shot",
                                      "NVLink, staged", "NVLink, direct"};
    static_assert(std::size(kWords) == nvlink::kAlgorithms, "one for each");
    return kWords[static_cast<size_t>(group_->last_algorithm())];
  }

  void abort() { group_->abort(); }

 private:
  static constexpr size_t kWorthAStream = 1 << 20;

  NvlinkPath() = default;

  const c10::Stream& side(const c10::Stream& user) {
    if (!side_) {
      side_ = c10::impl::VirtualGuardImpl(user.device_type())
                  .getStreamFromGlobalPool(user.device(), /*isHighPriority=*/true);
    }
    return *side_;
  }

  std::shared_ptr<nvlink::Communicator> group_;
  std::optional<c10::Stream> side_;
};

}  // namespace fsccl
