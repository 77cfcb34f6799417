// The messages of one collective between nodes. They can be started and awaited in any order.
#pragma once

#include <functional>
#include <vector>

#include "shm_steps.h"
#include "transport.h"

namespace fsccl {

// Starts and awaits the messages of the collective in progress, on its thread.
class RequestBatch {
 public:
  // While this rank waits for a message, `shm` shows the other ranks of its node whose message it
  // is (ShmSteps::set_awaited_rank), so that a timeout names the right rank. `poll` is called
  // during waits and throws to end them.
  RequestBatch(Transport& transport, ShmSteps& shm, const CollectiveFingerprint& fingerprint,
               const Deadline& deadline, std::function<void()> poll)
      : transport_(transport),
        shm_(shm),
        base_tag_(Transport::kCollectiveTag | fingerprint.sequence),
        fingerprint_(fingerprint),
        deadline_(deadline),
        poll_(std::move(poll)) {}

  using Requests = std::vector<RequestPtr>;

  // Messages of one stream to one rank stay in order; streams are independent of each other.
  void send(int peer, BufferList memory, Requests* requests, size_t stream = 0) {
    requests->push_back(transport_.send(peer, tag_of(stream), std::move(memory), fingerprint_));
  }
  void recv(int peer, BufferList memory, Requests* requests, size_t stream = 0) {
    requests->push_back(transport_.recv(peer, tag_of(stream), std::move(memory), fingerprint_));
  }
  // Single messages outside a list of requests. `callback` is called once the message has finished,
  // possibly by another thread.
  RequestPtr send_on(size_t stream, int peer, BufferList memory, std::function<void()> callback) {
    return notify(transport_.send(peer, tag_of(stream), std::move(memory), fingerprint_), callback);
  }
  RequestPtr recv_on(size_t stream, int peer, BufferList memory, std::function<void()> callback) {
    return notify(transport_.recv(peer, tag_of(stream), std::move(memory), fingerprint_), callback);
  }
  // Returns whether the request has finished. Throws its error.
  bool has_finished(const RequestPtr& request) const {
    if (!request->finished()) return false;
    transport_.wait(request, deadline_, nullptr);
    return true;
  }

  void wait(Requests* requests) {
    for (const RequestPtr& r : *requests) {
      if (!r->finished()) {
        shm_.set_awaited_rank(r->peer);
        wait_for_request(r);
        shm_.set_awaited_rank(-1);
      } else {
        transport_.wait(r, deadline_, poll_);  // throws the error of the request
      }
    }
    requests->clear();
  }

 private:
  RequestPtr notify(RequestPtr request, const std::function<void()>& callback) {
    transport_.notify(request, callback);
    return request;
  }
  // The awaited rank may itself wait for another: throw_if_timed_out() finds the straggler.
  void wait_for_request(const RequestPtr& request) {
    try {
      transport_.wait(request, deadline_, poll_);
    } catch (const Error& e) {
      if (e.fault != Fault::kTimeout) throw;
      shm_.throw_if_timed_out(e.rank);
    }
  }
  // Sequence numbers stay far below 2^48.
  uint64_t tag_of(size_t stream) const { return base_tag_ | uint64_t{stream} << 48; }

  Transport& transport_;
  ShmSteps& shm_;
  uint64_t base_tag_;
  CollectiveFingerprint fingerprint_;
  Deadline deadline_;
  std::function<void()> poll_;
};

}  // namespace fsccl
