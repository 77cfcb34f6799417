// Sends and receives in progress, and the lock that guards them.
//
// Message bodies are copied without holding the lock, so that a process sends and receives on
// several cores. Before a copy starts, it is counted in the request whose memory it uses
// (LockHold::copy). A request does not finish, successfully or not, before its copies have ended,
// and no copy starts for a request that has finished or is about to fail. So the memory of a
// finished request is never touched. Copies are system calls that never block, so that they
// hardly delay a failure.
#pragma once

#include <cerrno>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "futex.h"
#include "collective_fingerprint.h"
#include "buffer_list.h"
#include "types.h"

namespace fsccl {

// A send or a receive. It has finished once `state` is kDone or kFailed. Until then, everything but
// `state` and `peer` is guarded by the lock of its transport.
struct Request {
  // kAwaited: a thread sleeps on it
  enum : uint32_t { kPending = 0, kAwaited = 1, kDone = 2, kFailed = 3 };
  Word state{kPending};
  // Group rank of the other side. Of a receive from any source: -1, and the sender once it is done.
  std::atomic<int> peer{-1};
  uint64_t tag = 0;
  CollectiveFingerprint fingerprint;
  size_t unsent_bodies = 1;       // of a send: parts of the message that have not been sent
  size_t copies_in_progress = 0;  // running without the lock
  BufferList memory;
  std::unique_ptr<Error> error;
  std::function<void(Request&)> on_finished;

  bool finished() const { return state.load(std::memory_order_acquire) >= kDone; }
  bool failed() const { return state.load(std::memory_order_acquire) == kFailed; }
  // Sleeps until the request has finished, at most `timeout`. May wake up spuriously. Any thread
  // may call.
  void wait_briefly(std::chrono::milliseconds timeout) {
    uint32_t expected = kPending;
    state.compare_exchange_strong(expected, kAwaited);
    if (!finished()) futex_wait(state, kAwaited, timeout);
  }
  // Finished, or failed and only waiting for copies to end: no copy may start any more.
  bool is_closing() const { return finished() || error != nullptr; }
  void succeed() {
    if (!is_closing()) finish(kDone);
  }
  void complete_body() {
    if (--unsent_bodies == 0) succeed();
  }
  void fail(const Error& reason) {
    if (is_closing()) return;
    error = std::make_unique<Error>(reason);
    if (copies_in_progress == 0) finish(kFailed);
  }
  void end_copy() {
    if (--copies_in_progress == 0 && error) finish(kFailed);
  }

 private:
  void finish(uint32_t final_state) {
    if (state.exchange(final_state) == kAwaited) futex_wake_all(state);
    if (on_finished) std::exchange(on_finished, nullptr)(*this);
  }
};
using RequestPtr = std::shared_ptr<Request>;

// Memory of the body of a frame, and the owner that keeps it alive while it is copied.
struct Body {
  BufferList memory;
  RequestPtr request;                   // the request that owns the memory, if one does
  std::shared_ptr<std::byte[]> buffer;  // else the owner, or null if the connection is
};

// The lock of a transport.
struct TransportLock {
  std::mutex mutex;
  size_t copies_in_progress = 0;  // into or from the memory of requests, running without the lock
  std::condition_variable copies_ended;
};

// Scope in which a thread holds the lock of a transport.
class LockHold {
 public:
  explicit LockHold(TransportLock& lock) : transport_lock_(lock), lock_(lock.mutex) {}

  // Calls `call`, which copies `bytes` bytes from or to the memory of `body`, without holding the
  // lock. Small copies keep the lock, because they take less time than releasing it.
  template <class F>
  auto copy(const Body& body, size_t bytes, F&& call) {
    if (bytes <= kInlineCopyBytes) return call();
    const UnlockedCopy unlocked(*this, body);
    return call();
  }
  // Releases the lock until condition() is true, which it checks every millisecond.
  template <class F>
  void unlock_until(F&& condition) {
    while (!condition()) transport_lock_.copies_ended.wait_for(lock_, std::chrono::milliseconds(1));
  }
  // Waits until no copy is in progress. The caller has failed all requests, so none can start.
  void wait_for_copies() {
    transport_lock_.copies_ended.wait(lock_,
                                      [this] { return transport_lock_.copies_in_progress == 0; });
  }

 private:
  static constexpr size_t kInlineCopyBytes = 16 << 10;

  // Scope in which the lock is released for a copy, which is counted in its request.
  class UnlockedCopy {
   public:
    UnlockedCopy(LockHold& hold, const Body& body)
        : hold_(hold), request_(body.request), buffer_(body.buffer) {
      if (request_) {
        ++request_->copies_in_progress;
        ++hold_.transport_lock_.copies_in_progress;
      }
      hold_.lock_.unlock();
    }
    ~UnlockedCopy() {
      const int saved_errno = errno;  // that `call` has set for its caller
      hold_.lock_.lock();
      if (request_) {
        request_->end_copy();
        if (--hold_.transport_lock_.copies_in_progress == 0)
          hold_.transport_lock_.copies_ended.notify_all();
      }
      errno = saved_errno;
    }

   private:
    LockHold& hold_;
    RequestPtr request_;
    std::shared_ptr<std::byte[]> buffer_;
  };

  TransportLock& transport_lock_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace fsccl
