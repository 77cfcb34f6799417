#include "courier.h"

#include "../core/thread.h"
#include "pipe.h"

namespace fsccl {
namespace {

constexpr std::chrono::microseconds kGlance(20);
constexpr int kQuietGlances = 500;  // after these (10 ms) it glances more rarely
constexpr std::chrono::microseconds kRareGlance(200);

}  // namespace

Courier::Courier(Group& group, std::function<void(const Error&)> failed)
    : group_(group), failed_(std::move(failed)) {}

Courier::~Courier() {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Courier::begin(const OpCard& card) {
  std::lock_guard<std::mutex> hold(mutex_);
  card_ = card;
}

void Courier::send(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes) {
  add(peer, true, std::move(ring), n, bytes);
}

void Courier::receive(int peer, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes) {
  add(peer, false, std::move(ring), n, bytes);
}

void Courier::add(int peer, bool sends, std::shared_ptr<Ring> ring, uint32_t n, size_t bytes) {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    Way& way = ways_[{peer, sends}];
    if (!way.ring) way = {peer, sends, std::move(ring), {}};
    way.jobs.push_back({n, bytes, card_, nullptr});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

bool Courier::flush(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> hold(mutex_);
  return changed_.wait_for(hold, limit, [this] { return broken_ || idle(); });
}

bool Courier::idle() const {
  for (const auto& [key, way] : ways_) {
    if (!way.jobs.empty()) return false;
  }
  return true;
}

void Courier::run() {
  begin_thread("fsccl-courier");
  std::unique_lock<std::mutex> hold(mutex_);
  int quiet = 0;
  while (!stop_ && !broken_) {
    bool moved = false;
    try {
      for (auto& [key, way] : ways_) moved = advance(way) || moved;
    } catch (const Error& e) {
      broken_ = true;
      hold.unlock();
      failed_(e);
      hold.lock();
    }
    quiet = moved ? 0 : quiet + 1;
    if (idle() || broken_) {
      changed_.notify_all();
      changed_.wait(hold, [this] { return stop_ || broken_ || !idle(); });
      quiet = 0;
    } else if (!moved) {
      changed_.wait_for(hold, quiet < kQuietGlances ? kGlance : kRareGlance);
    }
  }
}

// Messages of a way finish in order, so the words only grow.
bool Courier::advance(Way& way) {
  bool moved = false;
  while (!way.jobs.empty() && way.jobs.front().request && way.jobs.front().request->finished()) {
    const Job& job = way.jobs.front();
    if (job.request->error) throw Error(*job.request->error);
    set_word(way.sends ? way.ring->taken() : way.ring->posted(), job.n + 1);
    way.jobs.pop_front();
    moved = true;
  }
  while (start_next(way)) moved = true;
  return moved;
}

bool Courier::start_next(Way& way) {
  for (Job& job : way.jobs) {
    if (job.request) continue;
    const bool ready = way.sends ? reached(way.ring->posted(), job.n + 1)
                                 : reached(way.ring->taken(), job.n + 1 - Ring::kSlots);
    if (!ready) return false;
    const BufferList memory(way.ring->slot(job.n), job.bytes);
    const Deadline met = Deadline::after(Deadline::Ms(0));  // the group has met long ago
    job.request = way.sends ? group_.send(way.peer, kPipeTag, memory, met, job.card)
                            : group_.recv(way.peer, kPipeTag, memory, met, job.card);
    return true;
  }
  return false;
}

}  // namespace fsccl
