// Transport for tests, which shows that the core depends only on the interface: the ranks are
// threads, and a message is delivered to a mailbox in the memory of the process. A thread delivers
// one message after the other, chosen at random from all messages in flight; only messages of one
// sender with one tag stay in order. A message is read from the memory of its send when it is
// delivered, so that tests detect code that reuses that memory before the send has finished.
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

class MailboxNetwork;

// Transport of one group over a MailboxNetwork.
class Mailbox final : public Transport {
 public:
  Mailbox(std::shared_ptr<MailboxNetwork> network, size_t number)
      : network_(std::move(network)), number_(number) {}
  ~Mailbox() override { close(); }

  std::string address() const override { return "mailbox " + std::to_string(number_); }
  void set_peers(Peers peers) override;
  RequestPtr send(int peer, uint64_t tag, BufferList memory,
                  const CollectiveFingerprint& fingerprint) override;
  RequestPtr recv(int peer, uint64_t tag, BufferList memory,
                  const CollectiveFingerprint& fingerprint) override;
  void notify(const RequestPtr& request, std::function<void()> callback) override;
  void raise_transport_error() override;
  std::optional<Error> loss_of(int) override { return std::nullopt; }
  ProcessState probe_process(int, const Deadline&) override { return ProcessState::kUnknown; }
  void listen() override {}
  void ensure_connection(int) override {}
  void abort(const Error& error) override;
  std::vector<Traffic> sent_traffic() override;
  uint64_t progress_count() const override { return progress_; }
  void close() override;

 protected:
  RequestPtr query_awaited_rank(int rank) override;

 private:
  friend class MailboxNetwork;
  // A message that has been sent.
  struct Message {
    int from;
    uint64_t tag;
    CollectiveFingerprint fingerprint;
    RequestPtr request;  // of the sender
    std::vector<std::byte> body;
  };
  // A receive that waits for a message.
  struct Receive {
    int from;
    RequestPtr request;
  };

  bool matches(const Receive& receive, const Message& message) const {
    return (receive.from == kAnySource || receive.from == message.from) &&
           receive.request->tag == message.tag;
  }
  void deliver(const Receive& receive, const Message& message);
  void fail_all(const Error& error);
  void drop_unsent(const Error& error);
  size_t mailbox_of(int rank) const { return mailboxes_[static_cast<size_t>(rank)]; }

  const std::shared_ptr<MailboxNetwork> network_;
  const size_t number_;
  // The lock of the network guards all below.
  std::vector<size_t> mailboxes_;  // by rank
  std::list<Message> unmatched_;   // messages that no receive has matched
  std::list<Receive> receives_;
  std::vector<Traffic> sent_;
  std::atomic<uint64_t> progress_{0};
  std::unique_ptr<Error> abort_error_;
  bool closed_ = false;
};

// Owns the mailboxes and the thread that fills them.
class MailboxNetwork final : public Device, public std::enable_shared_from_this<MailboxNetwork> {
 public:
  explicit MailboxNetwork(unsigned seed) : random_(seed), thread_([this] { run_thread(); }) {}
  ~MailboxNetwork() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  std::unique_ptr<Transport> open() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto transport = std::make_unique<Mailbox>(shared_from_this(), mailboxes_.size());
    mailboxes_.push_back(transport.get());
    return transport;
  }

 private:
  friend class Mailbox;
  using Stream = std::tuple<size_t, int, uint64_t>;  // receiving mailbox, sender, tag

  void run_thread() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stop_ || !in_flight_.empty() || !tasks_.empty(); });
      if (stop_) return;
      if (!in_flight_.empty()) deliver_random_message();
      const auto tasks = std::exchange(tasks_, {});
      busy_ = true;
      lock.unlock();
      for (const auto& task : tasks) task();
      lock.lock();
      busy_ = false;
      idle_.notify_all();
    }
  }
  void deliver_random_message() {
    auto stream = in_flight_.begin();
    std::advance(stream, static_cast<long>(random_() % in_flight_.size()));
    Mailbox* const mailbox = mailboxes_[std::get<0>(stream->first)];
    Mailbox::Message message = std::move(stream->second.front());
    stream->second.pop_front();
    if (stream->second.empty()) in_flight_.erase(stream);
    message.body.resize(message.request->memory.bytes());
    message.request->memory.copy_to(message.body.data(), {0, message.body.size()});
    message.request->succeed();
    if (mailbox == nullptr) return;  // the receiver has left
    for (auto receive = mailbox->receives_.begin(); receive != mailbox->receives_.end();
         ++receive) {
      if (!mailbox->matches(*receive, message)) continue;
      mailbox->deliver(*receive, message);
      mailbox->receives_.erase(receive);
      return;
    }
    mailbox->unmatched_.push_back(std::move(message));
  }
  // Runs a task on the thread, without the lock.
  void run_task(std::function<void()> task) {
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::mt19937 random_;
  std::vector<Mailbox*> mailboxes_;
  std::map<Stream, std::deque<Mailbox::Message>> in_flight_;
  std::vector<std::function<void()>> tasks_;
  bool stop_ = false, busy_ = false;  // busy: a task is running
  std::thread thread_;
};

using NetworkLock = std::lock_guard<std::mutex>;

