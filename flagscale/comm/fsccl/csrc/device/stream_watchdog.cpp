#include "stream_watchdog.h"

#include <exception>

#include "../core/thread.h"

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kSweepInterval(2);
constexpr int kSweepsPerCheck = 50;
// Time after the deadline in which a kernel should report for which rank it waits.
constexpr std::chrono::milliseconds kKernelReportTime(1000);

}  // namespace

StreamWatchdog::~StreamWatchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StreamWatchdog::add(std::shared_ptr<PendingOperation> operation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.push_back(std::move(operation));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

bool StreamWatchdog::drain(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return pending_.empty(); });
}

void StreamWatchdog::run() {
  set_up_thread("fsccl-watchdog");
  int mode = cuda::kCaptureRelaxed;  // other threads may capture graphs while this one calls CUDA
  cuda::driver().capture_mode(&mode);
  std::unique_lock<std::mutex> lock(mutex_);
  for (int sweeps = 0; !stop_; ++sweeps) {
    if (pending_.empty()) {
      changed_.notify_all();
      changed_.wait(lock, [this] { return stop_ || !pending_.empty(); });
      sweeps = 0;
      continue;
    }
    try {
      retire_finished(lock);
      if (pending_.empty()) continue;
      if (sweeps % kSweepsPerCheck == kSweepsPerCheck - 1) engine_.check_peers();
      check_deadline();
    } catch (const Error& e) {
      fail_all(e);
    }
    changed_.wait_for(lock, kSweepInterval, [this] { return stop_; });
  }
}

// Removes operations that have ended, which happens in order. An operation whose kernel gave up
// waiting ends, too: then throws the kernel's error. Tensors are released without the lock, because
// that may need Python's.
void StreamWatchdog::retire_finished(std::unique_lock<std::mutex>& lock) {
  while (!pending_.empty() && pending_.front()->end_event->query()) {
    engine_.check_kernels();
    const std::shared_ptr<PendingOperation> operation = pending_.front();
    lock.unlock();
    operation->keep_alive.reset();
    lock.lock();
    operation->finished = true;
    pending_.pop_front();
  }
}

// Throws if the deadline of the first operation has passed.
void StreamWatchdog::check_deadline() const {
  const PendingOperation& first = *pending_.front();
  const bool reports_itself = first.word_waits.empty() && engine_.has_kernels();
  const auto grace = reports_itself ? kKernelReportTime : std::chrono::milliseconds(0);
  if (!first.deadline.earlier_by(-grace).passed()) return;
  int peer = -1;
  for (const WordWait& w : first.word_waits) {
    if (peer < 0 && !has_reached(*w.word, w.value)) peer = w.peer;
  }
  const std::string name = peer < 0 ? "the native library" : engine_.group().name(peer);
  throw Error(Fault::kTimeout, peer, name + " did not come within the timeout of " + first.deadline.text());
}

void StreamWatchdog::fail_all(const Error& cause) {
  const PendingOperation& first = *pending_.front();
  std::exception_ptr error;
  try {
    engine_.fail(first.title, first.sequence, cause);
  } catch (const Error&) {
    error = std::current_exception();
  }
  for (const auto& p : pending_) {
    p->error = error;
    for (const WordWait& w : p->word_waits) {
      if (!has_reached(*w.word, w.value)) store_and_wake(*w.word, w.value);
    }
    p->finished = true;
  }
  // The device may still access their tensors, so these are leaked; the process is about to end.
  static auto* const leaked = new std::deque<std::shared_ptr<PendingOperation>>;
  leaked->insert(leaked->end(), pending_.begin(), pending_.end());
  pending_.clear();
}

}  // namespace fsccl
