#include "proxy_thread.h"

#include "../core/thread.h"
#include "pipe.h"

namespace fsccl {
namespace {

constexpr std::chrono::microseconds kPollInterval(20);
constexpr int kIdlePolls =
    500;  // after so many (10 ms) without progress the thread polls less often
constexpr std::chrono::microseconds kIdlePollInterval(200);

}  // namespace

ProxyThread::ProxyThread(Group& group, std::function<void(const Error&)> on_error)
    : group_(group), on_error_(std::move(on_error)) {}

ProxyThread::~ProxyThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ProxyThread::begin(const CollectiveFingerprint& fingerprint) {
  std::lock_guard<std::mutex> lock(mutex_);
  fingerprint_ = fingerprint;
}

void ProxyThread::send(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes) {
  submit(peer, true, std::move(ring), n, bytes);
}

void ProxyThread::receive(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes) {
  submit(peer, false, std::move(ring), n, bytes);
}

void ProxyThread::submit(int peer, bool sends, std::shared_ptr<Ring> ring, uint32_t n,
                         size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    PipeQueue& queue = queues_[{peer, sends}];
    if (!queue.ring) queue = {peer, sends, std::move(ring), {}};
    queue.messages.push_back({n, bytes, fingerprint_, nullptr});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

bool ProxyThread::flush(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return failed_ || idle(); });
}

bool ProxyThread::idle() const {
  for (const auto& [key, queue] : queues_) {
    if (!queue.messages.empty()) return false;
  }
  return true;
}

void ProxyThread::run() {
  set_up_thread("fsccl-proxy");
  std::unique_lock<std::mutex> lock(mutex_);
  int polls_without_progress = 0;
  while (!stop_ && !failed_) {
    bool progressed = false;
    try {
      for (auto& [key, queue] : queues_) progressed = advance(queue) || progressed;
    } catch (const Error& e) {
      failed_ = true;
      lock.unlock();
      on_error_(e);
      lock.lock();
    }
    polls_without_progress = progressed ? 0 : polls_without_progress + 1;
    if (idle() || failed_) {
      changed_.notify_all();
      changed_.wait(lock, [this] { return stop_ || failed_ || !idle(); });
      polls_without_progress = 0;
    } else if (!progressed) {
      changed_.wait_for(lock,
                        polls_without_progress < kIdlePolls ? kPollInterval : kIdlePollInterval);
    }
  }
}

// Returns whether a message made progress. Messages of a queue finish in order, so the words only
// grow.
bool ProxyThread::advance(PipeQueue& queue) {
  bool progressed = false;
  while (!queue.messages.empty() && queue.messages.front().request &&
         queue.messages.front().request->finished()) {
    const PendingMessage& message = queue.messages.front();
    if (message.request->error) throw Error(*message.request->error);
    store_and_wake(queue.sends ? queue.ring->consumed() : queue.ring->posted(), message.n + 1);
    queue.messages.pop_front();
    progressed = true;
  }
  while (start_next(queue)) progressed = true;
  return progressed;
}

bool ProxyThread::start_next(PipeQueue& queue) {
  for (PendingMessage& message : queue.messages) {
    if (message.request) continue;
    const bool ready = queue.sends
                           ? has_reached(queue.ring->posted(), message.n + 1)
                           : has_reached(queue.ring->consumed(), message.n + 1 - Ring::kSlots);
    if (!ready) return false;
    const BufferList memory(queue.ring->slot(message.n), message.bytes);
    const Deadline no_wait = Deadline::after(Deadline::Ms(0));  // all ranks have joined long ago
    message.request = queue.sends
                          ? group_.send(queue.peer, kPipeTag, memory, no_wait, message.fingerprint)
                          : group_.recv(queue.peer, kPipeTag, memory, no_wait, message.fingerprint);
    return true;
  }
  return false;
}

}  // namespace fsccl
