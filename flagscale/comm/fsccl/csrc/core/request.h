// Sends and receives under way, and the lock under which they are looked after.
//
// Bodies are copied without the lock, so that a process sends and receives on several cores. Who
// copies says so first, in the request whose memory it is (Hold::copy); a request does not finish,
// well or badly, before that is over, and no copy begins of one that has finished or is to fail.
// So memory of a finished request is not touched. The kernel's copies never wait for anybody: a
// request that is to fail does so within a moment.
#pragma once

#include <cerrno>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "futex.h"
#include "op_card.h"
#include "buffer_list.h"
#include "types.h"

namespace fsccl {

// Complete once `state` is kDone or kFailed. All but that is the lock's until then.
struct Request {
  enum : uint32_t { kPending = 0, kAwaited = 1, kDone = 2, kFailed = 3 };  // kAwaited: by a sleeper
  Word state{kPending};
  std::atomic<int> peer{-1};  // of a receive from anyone: who it was, once done
  uint64_t tag = 0;
  OpCard card;
  size_t parts = 1;   // of a send: bodies still to go
  size_t copies = 0;  // that go on without the lock
  BufferList memory;
  std::unique_ptr<Error> error;
  std::function<void(Request&)> on_settled;

  bool finished() const { return state.load(std::memory_order_acquire) >= kDone; }
  bool failed() const { return state.load(std::memory_order_acquire) == kFailed; }
  // Until it has finished, or the limit is over, or for no reason a little less. Any thread.
  void sleep(std::chrono::milliseconds limit) {
    uint32_t seen = kPending;
    state.compare_exchange_strong(seen, kAwaited);
    if (!finished()) futex_wait(state, kAwaited, limit);
  }
  // Finished, or as good as: nothing may be copied any more.
  bool over() const { return finished() || error != nullptr; }
  void succeed() {
    if (!over()) settle(kDone);
  }
  void part_done() {
    if (--parts == 0) succeed();
  }
  void fail(const Error& why) {
    if (over()) return;
    error = std::make_unique<Error>(why);
    if (copies == 0) settle(kFailed);
  }
  void end_copy() {
    if (--copies == 0 && error) settle(kFailed);
  }

 private:
  void settle(uint32_t to) {
    if (state.exchange(to) == kAwaited) futex_wake_all(state);
    if (on_settled) std::exchange(on_settled, nullptr)(*this);
  }
};
using RequestPtr = std::shared_ptr<Request>;

// Where the body of a frame lies, and what keeps that from going away while it is copied.
struct Body {
  BufferList memory;
  RequestPtr request;                 // whose memory it is, if it is a request's
  std::shared_ptr<std::byte[]> kept;  // else this, or the connection itself
};

struct Guard {
  std::mutex mutex;
  size_t copies = 0;  // of requests' memory, that go on without the lock
  std::condition_variable none;
};

// A thread that has the lock.
class Hold {
 public:
  explicit Hold(Guard& guard) : guard_(guard), lock_(guard.mutex) {}

  // Lets the lock go while `call` copies `bytes` bytes from or to the body's memory. Small ones are
  // sooner done than others would be let in.
  template <class F>
  auto copy(const Body& body, size_t bytes, F&& call) {
    if (bytes <= kQuickBytes) return call();
    const Copying now(*this, body);
    return call();
  }
  // Lets the lock go until `done` says so.
  template <class F>
  void wait_until(F&& done) {
    while (!done()) guard_.none.wait_for(lock_, std::chrono::milliseconds(1));
  }
  // Until nobody copies. Who asks has failed all requests, so no copy begins.
  void wait_for_copies() {
    guard_.none.wait(lock_, [this] { return guard_.copies == 0; });
  }

 private:
  static constexpr size_t kQuickBytes = 16 << 10;

  class Copying {
   public:
    Copying(Hold& hold, const Body& body) : hold_(hold), request_(body.request), kept_(body.kept) {
      if (request_) {
        ++request_->copies;
        ++hold_.guard_.copies;
      }
      hold_.lock_.unlock();
    }
    ~Copying() {
      const int code = errno;  // of the call, for its caller
      hold_.lock_.lock();
      if (request_) {
        request_->end_copy();
        if (--hold_.guard_.copies == 0) hold_.guard_.none.notify_all();
      }
      errno = code;
    }

   private:
    Hold& hold_;
    RequestPtr request_;
    std::shared_ptr<std::byte[]> kept_;
  };

  Guard& guard_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace fsccl
