// Watchdog of operations that have been enqueued on a device, one thread per engine.
//
// No host thread waits for such an operation. When its time is over, a rank has ended or the group
// has failed elsewhere, the watchdog fails the group, naming the rank that is waited for, and
// writes the words that this rank's streams still wait for, so that they do not hold the device for
// ever. The data that they move then is garbage, and every work of the group reports the error.
//
// It also keeps the tensors of an operation until the device is done with them.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "device_streams.h"
#include "engine.h"

namespace fsccl {

// An enqueued operation.
struct PendingOperation {
  PendingOperation(const char* name, uint64_t number, StreamEvent last, const Deadline& limit,
                   std::vector<WordWait> waits)
      : title(name),
        sequence(number),
        end(std::move(last)),
        deadline(limit),
        word_waits(std::move(waits)) {}

  const char* title;
  uint64_t sequence;
  StreamEvent end;
  Deadline deadline;
  std::vector<WordWait> word_waits;
  std::shared_ptr<void> keep_alive;  // memory that the device needs until the end
  std::exception_ptr error;          // written before `over`
  std::atomic<bool> over{false};
};

class StreamWatchdog {
 public:
  explicit StreamWatchdog(DeviceEngine& engine) : engine_(engine) {}
  ~StreamWatchdog();

  // Operations end in the order in which they are added.
  void add(std::shared_ptr<PendingOperation> operation);
  // Waits until all operations are over; false if they are not within `timeout`.
  bool drain(std::chrono::milliseconds timeout);

 private:
  void run();
  void retire_finished();
  void check_deadline() const;
  void fail_all(const Error& cause);

  DeviceEngine& engine_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<PendingOperation>> pending_;
  std::thread thread_;
  bool stop_ = false;
};

}  // namespace fsccl
