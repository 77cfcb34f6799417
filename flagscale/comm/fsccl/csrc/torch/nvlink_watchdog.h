// Watchdog of the NVLink engine's kernels, one thread for all groups of the process.
//
// No host thread waits for a kernel. One that waits for a peer for long sets a word in host memory;
// then the watchdog checks whether a rank of its group has ended or the group has failed elsewhere,
// and ends the wait. A kernel that has given up has reported that to its own rank's host only: the
// watchdog fails the group, so that all ranks get the error, and warns the user, whose program may
// be using results that are worth nothing.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "../core/group.h"
#include "../nvlink/engine.h"

namespace fsccl {

// Any thread may call.
class NvlinkWatchdog {
 public:
  static NvlinkWatchdog& get();

  void add(std::shared_ptr<Group> group, std::shared_ptr<nvlink::Communicator> kernels);
  // Returns when the thread does not use them any more. Kernels that were never added are allowed.
  void remove(const nvlink::Communicator* kernels);

 private:
  struct WatchedGroup {
    std::shared_ptr<Group> group;
    std::shared_ptr<nvlink::Communicator> kernels;
    bool failed = false;
  };

  NvlinkWatchdog();
  void run();
  static void check(WatchedGroup& watched);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<WatchedGroup> watched_;
};

}  // namespace fsccl
