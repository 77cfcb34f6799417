// Implementations of c10d::Work, the handle on which a caller waits for an operation.
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
#include "gil.h"
#include "operation_info.h"

namespace fsccl {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

inline FuturePtr new_future(std::vector<c10::Device> devices = {}) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(devices));
}

// Returns the exception type that torch's own backends throw for such an error.
inline std::exception_ptr torch_error(const std::exception& e) {
  const std::string text = e.what();
  const std::string prefixed = text.rfind("fsccl: ", 0) == 0 ? text : "fsccl: " + text;
  const auto* core = dynamic_cast<const Error*>(&e);
  const bool usage = core != nullptr && core->fault == Fault::kUsage;
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (usage) return std::make_exception_ptr(c10::ValueError(here, prefixed));
  return std::make_exception_ptr(c10::DistBackendError(here, prefixed));
}

// A collective in host memory. The thread that ran it completes the work.
class CollectiveWork : public c10d::Work {
 public:
  // `group` names the rank for which the operation waits, in messages. `executor` runs the
  // operation; if a callback on the executor's thread waits for this work, the wait runs the queue
  // (core/executor.h).
  CollectiveWork(int rank, const OperationInfo& info, uint64_t sequence,
                 std::vector<at::Tensor> outputs, std::weak_ptr<Group> group,
                 std::weak_ptr<Executor> executor)
      : Work(rank, info.type, info.title, info.inputs.vec()),
        title_(info.title),
        outputs_(std::move(outputs)),
        sequence_(sequence),
        group_(std::move(group)),
        executor_(std::move(executor)) {}

  // As with gloo, a timeout ends this wait but not the operation; wait() may be called again.
  bool wait(std::chrono::milliseconds timeout) override {
    const GilRelease gil_release;
    run_queue();
    if (timeout != kNoTimeout && !completes_within(timeout)) {
      std::rethrow_exception(torch_error(Error(Fault::kTimeout, -1, timeout_message(timeout))));
    }
    return Work::wait(kNoTimeout);
  }

  // Completes the work, with an error or null, and wakes the threads that wait for it.
  void finish_operation(std::exception_ptr error) { finish(std::move(error)); }
  // Completes the future, if there is one, which calls the user's callbacks.
  void complete_future() {
    FuturePtr future;
    {
      std::lock_guard<std::mutex> lock(future_mutex_);
      operation_finished_ = true;
      future = future_;
    }
    if (future) set_result(*future, exception());
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  FuturePtr getFuture() override {
    const GilRelease gil_release;
    run_queue();
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      future_ = make_future();
      if (operation_finished_) set_result(*future_, exception());
    }
    return future_;
  }

 protected:
  virtual FuturePtr make_future() const { return new_future(); }
  virtual void set_result(c10::ivalue::Future& future, const std::exception_ptr& error) {
    if (error) {
      future.setError(error);
    } else {
      future.markCompleted(c10::IValue(outputs_));
    }
  }

 private:
  // If called in a callback on the executor's thread, runs the queue up to this operation.
  void run_queue() {
    const auto completed = [this] { return Work::isCompleted(); };
    if (completed()) return;
    if (const auto executor = executor_.lock()) executor->run_queued_until(completed);
  }

  bool completes_within(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    return cv_.wait_for(lock, timeout, [this] { return completed_; });
  }

  std::string timeout_message(std::chrono::milliseconds timeout) const {
    const Deadline d = Deadline::after(timeout);
    std::string out = title_.substr(title_.find(':') + 1) + " #" + std::to_string(sequence_) +
                      ": not done within the " + d.text() + " of this wait";
    const auto group = group_.lock();
    const auto query_timeout = std::min(Deadline::Ms(1000), timeout / 5);
    const std::string rank = group ? group->awaited_rank_name(Deadline::after(query_timeout)) : "";
    return rank.empty() ? out : out + ": " + rank + " has not come";
  }

  std::string title_;  // "fsccl:all_reduce"
  std::vector<at::Tensor> outputs_;
  uint64_t sequence_;
  std::weak_ptr<Group> group_;
  std::weak_ptr<Executor> executor_;
  std::mutex future_mutex_;  // guards the members below
  FuturePtr future_;         // null: not requested
  bool operation_finished_ = false;
};

