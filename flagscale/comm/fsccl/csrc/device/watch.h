// Watches operations that a device has been told to do, on one thread an engine.
//
// Nobody of the host waits for such an operation, so somebody must see that it ends: when its time
// is over, a rank has ended or the group has failed elsewhere, the watch fails the group by the
// name of the rank that is waited for, and sets the words that this rank's streams still wait for,
// so that they do not hold the device for ever. What they then move is garbage, and every work of
// the group says that it failed.
//
// It also keeps the tensors of an operation until the device is done with them.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "engine.h"
#include "stream_tracks.h"

namespace fsccl {

// An operation under way.
struct Pending {
  Pending(const char* name, uint64_t number, Mark last, const Deadline& limit,
          std::vector<Awaited> words)
      : title(name),
        sequence(number),
        end(std::move(last)),
        deadline(limit),
        awaited(std::move(words)) {}

  const char* title;
  uint64_t sequence;
  Mark end;
  Deadline deadline;
  std::vector<Awaited> awaited;
  std::shared_ptr<void> keep;  // what the device needs until the end
  std::exception_ptr error;    // set before `over`
  std::atomic<bool> over{false};
};

class Watch {
 public:
  explicit Watch(Engine& engine) : engine_(engine) {}
  ~Watch();

  void add(std::shared_ptr<Pending> operation);
  // Whether everything is over within `limit`.
  bool drain(std::chrono::milliseconds limit);

 private:
  void run();
  void sweep();
  void give_up(const Error& why);

  Engine& engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Pending>> pending_;
  std::thread thread_;
  bool stop_ = false;
};

}  // namespace fsccl
