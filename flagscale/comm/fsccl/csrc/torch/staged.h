// A sum of a device's memory that the core does in host memory, in bounded time (datagram/tail.h):
// it is copied there, summed over all ranks by their core, and copied back, on two streams of its
// own beside the caller's work.
//
// As with gloo, wait() blocks the caller until the sum is there, for nobody can tell before how long
// the network takes; and then makes the caller's current stream wait for the copy back.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "work.h"

namespace fsccl {

// Of one device: where copies to the host are enqueued, and those from it.
struct Staging {
  explicit Staging(at::Device device)
      : guard(device.type()),
        away(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
        back(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

  c10::impl::VirtualGuardImpl guard;
  c10::Stream away, back;
};

class StagedWork : public CollectiveWork {
 public:
  // `back`: where the operation ends.
  StagedWork(int rank, c10d::OpType type, const char* title, uint64_t sequence,
             std::vector<at::Tensor> outputs, std::weak_ptr<Group> group,
             std::weak_ptr<Executor> executor, c10::Stream back)
      : CollectiveWork(rank, type, title, sequence, std::move(outputs), std::move(group),
                       std::move(executor)),
        back_(back),
        end_(back.device_type()) {}

  // What has been enqueued on `back` so far is all. Before end().
  void enqueued() {
    end_.record(back_);
    enqueued_ = true;
  }

  bool isCompleted() override {
    return Work::isCompleted() && (!enqueued_ || end_.query());
  }
  // torch calls it at the end of wait(), where it holds the work's lock.
  void synchronize() override {
    if (!enqueued_) return;
    end_.block(c10::impl::VirtualGuardImpl(back_.device_type()).getStream(back_.device()));
  }

 private:
  FuturePtr make_future() const override { return new_future({back_.device()}); }
  void mark(c10::ivalue::Future& future, const std::exception_ptr& error) override {
    const c10::StreamGuard on(back_);  // who uses its value has his stream wait for this one
    CollectiveWork::mark(future, error);
  }

  const c10::Stream back_;
  c10::Event end_;
  std::atomic<bool> enqueued_{false};
};

}  // namespace fsccl
