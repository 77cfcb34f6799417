// Record of the latest operations of this process, of all groups, like torch's flight recorder: when
// each operation was called, began and ended, and the sizes of its tensors. It answers which rank
// did not call an operation for which the others wait.
//
// torch's own recorder is hidden in its library. flight_recorder.py adds these entries to its dumps.
// An entry costs two reads of the clock and no allocation in most cases.
#pragma once

#include <c10/util/SmallVector.h>

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
  // Maximum number of sizes and of tensors that an entry keeps, for inputs and outputs together.
  static constexpr size_t kMaxTensors = 16;

  // A group, in entries.
  struct GroupInfo {
    std::string name;
    int rank = 0;  // of this process, in the group
    std::vector<int> global_ranks;
  };
  struct Tensors {
    c10::SmallVector<c10::SmallVector<int64_t, 4>, 2> sizes;
    c10::SmallVector<at::ScalarType, 2> dtypes;
  };
  struct Entry {
    Id id = kNotRecorded;
    std::shared_ptr<const GroupInfo> group;
    const char* title = "";  // "fsccl:all_reduce"
    bool is_message = false;
    int peer = -1;          // group rank, of a message; -1: any
    uint64_t sequence = 0;  // number in the group; collectives and messages are counted apart
    Tensors inputs, outputs;
    int64_t timeout_ms = 0;
    // Times in nanoseconds since 1970; 0: not yet.
    int64_t called_at = 0, began_at = 0, ended_at = 0;
    bool failed = false;
    // Returns whether the operation has ended, where nobody calls end(); may be empty.
    std::function<bool()> has_ended;
  };

  static FlightRecorder& of_this_process();
  FlightRecorder();

  bool enabled() const { return capacity_ > 0; }
  // Any thread may call all functions. A call for an entry that has been overwritten has no effect.
  Id record(Entry entry, TensorSpan inputs, TensorSpan outputs);
  void begin(Id id);
  void end(Id id, bool failed);
  // Returns the entries, the oldest first.
  std::vector<Entry> entries();

 private:
  Entry* find(Id id);

  const size_t capacity_;
  std::mutex mutex_;  // guards all below
  std::vector<Entry> ring_;
  Id next_id_ = 0;
};

}  // namespace fsccl