inline void Mailbox::set_peers(Peers peers) {
  const NetworkLock lock(network_->mutex_);
  peers_ = std::move(peers);
  for (const std::string& a : peers_.addresses) mailboxes_.push_back(std::stoul(a.substr(8)));
  sent_.resize(mailboxes_.size());
}

inline RequestPtr Mailbox::send(int peer, uint64_t tag, BufferList memory,
                                const CollectiveFingerprint& fingerprint) {
  auto request = std::make_shared<Request>();
  request->memory = std::move(memory);
  const NetworkLock lock(network_->mutex_);
  if (abort_error_) {
    request->fail(*abort_error_);
    return request;
  }
  sent_[static_cast<size_t>(peer)].messages += 1;
  sent_[static_cast<size_t>(peer)].bytes += request->memory.bytes();
  ++progress_;
  network_->in_flight_[{mailbox_of(peer), peers_.rank, tag}].push_back(
      {peers_.rank, tag, fingerprint, request, {}});
  network_->changed_.notify_all();
  return request;
}

inline RequestPtr Mailbox::recv(int peer, uint64_t tag, BufferList memory,
                                const CollectiveFingerprint& fingerprint) {
  auto request = std::make_shared<Request>();
  request->tag = tag;
  request->fingerprint = fingerprint;
  request->peer = peer;
  request->memory = std::move(memory);
  const NetworkLock lock(network_->mutex_);
  if (abort_error_) {
    request->fail(*abort_error_);
    return request;
  }
  const Receive receive{peer, request};
  for (auto message = unmatched_.begin(); message != unmatched_.end(); ++message) {
    if (!matches(receive, *message)) continue;
    deliver(receive, *message);
    unmatched_.erase(message);
    return request;
  }
  receives_.push_back(receive);
  return request;
}

inline void Mailbox::deliver(const Receive& receive, const Message& message) {
  Request& r = *receive.request;
  const std::string& name = this->name(message.from);
  r.peer = message.from;
  ++progress_;
  if (message.fingerprint != r.fingerprint) {
    r.fail(mismatch_error({message.from, name, message.fingerprint},
                          {peers_.rank, this->name(peers_.rank), r.fingerprint}, message.from));
  } else if (message.body.size() != r.memory.bytes()) {
    r.fail(Error(
        Fault::kMismatch, message.from,
        size_mismatch_text(name, message.body.size(), this->name(peers_.rank), r.memory.bytes())));
  } else {
    r.memory.copy_from(message.body.data(), {0, message.body.size()});
    r.succeed();
  }
}

inline void Mailbox::notify(const RequestPtr& request, std::function<void()> callback) {
  {
    const NetworkLock lock(network_->mutex_);
    if (!request->finished()) {
      MailboxNetwork& network = *network_;
      request->on_finished = [&network, callback = std::move(callback)](Request&) {
        network.run_task(callback);
      };
      return;
    }
  }
  callback();
}

inline void Mailbox::raise_transport_error() {
  const NetworkLock lock(network_->mutex_);
  if (abort_error_) throw Error(*abort_error_);
}

inline RequestPtr Mailbox::query_awaited_rank(int rank) {
  auto request = std::make_shared<Request>();
  const NetworkLock lock(network_->mutex_);
  Mailbox* const mailbox = network_->mailboxes_[mailbox_of(rank)];
  if (mailbox == nullptr) return nullptr;
  network_->run_task([mailbox, request] {
    request->peer = mailbox->wait_query_handler_();
    request->succeed();
  });
  return request;
}

inline void Mailbox::fail_all(const Error& error) {
  abort_error_ = std::make_unique<Error>(error);
  for (const Receive& receive : receives_) receive.request->fail(error);
  receives_.clear();
  drop_unsent(error);
}

// Fails this rank's sends that have not been delivered: their memory belongs to the caller again.
inline void Mailbox::drop_unsent(const Error& error) {
  for (auto stream = network_->in_flight_.begin(); stream != network_->in_flight_.end();) {
    const bool to_peer =
        std::count(mailboxes_.begin(), mailboxes_.end(), std::get<0>(stream->first)) > 0;
    if (!to_peer || std::get<1>(stream->first) != peers_.rank) {
      ++stream;
      continue;
    }
    for (const Message& message : stream->second) message.request->fail(error);
    stream = network_->in_flight_.erase(stream);
  }
}

inline void Mailbox::abort(const Error& error) {
  const NetworkLock lock(network_->mutex_);
  if (abort_error_) return;
  fail_all(error);
  for (const size_t number : mailboxes_) {
    Mailbox* const mailbox = network_->mailboxes_[number];
    if (mailbox == nullptr || mailbox->abort_error_) continue;
    mailbox->fail_all(error);
    network_->run_task([mailbox, error] { mailbox->abort_handler_(error); });
  }
}

inline std::vector<Transport::Traffic> Mailbox::sent_traffic() {
  const NetworkLock lock(network_->mutex_);
  return sent_;
}

// Leaves the network. Once it returns, no handler of this rank is called any more.
inline void Mailbox::close() {
  std::unique_lock<std::mutex> lock(network_->mutex_);
  if (std::exchange(closed_, true)) return;
  network_->idle_.wait(lock, [this] { return network_->tasks_.empty() && !network_->busy_; });
  drop_unsent(Error(Fault::kAborted, peers_.rank, "it has left"));
  network_->mailboxes_[number_] = nullptr;
}

}  // namespace fsccl
