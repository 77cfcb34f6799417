#include "nvlink_watchdog.h"

#include <algorithm>
#include <thread>

#include "../core/thread.h"

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kCheckInterval(50);

}  // namespace

// Never destroyed, and its thread never ends: it sleeps while there is nothing to check.
NvlinkWatchdog& NvlinkWatchdog::get() {
  static auto* const watchdog = new NvlinkWatchdog;
  return *watchdog;
}

NvlinkWatchdog::NvlinkWatchdog() {
  std::thread([this] { run(); }).detach();
}

void NvlinkWatchdog::add(std::shared_ptr<Group> group,
                         std::shared_ptr<nvlink::Communicator> kernels) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back({std::move(group), std::move(kernels)});
  }
  changed_.notify_all();
}

void NvlinkWatchdog::remove(const nvlink::Communicator* kernels) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto matches = [&](const WatchedGroup& w) { return w.kernels.get() == kernels; };
  watched_.erase(std::remove_if(watched_.begin(), watched_.end(), matches), watched_.end());
}

void NvlinkWatchdog::run() {
  set_up_thread("fsccl-nvlink");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !watched_.empty(); });
    for (WatchedGroup& watched : watched_) {
      if (!watched.failed) check(watched);
    }
    lock.unlock();
    std::this_thread::sleep_for(kCheckInterval);
    lock.lock();
  }
}

void NvlinkWatchdog::check(WatchedGroup& watched) {
  try {
    if (const auto error = watched.kernels->failure()) throw *error;
    if (watched.kernels->has_waited_long()) watched.group->check_peers();
  } catch (const Error& error) {
    watched.failed = true;
    watched.group->fail_without_throw("an operation of the NVLink engine", 0, error);
    watched.kernels->abort();
    if (error.fault == Fault::kAborted) return;  // on purpose
    watched.group->warn(watched.group->failure().value_or(error.what()) +
                        "; results that its GPUs have computed since are invalid");
  }
}

}  // namespace fsccl
