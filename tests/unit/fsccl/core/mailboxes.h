// Another transport than those of the product, in one file: mailboxes in the memory of a process
// whose threads are the ranks. A thread carries one letter after the other, drawn from all that are
// under way; only letters of one sender with one tag come in order. What a letter says is read when
// it is carried, from the memory of the send: who uses that before the send is done is found out.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "transport.h"

namespace fsccl {

class PostOffice;

class Mailbox final : public Transport {
 public:
  Mailbox(std::shared_ptr<PostOffice> office, size_t number)
      : office_(std::move(office)), number_(number) {}
  ~Mailbox() override { close(); }

  std::string address() const override { return "mailbox " + std::to_string(number_); }
  void meet(Peers peers) override;
  RequestPtr send(int peer, uint64_t tag, BufferList memory, const OpCard& card) override;
  RequestPtr recv(int peer, uint64_t tag, BufferList memory, const OpCard& card) override;
  void notify(const RequestPtr& request, std::function<void()> then) override;
  void throw_trouble() override;
  void listen() override {}
  void touch(int) override {}
  void abort(const Error& why) override;
  std::vector<Traffic> sent() override;
  uint64_t moved() const override { return moved_; }
  void close() override;

 protected:
  RequestPtr ask(int rank) override;

 private:
  friend class PostOffice;
  struct Letter {
    int from;
    uint64_t tag;
    OpCard card;
    RequestPtr request;  // the sender's
    std::vector<std::byte> body;
  };
  struct Call {
    int from;
    RequestPtr request;
  };

  bool fits(const Call& call, const Letter& letter) const {
    return (call.from == kAnySource || call.from == letter.from) && call.request->tag == letter.tag;
  }
  void hand_over(const Call& call, const Letter& letter);
  void fail(const Error& why);
  void drop_letters(const Error& why);
  size_t box_of(int rank) const { return boxes_[static_cast<size_t>(rank)]; }

  const std::shared_ptr<PostOffice> office_;
  const size_t number_;
  // The office's lock guards all below.
  std::vector<size_t> boxes_;  // by rank
  std::list<Letter> letters_;  // that nobody has called for
  std::list<Call> calls_;
  std::vector<Traffic> sent_;
  std::atomic<uint64_t> moved_{0};
  std::unique_ptr<Error> failed_;
  bool closed_ = false;
};

// Has the mailboxes, and the thread that fills them.
class PostOffice final : public Device, public std::enable_shared_from_this<PostOffice> {
 public:
  explicit PostOffice(unsigned seed) : random_(seed), thread_([this] { carry(); }) {}
  ~PostOffice() override {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      stop_ = true;
    }
    news_.notify_all();
    thread_.join();
  }
  std::unique_ptr<Transport> open() override {
    const std::lock_guard<std::mutex> hold(mutex_);
    auto made = std::make_unique<Mailbox>(shared_from_this(), boxes_.size());
    boxes_.push_back(made.get());
    return made;
  }

 private:
  friend class Mailbox;
  using Way = std::tuple<size_t, int, uint64_t>;  // to which box, from whom, the tag

  void carry() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      news_.wait(hold, [this] { return stop_ || !under_way_.empty() || !errands_.empty(); });
      if (stop_) return;
      if (!under_way_.empty()) deliver_one();
      const auto errands = std::exchange(errands_, {});
      busy_ = true;
      hold.unlock();
      for (const auto& errand : errands) errand();
      hold.lock();
      busy_ = false;
      idle_.notify_all();
    }
  }
  void deliver_one() {
    auto way = under_way_.begin();
    std::advance(way, static_cast<long>(random_() % under_way_.size()));
    Mailbox* const box = boxes_[std::get<0>(way->first)];
    Mailbox::Letter letter = std::move(way->second.front());
    way->second.pop_front();
    if (way->second.empty()) under_way_.erase(way);
    letter.body.resize(letter.request->memory.bytes());
    letter.request->memory.copy_to(letter.body.data(), {0, letter.body.size()});
    letter.request->succeed();
    if (box == nullptr) return;  // who has left reads no letters
    for (auto call = box->calls_.begin(); call != box->calls_.end(); ++call) {
      if (!box->fits(*call, letter)) continue;
      box->hand_over(*call, letter);
      box->calls_.erase(call);
      return;
    }
    box->letters_.push_back(std::move(letter));
  }
  // To be done by the thread, without the lock.
  void run(std::function<void()> errand) {
    errands_.push_back(std::move(errand));
    news_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable news_, idle_;
  std::mt19937 random_;
  std::vector<Mailbox*> boxes_;
  std::map<Way, std::deque<Mailbox::Letter>> under_way_;
  std::vector<std::function<void()>> errands_;
  bool stop_ = false, busy_ = false;
  std::thread thread_;
};

using OfficeHold = std::lock_guard<std::mutex>;