// A send or a receive, which the core's transport runs in the background.
class MessageWork : public c10d::Work {
 public:
  // The transport reads or writes `buffer`, which may be a copy of the caller's `tensor`.
  MessageWork(int rank, c10d::OpType type, const char* title, std::shared_ptr<Group> group,
              RequestPtr request, ContiguousTensor buffer, Deadline::Ms timeout,
              const at::Tensor& tensor, std::shared_ptr<Executor> callbacks)
      : Work(rank, type, title, std::vector<at::Tensor>{tensor}),
        group_(std::move(group)),
        request_(std::move(request)),
        buffer_(std::move(buffer)),
        timeout_(timeout),
        tensor_(tensor),
        callbacks_(std::move(callbacks)) {}
  // If the request has not finished, keeps its memory until it has.
  ~MessageWork() override {
    if (request_->finished() || group_->is_forked_child()) return;
    group_->notify(request_, [buffer = buffer_, tensor = tensor_] {});
  }

  // When it returns true, the tensor may be read without wait().
  bool isCompleted() override {
    if (!request_->finished()) return false;
    const GilRelease gil_release;
    write_back_once();
    return true;
  }
  bool isSuccess() const override { return request_->finished() && !request_->error; }
  std::exception_ptr exception() const override {
    return request_->finished() && request_->error ? torch_error(*request_->error) : nullptr;
  }
  int sourceRank() const override { return request_->peer; }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  void synchronize() override {
    const GilRelease gil_release;
    write_back_once();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const GilRelease gil_release;
    const bool receives = opType_ != c10d::OpType::SEND;
    try {
      group_->wait(receives ? OpCode::kRecv : OpCode::kSend, request_,
                   Deadline::after(timeout == kNoTimeout ? timeout_ : timeout));
    } catch (const std::exception& e) {
      std::rethrow_exception(torch_error(e));
    }
    write_back_once();
    return true;
  }

  FuturePtr getFuture() override {
    const GilRelease gil_release;
    auto future = new_future();
    if (request_->finished()) {
      set_result(*future);
      return future;
    }
    // Keeps this work, and with it the memory, until the request has finished. Callbacks do not run
    // on the transport's thread, because they may wait for messages.
    auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
    group_->notify(request_, [self, future, callbacks = callbacks_] {
      try {
        callbacks->run({[] {}, [self, future] { self->set_result(*future); }}, false);
      } catch (const Error& e) {  // no thread could be started
        future->setError(torch_error(e));
      }
    });
    return future;
  }

 private:
  void set_result(c10::ivalue::Future& future) {
    if (request_->error) {
      future.setError(torch_error(*request_->error));
    } else {
      write_back_once();
      future.markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
    }
  }

  // Copies the received data to a strided tensor, once.
  void write_back_once() {
    std::lock_guard<std::mutex> lock(write_back_mutex_);
    if (written_back_ || !isSuccess()) return;
    buffer_.write_back();
    written_back_ = true;
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
  }

  std::shared_ptr<Group> group_;
  RequestPtr request_;
  ContiguousTensor buffer_;
  Deadline::Ms timeout_;
  at::Tensor tensor_;
  std::shared_ptr<Executor> callbacks_;
  std::mutex write_back_mutex_;
  bool written_back_ = false;
};

// One work for all works of a coalesced block.
class CoalescedWork : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override {
    for (const auto& w : works_) {
      if (!w->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override {
    for (const auto& w : works_) {
      if (!w->isSuccess()) return false;
    }
    return true;
  }
  std::exception_ptr exception() const override {
    for (const auto& w : works_) {
      if (auto e = w->exception()) return e;
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& w : works_) w->wait(timeout);
    return true;
  }
  void synchronize() override {
    for (const auto& w : works_) w->synchronize();
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> out;
    for (const auto& w : works_) {
      for (auto& t : w->result()) out.push_back(t);
    }
    return out;
  }
  FuturePtr getFuture() override {
    auto out = new_future();
    auto unfinished = std::make_shared<std::atomic<size_t>>(works_.size() + 1);
    auto self = c10::intrusive_ptr<CoalescedWork>::reclaim_copy(this);
    const auto on_completion = [self, out, unfinished](c10::ivalue::Future&) {
      if (--*unfinished > 0) return;
      if (auto e = self->exception()) {
        out->setError(e);
      } else {
        out->markCompleted(c10::IValue(self->result()));
      }
    };
    for (const auto& w : works_) w->getFuture()->addCallback(on_completion);
    on_completion(*out);
    return out;
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace fsccl
