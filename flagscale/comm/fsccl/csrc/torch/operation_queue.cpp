#include "operation_queue.h"

#include <cstring>

#include "nvlink_path.h"

namespace fsccl {
namespace {

// Time without progress after which finish() returns false.
constexpr Milliseconds kNoProgressTimeout{1000};

}  // namespace

OperationQueue::OperationQueue(int rank, std::shared_ptr<Group> group,
                               c10::intrusive_ptr<c10d::Backend::Options> options)
    : rank_(rank),
      options_(std::move(options)),
      group_(std::move(group)),
      executor_(std::make_shared<Executor>()),
      recorder_(FlightRecorder::of_this_process()),
      recorded_group_(std::make_shared<FlightRecorder::GroupInfo>(FlightRecorder::GroupInfo{
          group_->config().name, rank_, group_->config().global_ranks})) {}

FlightRecorder::Id OperationQueue::record(const OperationInfo& info, uint64_t sequence,
                                          TensorSpan outputs, std::function<bool()> has_ended) {
  const int64_t timeout_ms = timeout_of(info.timeout).count();
  return recorder_.record({recorded_group_, info.title, sequence, timeout_ms, info.inputs, outputs,
                           false, -1, std::move(has_ended)});
}

void OperationQueue::record_message(const OperationInfo& info, int peer,
                                    std::function<bool()> has_ended) {
  const int64_t timeout_ms = timeout_of(info.timeout).count();
  recorder_.begin(recorder_.record({recorded_group_, info.title, ++message_sequence_, timeout_ms,
                                    info.inputs, info.inputs, true, peer, std::move(has_ended)}));
}

void OperationQueue::check_process() const {
  try {
    group_->check_not_forked();
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

void OperationQueue::check_failure(const char* title) {
  const NvlinkPath* const path = nvlink_;
  if (path == nullptr) return;
  try {
    if (const auto error = path->failure()) group_->fail(title, sequence_, *error);
    group_->throw_if_failed();
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

void OperationQueue::fail(const char* title, const Error& error) {
  try {
    group_->fail(std::strchr(title, ':') + 1, sequence_, error);
  } catch (const Error& e) {
    std::rethrow_exception(torch_error(e));
  }
}

bool OperationQueue::failed() const {
  const NvlinkPath* const path = nvlink_;
  return group_->failure() || (path != nullptr && path->failure());
}

WorkPtr OperationQueue::collect(WorkPtr work) {
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

WorkPtr OperationQueue::end_coalescing() {
  coalescing_ = false;
  if (const NativePtr native = std::move(coalescing_native_)) {
    if (WorkPtr work = native->endCoalescing()) coalesced_.push_back(std::move(work));
  }
  auto works = std::move(coalesced_);
  coalesced_.clear();
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

bool OperationQueue::finish() {
  for (uint64_t progress = group_->progress();;) {
    if (executor_->drain(kNoProgressTimeout)) return true;
    const uint64_t current_progress = group_->progress();
    if (current_progress == progress) return false;
    progress = current_progress;
  }
}

}  // namespace fsccl
