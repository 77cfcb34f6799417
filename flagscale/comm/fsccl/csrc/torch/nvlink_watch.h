// Looks after the NVLink engine's kernels of all groups of this process, on one thread.
//
// Nobody of the host waits for a kernel. One that waits for long says so in host memory, and then
// somebody must see whether a rank of its group has ended or the group has failed elsewhere, and
// end the wait. One that has given up has told nobody but this rank's host: the others must learn
// it, and the user too, whose program may be using results that are worth nothing.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "../core/group.h"
#include "../nvlink/engine.h"

namespace fsccl {

class NvlinkWatch {
 public:
  static NvlinkWatch& get();

  void add(std::shared_ptr<Group> group, std::shared_ptr<nvlink::Communicator> kernels);
  // Returns when they are not looked at any more. Also of kernels that were never added.
  void remove(const nvlink::Communicator* kernels);

 private:
  struct Watched {
    std::shared_ptr<Group> group;
    std::shared_ptr<nvlink::Communicator> kernels;
    bool over = false;
  };

  NvlinkWatch();
  void run();
  static void look_at(Watched& one);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Watched> watched_;
};

}  // namespace fsccl
