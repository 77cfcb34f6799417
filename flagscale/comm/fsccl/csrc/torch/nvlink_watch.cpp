#include "nvlink_watch.h"

#include <algorithm>
#include <thread>

#include "../core/thread.h"

namespace fsccl {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks(50);

}  // namespace

// Never destroyed, and its thread never ends: it sleeps while there is nothing to look at.
NvlinkWatch& NvlinkWatch::get() {
  static auto* const it = new NvlinkWatch;
  return *it;
}

NvlinkWatch::NvlinkWatch() {
  std::thread([this] { run(); }).detach();
}

void NvlinkWatch::add(std::shared_ptr<Group> group, std::shared_ptr<nvlink::Communicator> kernels) {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    watched_.push_back({std::move(group), std::move(kernels)});
  }
  changed_.notify_all();
}

void NvlinkWatch::remove(const nvlink::Communicator* kernels) {
  std::lock_guard<std::mutex> hold(mutex_);
  const auto gone = [&](const Watched& one) { return one.kernels.get() == kernels; };
  watched_.erase(std::remove_if(watched_.begin(), watched_.end(), gone), watched_.end());
}

void NvlinkWatch::run() {
  begin_thread("fsccl-nvlink");
  std::unique_lock<std::mutex> hold(mutex_);
  for (;;) {
    changed_.wait(hold, [this] { return !watched_.empty(); });
    for (Watched& one : watched_) {
      if (!one.over) look_at(one);
    }
    hold.unlock();
    std::this_thread::sleep_for(kBetweenLooks);
    hold.lock();
  }
}

void NvlinkWatch::look_at(Watched& one) {
  try {
    if (const auto why = one.kernels->failure()) throw *why;
    if (one.kernels->waited()) one.group->look();
  } catch (const Error& why) {
    one.over = true;
    one.group->give_up("an operation of the NVLink engine", 0, why);
    one.kernels->abort();
    if (why.fault == Fault::kAborted) return;  // somebody wanted it
    one.group->warn(one.group->failure().value_or(why.what()) +
                    "; what its GPUs have computed since is worth nothing");
  }
}

}  // namespace fsccl
