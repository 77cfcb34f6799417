#include "flight_recorder.h"

#include <algorithm>
#include <chrono>
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

int64_t now_ns() {
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch).count();
}

void describe(TensorSpan tensors, FlightRecorder::Tensors* out) {
  const size_t count = std::min(tensors.size(), FlightRecorder::kMaxTensors);
  out->sizes.resize(count);
  out->dtypes.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const at::IntArrayRef sizes = tensors[i].sizes();
    out->sizes[i].assign(sizes.begin(), sizes.end());
    out->dtypes[i] = tensors[i].scalar_type();
  }
}

}  // namespace

FlightRecorder& FlightRecorder::of_this_process() { return per_process<FlightRecorder>(); }

FlightRecorder::FlightRecorder() : capacity_(capacity_from_environment()) {}

FlightRecorder::Id FlightRecorder::record(Entry entry, TensorSpan inputs, TensorSpan outputs) {
  if (!enabled()) return kNotRecorded;
  entry.called_at = now_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  const Id id = next_id_++;
  entry.id = id;
  if (ring_.size() < capacity_) {
    ring_.push_back(std::move(entry));
  } else {
    ring_[id % capacity_] = std::move(entry);
  }
  Entry& stored = ring_[id % capacity_];
  describe(inputs, &stored.inputs);
  describe(outputs, &stored.outputs);
  return id;
}

FlightRecorder::Entry* FlightRecorder::find(Id id) {
  if (id == kNotRecorded || id + capacity_ < next_id_) return nullptr;
  return &ring_[id % capacity_];
}

void FlightRecorder::begin(Id id) {
  if (id == kNotRecorded) return;
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Entry* const entry = find(id)) entry->began_at = now;
}

void FlightRecorder::end(Id id, bool failed) {
  if (id == kNotRecorded) return;
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry* const entry = find(id);
  if (entry == nullptr) return;
  entry->ended_at = now;
  entry->failed = failed;
}

std::vector<FlightRecorder::Entry> FlightRecorder::entries() {
  std::vector<Entry> out;
  if (!enabled()) return out;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t first = ring_.size() < capacity_ ? 0 : next_id_ % capacity_;
    for (size_t i = 0; i < ring_.size(); ++i) out.push_back(ring_[(first + i) % ring_.size()]);
  }
  for (Entry& entry : out) {
    if (entry.ended_at == 0 && entry.has_ended && entry.has_ended()) entry.ended_at = now_ns();
  }
  return out;
}

}  // namespace fsccl