inline void Mailbox::meet(Peers peers) {
  const OfficeHold hold(office_->mutex_);
  peers_ = std::move(peers);
  for (const std::string& a : peers_.addresses) boxes_.push_back(std::stoul(a.substr(8)));
  sent_.resize(boxes_.size());
}

inline RequestPtr Mailbox::send(int peer, uint64_t tag, BufferList memory, const OpCard& card) {
  auto request = std::make_shared<Request>();
  request->memory = std::move(memory);
  const OfficeHold hold(office_->mutex_);
  if (failed_) {
    request->fail(*failed_);
    return request;
  }
  sent_[static_cast<size_t>(peer)].messages += 1;
  sent_[static_cast<size_t>(peer)].bytes += request->memory.bytes();
  ++moved_;
  office_->under_way_[{box_of(peer), peers_.rank, tag}].push_back(
      {peers_.rank, tag, card, request, {}});
  office_->news_.notify_all();
  return request;
}

inline RequestPtr Mailbox::recv(int peer, uint64_t tag, BufferList memory, const OpCard& card) {
  auto request = std::make_shared<Request>();
  request->tag = tag;
  request->card = card;
  request->peer = peer;
  request->memory = std::move(memory);
  const OfficeHold hold(office_->mutex_);
  if (failed_) {
    request->fail(*failed_);
    return request;
  }
  const Call call{peer, request};
  for (auto letter = letters_.begin(); letter != letters_.end(); ++letter) {
    if (!fits(call, *letter)) continue;
    hand_over(call, *letter);
    letters_.erase(letter);
    return request;
  }
  calls_.push_back(call);
  return request;
}

inline void Mailbox::hand_over(const Call& call, const Letter& letter) {
  Request& r = *call.request;
  const std::string& name = this->name(letter.from);
  r.peer = letter.from;
  ++moved_;
  if (letter.card != r.card) {
    r.fail(unlike({letter.from, name, letter.card},
                  {peers_.rank, this->name(peers_.rank), r.card}, letter.from));
  } else if (letter.body.size() != r.memory.bytes()) {
    r.fail(Error(Fault::kMismatch, letter.from,
                 other_size(name, letter.body.size(), this->name(peers_.rank), r.memory.bytes())));
  } else {
    r.memory.copy_from(letter.body.data(), {0, letter.body.size()});
    r.succeed();
  }
}

inline void Mailbox::notify(const RequestPtr& request, std::function<void()> then) {
  {
    const OfficeHold hold(office_->mutex_);
    if (!request->finished()) {
      PostOffice& office = *office_;
      request->on_settled = [&office, then = std::move(then)](Request&) { office.run(then); };
      return;
    }
  }
  then();
}

inline void Mailbox::throw_trouble() {
  const OfficeHold hold(office_->mutex_);
  if (failed_) throw Error(*failed_);
}

inline RequestPtr Mailbox::ask(int rank) {
  auto request = std::make_shared<Request>();
  const OfficeHold hold(office_->mutex_);
  Mailbox* const box = office_->boxes_[box_of(rank)];
  if (box == nullptr) return nullptr;
  office_->run([box, request] {
    request->peer = box->answer_();
    request->succeed();
  });
  return request;
}

inline void Mailbox::fail(const Error& why) {
  failed_ = std::make_unique<Error>(why);
  for (const Call& call : calls_) call.request->fail(why);
  calls_.clear();
  drop_letters(why);
}

// This rank's, that have yet to be carried: their memory is the caller's again.
inline void Mailbox::drop_letters(const Error& why) {
  for (auto way = office_->under_way_.begin(); way != office_->under_way_.end();) {
    const bool to_peer = std::count(boxes_.begin(), boxes_.end(), std::get<0>(way->first)) > 0;
    if (!to_peer || std::get<1>(way->first) != peers_.rank) {
      ++way;
      continue;
    }
    for (const Letter& letter : way->second) letter.request->fail(why);
    way = office_->under_way_.erase(way);
  }
}

inline void Mailbox::abort(const Error& why) {
  const OfficeHold hold(office_->mutex_);
  if (failed_) return;
  fail(why);
  for (const size_t number : boxes_) {
    Mailbox* const box = office_->boxes_[number];
    if (box == nullptr || box->failed_) continue;
    box->fail(why);
    office_->run([box, why] { box->aborted_(why); });
  }
}

inline std::vector<Transport::Traffic> Mailbox::sent() {
  const OfficeHold hold(office_->mutex_);
  return sent_;
}

// Nobody calls this rank any more, once it returns.
inline void Mailbox::close() {
  std::unique_lock<std::mutex> hold(office_->mutex_);
  if (std::exchange(closed_, true)) return;
  office_->idle_.wait(hold, [this] { return office_->errands_.empty() && !office_->busy_; });
  drop_letters(Error(Fault::kAborted, peers_.rank, "it has left"));
  office_->boxes_[number_] = nullptr;
}

}  // namespace fsccl
