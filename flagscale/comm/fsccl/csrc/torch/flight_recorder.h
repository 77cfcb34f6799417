// Record of the latest operations of this process, of all groups, like torch's flight recorder: when
// each operation was called, began and ended, and the sizes of its tensors. It answers which rank
// did not call an operation for which the others wait.
//
// torch's own recorder is hidden in its library. flight_recorder.py adds these entries to its dumps.
// An entry costs three reads of the processor's time stamp counter, and no allocation once the ring
// has been filled.
#pragma once

#include <c10/util/ApproximateClock.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "operation_info.h"

namespace fsccl {

class FlightRecorder {
 public:
  // Number of an entry, in the order of the calls. kNotRecorded: the recorder is switched off.
  using Id = uint64_t;
  static constexpr Id kNotRecorded = ~Id{0};
  // Maximum number of tensors that an entry keeps, inputs and outputs together.
  static constexpr size_t kMaxTensors = 16;

  // A group, in entries.
  struct GroupInfo {
    std::string name;
    int rank = 0;  // of this process, in the group
    std::vector<int> global_ranks;
  };
  // A call, as it is recorded.
  struct Call {
    const std::shared_ptr<const GroupInfo>& group;
    const char* title;  // "fsccl:all_reduce"
    uint64_t sequence;  // number in the group; collectives and messages are counted apart
    int64_t timeout_ms;
    TensorSpan inputs, outputs;
    bool is_message = false;
    int peer = -1;  // group rank, of a message; -1: any
    // Returns whether the operation has ended, where nobody calls end(); may be empty.
    std::function<bool()> has_ended = nullptr;
  };
  struct Tensors {
    std::vector<std::vector<int64_t>> sizes;
    std::vector<at::ScalarType> dtypes;
  };
  // A call, as it is read.
  struct Entry {
    Id id = kNotRecorded;
    std::shared_ptr<const GroupInfo> group;
    const char* title = "";
    uint64_t sequence = 0;
    int64_t timeout_ms = 0;
    Tensors inputs, outputs;
    bool is_message = false;
    int peer = -1;
    // Times in nanoseconds since 1970; 0: not yet.
    int64_t called_at = 0, began_at = 0, ended_at = 0;
    bool failed = false;
  };

  static FlightRecorder& of_this_process();
  FlightRecorder();

  bool enabled() const { return capacity_ > 0; }
  // Any thread may call all functions. A call for an entry that has been overwritten has no effect.
  Id record(Call call);
  void begin(Id id);
  void end(Id id, bool failed);
  // Returns the entries, the oldest first.
  std::vector<Entry> entries();

 private:
  // An entry in the ring, whose memory is used again. begin() and end() write without the lock.
  struct Slot {
    std::atomic<Id> id{kNotRecorded};
    std::shared_ptr<const GroupInfo> group;
    const char* title = "";
    uint64_t sequence = 0;
    int64_t timeout_ms = 0;
    size_t input_count = 0, output_count = 0;  // of tensors
    std::array<at::ScalarType, kMaxTensors> dtypes{};
    std::array<uint8_t, kMaxTensors> dimensions{};
    std::vector<int64_t> sizes;  // of all tensors
    bool is_message = false;
    int peer = -1;
    std::function<bool()> has_ended;
    std::atomic<int64_t> called_at{0}, began_at{0}, ended_at{0};  // in ticks; 0: not yet
    std::atomic<bool> failed{false};
  };
  Slot* find(Id id);
  static void describe(Slot& slot, TensorSpan tensors, size_t first, size_t* count);
  static Tensors tensors_of(const Slot& slot, size_t first, size_t count);

  const size_t capacity_;
  // Relates ticks to time by measurements at its construction and at each use.
  c10::ApproximateClockToUnixTimeConverter clock_;
  std::mutex mutex_;              // guards all below, except as noted
  std::unique_ptr<Slot[]> ring_;  // allocated for the first entry
  std::atomic<Id> next_id_{0};
};

}  // namespace fsccl
