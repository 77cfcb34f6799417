#include "watch.h"

#include <exception>

#include "../core/thread.h"

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kSweep(2);
constexpr int kSweepsALook = 50;
constexpr std::chrono::milliseconds kVerdict(1000);

}  // namespace

Watch::~Watch() {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watch::add(std::shared_ptr<Pending> operation) {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    pending_.push_back(std::move(operation));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

bool Watch::drain(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> hold(mutex_);
  return changed_.wait_for(hold, limit, [this] { return pending_.empty(); });
}

void Watch::run() {
  begin_thread("fsccl-watch");
  int mode = cuda::kCaptureRelaxed;  // others may capture graphs while this thread calls
  cuda::driver().capture_mode(&mode);
  std::unique_lock<std::mutex> hold(mutex_);
  for (int sweeps = 0; !stop_; ++sweeps) {
    if (pending_.empty()) {
      changed_.notify_all();
      changed_.wait(hold, [this] { return stop_ || !pending_.empty(); });
      sweeps = 0;
      continue;
    }
    try {
      sweep();
      if (pending_.empty()) continue;
      if (sweeps % kSweepsALook == kSweepsALook - 1) engine_.look();
      const Pending& first = *pending_.front();
      // A kernel that waits tells by itself whom for, when its own time is over.
      const bool tells = first.awaited.empty() && engine_.has_kernels();
      const auto grace = tells ? kVerdict : std::chrono::milliseconds(0);
      if (first.deadline.earlier(-grace).passed()) {
        int peer = -1;
        for (const Awaited& a : first.awaited) {
          if (peer < 0 && !reached(*a.word, a.value)) peer = a.peer;
        }
        const std::string who = peer < 0 ? "the native library" : engine_.group().name(peer);
        throw Error(Fault::kTimeout, peer, who + " did not come within " + first.deadline.text());
      }
    } catch (const Error& e) {
      give_up(e);
    }
    changed_.wait_for(hold, kSweep, [this] { return stop_; });
  }
}

// Operations end in order. One whose kernel gave up waiting ends too: throws why.
void Watch::sweep() {
  while (!pending_.empty() && pending_.front()->end->query()) {
    engine_.check_kernels();
    pending_.front()->keep.reset();
    pending_.front()->over = true;
    pending_.pop_front();
  }
}

void Watch::give_up(const Error& why) {
  const Pending& first = *pending_.front();
  std::exception_ptr error;
  try {
    engine_.fail(first.title, first.sequence, why);
  } catch (const Error&) {
    error = std::current_exception();
  }
  for (const auto& p : pending_) {
    p->error = error;
    for (const Awaited& a : p->awaited) {
      if (!reached(*a.word, a.value)) set_word(*a.word, a.value);
    }
    p->over = true;
  }
  // Their tensors stay: the device may still touch them. The process is about to end anyway.
  static auto* const kept = new std::deque<std::shared_ptr<Pending>>;
  kept->insert(kept->end(), pending_.begin(), pending_.end());
  pending_.clear();
}

}  // namespace fsccl
