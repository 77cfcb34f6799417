// The messages of one collective between clusters: posted in any order, waited for in any order.
#pragma once

#include <functional>
#include <vector>

#include "lane.h"
#include "messenger.h"

namespace fsccl {

class Exchange {
 public:
  // Lane mates are told whom this rank waits for, so that they blame the right one.
  Exchange(Messenger& messenger, Lane& lane, const OpCard& card, const Deadline& deadline,
           std::function<void()> watch)
      : messenger_(messenger),
        lane_(lane),
        tag_(Messenger::kCollectiveTag | card.sequence),
        card_(card),
        deadline_(deadline),
        watch_(std::move(watch)) {}

  using Batch = std::vector<RequestPtr>;

  void send(int peer, Pieces memory, Batch* to) {
    to->push_back(messenger_.send(peer, tag_, std::move(memory), card_));
  }
  void recv(int peer, Pieces memory, Batch* to) {
    to->push_back(messenger_.recv(peer, tag_, std::move(memory), card_));
  }
  // Beside the batches: streams of messages, each in an order of its own. `then` is called once the
  // message has gone or come, perhaps by another thread.
  RequestPtr send_on(size_t stream, int peer, Pieces memory, std::function<void()> then) {
    auto request = messenger_.send(peer, tag_of(stream), std::move(memory), card_);
    messenger_.notify(request, std::move(then));
    return request;
  }
  RequestPtr recv_on(size_t stream, int peer, Pieces memory, std::function<void()> then) {
    auto request = messenger_.recv(peer, tag_of(stream), std::move(memory), card_);
    messenger_.notify(request, std::move(then));
    return request;
  }
  // Whether it has gone or come; throws what went wrong.
  bool over(const RequestPtr& request) const {
    if (!request->finished()) return false;
    messenger_.wait(request, deadline_, nullptr);
    return true;
  }

  void wait(Batch* batch) {
    for (const RequestPtr& r : *batch) {
      if (!r->finished()) {
        lane_.note_wait(r->peer);
        wait_for(r);
        lane_.note_wait(-1);
      } else {
        messenger_.wait(r, deadline_, watch_);  // throws what went wrong
      }
    }
    batch->clear();
  }

 private:
  // Who is late may only wait for another.
  void wait_for(const RequestPtr& request) {
    try {
      messenger_.wait(request, deadline_, watch_);
    } catch (const Error& e) {
      if (e.fault != Fault::kTimeout) throw;
      lane_.give_up(e.rank);
    }
  }
  // Sequence numbers stay far below.
  uint64_t tag_of(size_t stream) const { return tag_ | (uint64_t{stream} + 1) << 48; }

  Messenger& messenger_;
  Lane& lane_;
  uint64_t tag_;
  OpCard card_;
  Deadline deadline_;
  std::function<void()> watch_;
};

}  // namespace fsccl
