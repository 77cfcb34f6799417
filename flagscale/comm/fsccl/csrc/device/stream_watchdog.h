// Watchdog of operations that the device engine has enqueued on a device, one thread per engine.
//
// No host thread waits for such an operation. If its deadline passes, a rank ends or the group
// fails elsewhere, the watchdog fails the group with an error that names the rank for which this
// one waits. Then it writes the words (streams.h) for which this rank's streams still wait, so that
// they do not block the device for ever. Data that the streams then copy is invalid, and every work
// of the group reports the error.
//
// It also holds references to the tensors of an operation until the device has finished it.
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
        end_event(std::move(last)),
        deadline(limit),
        word_waits(std::move(waits)) {}

  const char* title;
  uint64_t sequence;
  StreamEvent end_event;
  Deadline deadline;
  std::vector<WordWait> word_waits;
  std::shared_ptr<void> keep_alive;  // memory that the device needs until the end
  std::exception_ptr error;          // written before `finished`
  std::atomic<bool> finished{false};
};

class StreamWatchdog {
 public:
  explicit StreamWatchdog(DeviceEngine& engine) : engine_(engine) {}
  ~StreamWatchdog();

  // Operations end in the order in which they are added.
  void add(std::shared_ptr<PendingOperation> operation);
  // Waits until all operations have finished. Returns false if they have not within `timeout`.
  bool drain(std::chrono::milliseconds timeout);

 private:
  void run();
  void retire_finished(std::unique_lock<std::mutex>& lock);
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
