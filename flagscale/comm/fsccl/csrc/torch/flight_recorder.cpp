#include "flight_recorder.h"

#include <algorithm>
#include <cstdlib>

#include "../core/per_process.h"
#include "../core/text.h"

namespace fsccl {
namespace {

constexpr size_t kDefaultCapacity = 2000;  // as of torch's flight recorder

size_t capacity_from_environment() {
  for (const char* const variable : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    const char* const value = std::getenv(variable);
    size_t capacity = 0;
    if (value != nullptr && parse_decimal(std::string(value), &capacity)) return capacity;
  }
  return kDefaultCapacity;
}

}  // namespace

FlightRecorder& FlightRecorder::of_this_process() { return per_process<FlightRecorder>(); }

FlightRecorder::FlightRecorder() : capacity_(capacity_from_environment()) {}

FlightRecorder::Id FlightRecorder::record(Call call) {
  if (!enabled()) return kNotRecorded;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ring_) ring_ = std::make_unique<Slot[]>(capacity_);
  const Id id = next_id_.load(std::memory_order_relaxed);
  Slot& slot = ring_[id % capacity_];
  slot.id.store(id, std::memory_order_relaxed);
  next_id_.store(id + 1, std::memory_order_relaxed);
  if (slot.group != call.group) slot.group = call.group;
  slot.title = call.title;
  slot.sequence = call.sequence;
  slot.timeout_ms = call.timeout_ms;
  slot.is_message = call.is_message;
  slot.peer = call.peer;
  slot.has_ended = std::move(call.has_ended);
  slot.sizes.clear();
  describe(slot, call.inputs, 0, &slot.input_count);
  describe(slot, call.outputs, slot.input_count, &slot.output_count);
  slot.called_at.store(c10::getApproximateTime(), std::memory_order_relaxed);
  slot.began_at.store(0, std::memory_order_relaxed);
  slot.ended_at.store(0, std::memory_order_relaxed);
  slot.failed.store(false, std::memory_order_relaxed);
  return id;
}

// Adds tensors to an entry that has those before `first` already.
void FlightRecorder::describe(Slot& slot, TensorSpan tensors, size_t first, size_t* count) {
  *count = std::min(tensors.size(), kMaxTensors - first);
  for (size_t i = 0; i < *count; ++i) {
    const at::IntArrayRef sizes = tensors[i].sizes();
    slot.dtypes[first + i] = tensors[i].scalar_type();
    slot.dimensions[first + i] = static_cast<uint8_t>(sizes.size());
    slot.sizes.insert(slot.sizes.end(), sizes.begin(), sizes.end());
  }
}

FlightRecorder::Tensors FlightRecorder::tensors_of(const Slot& slot, size_t first, size_t count) {
  Tensors out;
  auto size = slot.sizes.begin();
  for (size_t i = 0; i < first; ++i) size += slot.dimensions[i];
  for (size_t i = first; i < first + count; ++i) {
    out.sizes.emplace_back(size, size + slot.dimensions[i]);
    out.dtypes.push_back(slot.dtypes[i]);
    size += slot.dimensions[i];
  }
  return out;
}

FlightRecorder::Slot* FlightRecorder::find(Id id) {
  if (id == kNotRecorded) return nullptr;
  Slot& slot = ring_[id % capacity_];
  return slot.id.load(std::memory_order_relaxed) == id ? &slot : nullptr;
}

void FlightRecorder::begin(Id id) {
  if (Slot* const slot = find(id))
    slot->began_at.store(c10::getApproximateTime(), std::memory_order_relaxed);
}

void FlightRecorder::end(Id id, bool failed) {
  Slot* const slot = find(id);
  if (slot == nullptr) return;
  slot->failed.store(failed, std::memory_order_relaxed);
  slot->ended_at.store(c10::getApproximateTime(), std::memory_order_relaxed);
}

std::vector<FlightRecorder::Entry> FlightRecorder::entries() {
  std::vector<Entry> out;
  std::vector<std::function<bool()>> has_ended;
  const auto to_unix_ns = clock_.makeConverter();
  const auto time_of = [&to_unix_ns](const std::atomic<int64_t>& ticks) {
    const int64_t value = ticks.load(std::memory_order_relaxed);
    return value == 0 ? 0 : to_unix_ns(static_cast<c10::approx_time_t>(value));
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Id end = next_id_.load(std::memory_order_relaxed);
    for (Id id = end - std::min<Id>(end, capacity_); id < end; ++id) {
      const Slot& slot = ring_[id % capacity_];
      Entry entry;
      entry.id = id;
      entry.group = slot.group;
      entry.title = slot.title;
      entry.sequence = slot.sequence;
      entry.timeout_ms = slot.timeout_ms;
      entry.inputs = tensors_of(slot, 0, slot.input_count);
      entry.outputs = tensors_of(slot, slot.input_count, slot.output_count);
      entry.is_message = slot.is_message;
      entry.peer = slot.peer;
      entry.called_at = time_of(slot.called_at);
      entry.began_at = time_of(slot.began_at);
      entry.ended_at = time_of(slot.ended_at);
      entry.failed = slot.failed.load(std::memory_order_relaxed);
      out.push_back(std::move(entry));
      has_ended.push_back(slot.has_ended);
    }
  }
  const int64_t now = to_unix_ns(c10::getApproximateTime());
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].ended_at == 0 && has_ended[i] && has_ended[i]()) out[i].ended_at = now;
  }
  return out;
}

}  // namespace fsccl
