// Watchdog of the NVLink engine's kernels, one thread for all groups of the process.
//
// No host thread waits for a kernel. A kernel that waits long for a peer sets a word in host
// memory; then the watchdog checks whether a rank of its group has ended or the group has failed
// elsewhere, and if so ends the wait. A kernel that has given up reports that to its own rank's
// host only: the watchdog fails the group, so that all ranks get the error, and warns the user,
// whose program may be using invalid results.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "../core/group.h"
#include "../nvlink/engine.h"

namespace fsccl {

// Any thread may call. `kernels` are a group's connection to the NVLink engine.
class NvlinkWatchdog {
 public:
  static NvlinkWatchdog& get();

  void add(std::shared_ptr<Group> group, std::shared_ptr<nvlink::Communicator> kernels);
  // Stops watching. Afterwards the watchdog's thread does not use `kernels` any more, which need
  // not have been added.
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
