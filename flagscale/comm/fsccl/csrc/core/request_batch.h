// The messages of one collective between clusters: posted in any order, waited for in any order.
#pragma once

#include <functional>
#include <vector>

#include "shm_steps.h"
#include "transport.h"

namespace fsccl {

class RequestBatch {
 public:
  // Mates on the host are told whom this rank waits for, so that they blame the right one.
  RequestBatch(Transport& transport, ShmSteps& shm, const OpCard& card,
               const Deadline& deadline, std::function<void()> watch)
      : transport_(transport),
        shm_(shm),
        tag_(Transport::kCollectiveTag | card.sequence),
        card_(card),
        deadline_(deadline),
        watch_(std::move(watch)) {}

  using Requests = std::vector<RequestPtr>;

  // Messages of a stream are in an order of their own.
  void send(int peer, BufferList memory, Requests* to, size_t stream = 0) {
    to->push_back(transport_.send(peer, tag_of(stream), std::move(memory), card_));
  }
  void recv(int peer, BufferList memory, Requests* to, size_t stream = 0) {
    to->push_back(transport_.recv(peer, tag_of(stream), std::move(memory), card_));
  }
  // Beside the batches. `then` is called once the message has gone or come, perhaps by another
  // thread.
  RequestPtr send_on(size_t stream, int peer, BufferList memory, std::function<void()> then) {
    return then_call(transport_.send(peer, tag_of(stream), std::move(memory), card_), then);
  }
  RequestPtr recv_on(size_t stream, int peer, BufferList memory, std::function<void()> then) {
    return then_call(transport_.recv(peer, tag_of(stream), std::move(memory), card_), then);
  }
  // Whether it has gone or come; throws what went wrong.
  bool over(const RequestPtr& request) const {
    if (!request->finished()) return false;
    transport_.wait(request, deadline_, nullptr);
    return true;
  }

  void wait(Requests* batch) {
    for (const RequestPtr& r : *batch) {
      if (!r->finished()) {
        shm_.note_wait(r->peer);
        wait_for(r);
        shm_.note_wait(-1);
      } else {
        transport_.wait(r, deadline_, watch_);  // throws what went wrong
      }
    }
    batch->clear();
  }

 private:
  RequestPtr then_call(RequestPtr request, const std::function<void()>& then) {
    transport_.notify(request, then);
    return request;
  }
  // Who is late may only wait for another.
  void wait_for(const RequestPtr& request) {
    try {
      transport_.wait(request, deadline_, watch_);
    } catch (const Error& e) {
      if (e.fault != Fault::kTimeout) throw;
      shm_.give_up(e.rank);
    }
  }
  // Sequence numbers stay far below.
  uint64_t tag_of(size_t stream) const { return tag_ | uint64_t{stream} << 48; }

  Transport& transport_;
  ShmSteps& shm_;
  uint64_t tag_;
  OpCard card_;
  Deadline deadline_;
  std::function<void()> watch_;
};

}  // namespace fsccl
