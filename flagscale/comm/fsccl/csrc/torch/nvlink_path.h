// A group's collectives of CUDA tensors on the NVLink engine: one kernel on a stream.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../nvlink/engine.h"
#include "nvlink_watch.h"
#include "registration.h"
#include "work.h"

namespace fsccl {

// An operation on a stream. One on the caller's own stream records nothing unless someone on
// another stream waits for it, who then also waits for what was put on the stream meanwhile. One
// on a stream beside it has its own `end`: asynchronous operations are there to be overlapped.
class NvlinkWork : public c10d::Work {
 public:
  NvlinkWork(int rank, c10d::OpType type, const char* title, uint64_t sequence,
             std::vector<at::Tensor> outputs, c10::Stream stream,
             std::shared_ptr<nvlink::Communicator> kernels, std::shared_ptr<Group> group,
             std::optional<c10::Event> end)
      : Work(rank, type, title, outputs),
        outputs_(std::move(outputs)),
        stream_(stream),
        kernels_(std::move(kernels)),
        group_(std::move(group)),
        sequence_(sequence),
        end_(std::move(end)) {}

  bool isCompleted() override { return exception() || end().query(); }
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override {
    const auto why = kernels_->failure();
    if (!why) return nullptr;
    // The host has ended the wait, and knows why.
    const auto known = group_->failure();
    return torch_error(known ? Error(why->fault, why->rank, *known) : *why);
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
  std::shared_ptr<nvlink::Communicator> kernels_;
  std::shared_ptr<Group> group_;
  uint64_t sequence_;
  std::optional<c10::Event> end_;
};

class NvlinkPath {
 public:
  using Exchange = Registration::Exchange;

  // Why there is no path: of GPUs that are not made for it, or because something does not work.
  struct Trouble {
    bool unforeseen = false;
    std::string text;  // empty: there is one
  };

  // Every rank calls it. Null, on all of them, if any cannot, and then `why` is set.
  static std::unique_ptr<NvlinkPath> connect(int device, const std::shared_ptr<Group>& group,
                                             std::chrono::milliseconds timeout,
                                             const Exchange& exchange, Trouble* why) {
    std::unique_ptr<NvlinkPath> path(new NvlinkPath(group));
    const int rank = group->rank(), size = group->size();
    std::string card, trouble;
    const auto attempt = [&](const std::function<void()>& step) {
      try {
        if (trouble.empty()) step();
      } catch (const Error& e) {
        trouble = (e.fault == Fault::kMismatch ? kForeseen : kUnforeseen) + e.what();
      } catch (const std::exception& e) {
        trouble = kUnforeseen + e.what();
      }
    };
    attempt([&] {
      nvlink::Engine* const engine = nvlink::Engine::of(device);
      if (engine == nullptr) throw Error(Fault::kSystem, rank, "no NVLink engine is installed");
      const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
      guard.getStream({c10::kCUDA, static_cast<c10::DeviceIndex>(device)}).native_handle();
      const auto ns = static_cast<nvlink::u64>(std::chrono::nanoseconds(timeout).count());
      path->kernels_ = std::make_shared<nvlink::Communicator>(*engine, rank, size, ns);
      card = path->kernels_->card();
    });
    const auto cards = exchange(card);
    attempt([&] { path->kernels_->connect(cards); });
    for (const std::string& other : exchange(trouble)) {
      // Of one rank's trouble, others have troubles that follow from it.
      const bool unforeseen = other.rfind(kUnforeseen, 0) == 0;
      if (other.empty() || why->unforeseen || (!unforeseen && !why->text.empty())) continue;
      *why = {unforeseen, other.substr(kForeseen.size())};
    }
    if (!why->text.empty()) return nullptr;
    std::vector<std::string> names;
    for (int p = 0; p < size; ++p) names.push_back(group->name(p));
    path->kernels_->call_ranks(std::move(names));
    NvlinkWatch::get().add(group, path->kernels_);
    return path;
  }

  ~NvlinkPath() { NvlinkWatch::get().remove(kernels_.get()); }

  // What was put on streams may end; what then still waits for others is given up.
  void finish(std::chrono::milliseconds limit) {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (!kernels_->failure() && !kernels_->idle()) {
      if (std::chrono::steady_clock::now() > until) kernels_->abort();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
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
    if (!kernels_->run(call)) return std::nullopt;
    std::optional<c10::Event> end;
    if (beside) {
      end.emplace(device.type()).record(stream);
      in.record_stream(stream);
      out.record_stream(stream);
    }
    return c10::make_intrusive<NvlinkWork>(rank, type, title, sequence,
                                           std::vector<at::Tensor>{out}, stream, kernels_, group_,
                                           std::move(end));
  }

  Registration registration(Exchange exchange) {
    return Registration(*kernels_, std::move(exchange));
  }

  const char* last_algorithm() const {
    constexpr const char* kWords[] = {"NVLink",           "NVLink, flagged", "NVLink, lines",
                                      "NVLink, two-shot", "NVLink, staged",  "NVLink, direct"};
    static_assert(std::size(kWords) == nvlink::kAlgorithms, "one for each");
    return kWords[static_cast<size_t>(kernels_->last_algorithm())];
  }

  std::optional<Error> failure() const { return kernels_->failure(); }
  void abort() { kernels_->abort(); }

 private:
  static constexpr size_t kWorthAStream = 1 << 20;
  // How the ranks tell each other which of the two it is.
  inline static const std::string kForeseen = "=", kUnforeseen = "!";

  explicit NvlinkPath(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  const c10::Stream& side(const c10::Stream& user) {
    if (!side_) {
      side_ = c10::impl::VirtualGuardImpl(user.device_type())
                  .getStreamFromGlobalPool(user.device(), /*isHighPriority=*/true);
    }
    return *side_;
  }

  std::shared_ptr<Group> group_;
  std::shared_ptr<nvlink::Communicator> kernels_;
  std::optional<c10::Stream> side_;
};

}  // namespace fsccl
