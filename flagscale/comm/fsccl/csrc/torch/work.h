// What an operation returns: something to wait for.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "../core/executor.h"
#include "../core/group.h"
#include "convert.h"

namespace fsccl {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

inline FuturePtr new_future(std::vector<c10::Device> devices = {}) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(devices));
}

// A core error as the exception that torch's own backends throw.
inline std::exception_ptr torch_error(const std::exception& e) {
  const std::string text = e.what();
  const std::string prefixed = text.rfind("fsccl: ", 0) == 0 ? text : "fsccl: " + text;
  const auto* core = dynamic_cast<const Error*>(&e);
  const bool usage = core != nullptr && core->fault == Fault::kUsage;
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (usage) return std::make_exception_ptr(c10::ValueError(here, prefixed));
  return std::make_exception_ptr(c10::DistBackendError(here, prefixed));
}

// A collective. It is completed by the thread that ran it.
class CollectiveWork : public c10d::Work {
 public:
  // `group`: who can say whom the operation waits for. `executor`: who runs it; a callback there
  // that waits for it has it run (executor.h).
  CollectiveWork(int rank, c10d::OpType type, const char* title, uint64_t sequence,
                 std::vector<at::Tensor> outputs, std::weak_ptr<Group> group,
                 std::weak_ptr<Executor> executor)
      : Work(rank, type, title, outputs),
        title_(title),
        outputs_(std::move(outputs)),
        sequence_(sequence),
        group_(std::move(group)),
        executor_(std::move(executor)) {}

  // A limit ends the wait and not the operation, which may be waited for again: as with gloo.
  bool wait(std::chrono::milliseconds limit) override {
    help();
    if (limit != kNoTimeout && !done_within(limit)) {
      std::rethrow_exception(torch_error(Error(Fault::kTimeout, -1, late(limit))));
    }
    return Work::wait(kNoTimeout);
  }

  // Who waits goes on.
  void end(std::exception_ptr error) { finish(std::move(error)); }
  // The future is completed, if somebody has asked for it, which calls the user's callbacks.
  void tell() {
    FuturePtr future;
    {
      std::lock_guard<std::mutex> hold(future_mutex_);
      over_ = true;
      future = future_;
    }
    if (future) mark(*future, exception());
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  FuturePtr getFuture() override {
    help();
    std::lock_guard<std::mutex> hold(future_mutex_);
    if (!future_) {
      future_ = make_future();
      if (over_) mark(*future_, exception());
    }
    return future_;
  }

 protected:
  virtual FuturePtr make_future() const { return new_future(); }
  virtual void mark(c10::ivalue::Future& future, const std::exception_ptr& error) {
    if (error) {
      future.setError(error);
    } else {
      future.markCompleted(c10::IValue(outputs_));
    }
  }

 private:
  void help() {
    const auto done = [this] { return Work::isCompleted(); };
    if (done()) return;
    if (const auto executor = executor_.lock()) executor->help(done);
  }

  bool done_within(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> hold(mutex_);
    return cv_.wait_for(hold, limit, [this] { return completed_; });
  }

  std::string late(std::chrono::milliseconds limit) const {
    const Deadline d = Deadline::after(limit);
    std::string out = title_.substr(title_.find(':') + 1) + " #" + std::to_string(sequence_) +
                      ": not done within the " + d.text() + " of this wait";
    const auto group = group_.lock();
    const auto asking = std::min(Deadline::Ms(1000), limit / 5);
    const std::string whom = group ? group->awaited_name(Deadline::after(asking)) : "";
    return whom.empty() ? out : out + ": " + whom + " has not come";
  }

  std::string title_;  // "fsccl:all_reduce"
  std::vector<at::Tensor> outputs_;
  uint64_t sequence_;
  std::weak_ptr<Group> group_;
  std::weak_ptr<Executor> executor_;
  std::mutex future_mutex_;
  FuturePtr future_;
  bool over_ = false;
};

// A send or a receive: the core's messenger moves it in the background, no thread of ours waits.
class MessageWork : public c10d::Work {
 public:
  MessageWork(int rank, c10d::OpType type, const char* title, std::shared_ptr<Group> group,
              RequestPtr request, Flat memory, Deadline::Ms timeout, const at::Tensor& tensor,
              std::shared_ptr<Executor> callbacks)
      : Work(rank, type, title, std::vector<at::Tensor>{tensor}),
        group_(std::move(group)),
        request_(std::move(request)),
        memory_(std::move(memory)),
        timeout_(timeout),
        tensor_(tensor),
        callbacks_(std::move(callbacks)) {}
  ~MessageWork() override { settle(false); }

  // Who has seen it complete may read the tensor, without a wait().
  bool isCompleted() override {
    if (!request_->finished()) return false;
    settle(true);
    return true;
  }
  bool isSuccess() const override { return request_->finished() && !request_->error; }
  std::exception_ptr exception() const override {
    return request_->finished() && request_->error ? torch_error(*request_->error) : nullptr;
  }
  int sourceRank() const override { return request_->peer; }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  void synchronize() override { settle(true); }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool receives = opType_ != c10d::OpType::SEND;
    try {
      group_->wait(receives ? OpCode::kRecv : OpCode::kSend, request_,
                   Deadline::after(timeout == kNoTimeout ? timeout_ : timeout));
    } catch (const std::exception& e) {
      std::rethrow_exception(torch_error(e));
    }
    settle(true);
    return true;
  }

  FuturePtr getFuture() override {
    auto future = new_future();
    if (request_->finished()) {
      mark(*future);
      return future;
    }
    // Keeps this work, and with it the memory, until the request has finished. Not on the thread of
    // the messenger, which callbacks need.
    auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
    group_->notify(request_, [self, future, callbacks = callbacks_] {
      callbacks->run({[] {}, [self, future] { self->mark(*future); }}, false);
    });
    return future;
  }

 private:
  void mark(c10::ivalue::Future& future) {
    if (request_->error) {
      future.setError(torch_error(*request_->error));
    } else {
      settle(true);
      future.markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
    }
  }

  // Strided tensors get what came; once. A work that is dropped unfinished must not leave the
  // messenger writing to memory that is gone.
  void settle(bool wanted) {
    std::lock_guard<std::mutex> hold(settle_mutex_);
    if (!wanted) {
      keep_until_done();
    } else if (!settled_ && isSuccess()) {
      memory_.settle();
      settled_ = true;
      if (recordFunctionEndCallback_) {
        recordFunctionEndCallback_();
        recordFunctionEndCallback_ = nullptr;
      }
    }
  }
  void keep_until_done() {
    if (request_->finished() || group_->forked()) return;
    group_->notify(request_, [memory = memory_, tensor = tensor_] {});
  }

  std::shared_ptr<Group> group_;
  RequestPtr request_;
  Flat memory_;
  Deadline::Ms timeout_;
  at::Tensor tensor_;
  std::shared_ptr<Executor> callbacks_;
  std::mutex settle_mutex_;
  bool settled_ = false;
};

// Several works seen as one.
class ManyWork : public c10d::Work {
 public:
  explicit ManyWork(std::vector<c10::intrusive_ptr<c10d::Work>> all)
      : Work(-1, c10d::OpType::COALESCED), all_(std::move(all)) {}
  bool isCompleted() override {
    for (const auto& w : all_) {
      if (!w->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override {
    for (const auto& w : all_) {
      if (!w->isSuccess()) return false;
    }
    return true;
  }
  std::exception_ptr exception() const override {
    for (const auto& w : all_) {
      if (auto e = w->exception()) return e;
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& w : all_) w->wait(timeout);
    return true;
  }
  void synchronize() override {
    for (const auto& w : all_) w->synchronize();
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> out;
    for (const auto& w : all_) {
      for (auto& t : w->result()) out.push_back(t);
    }
    return out;
  }
  FuturePtr getFuture() override {
    auto out = new_future();
    auto left = std::make_shared<std::atomic<size_t>>(all_.size() + 1);
    auto self = c10::intrusive_ptr<ManyWork>::reclaim_copy(this);
    const auto one_done = [self, out, left](c10::ivalue::Future&) {
      if (--*left > 0) return;
      if (auto e = self->exception()) {
        out->setError(e);
      } else {
        out->markCompleted(c10::IValue(self->result()));
      }
    };
    for (const auto& w : all_) w->getFuture()->addCallback(one_done);
    one_done(*out);
    return out;
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> all_;
};

}  // namespace fsccl
