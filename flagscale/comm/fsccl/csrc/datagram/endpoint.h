// Endpoint of a session (session.h): its socket, clock and thread, and the transport of the group
// as the reliable fallback. The thread answers packets of peers while this rank computes.
//
// Over the transport, ranks exchange notices (struct Notice) and records (session.h), with tags
// that nothing else uses. A receive for a notice of each peer is always posted; one for a record of
// a peer is posted when this rank requests it.
#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "../core/transport.h"
#include "session.h"
#include "socket.h"

namespace fsccl::datagram {

// Counters since the start of the endpoint: bytes sent, packets that the kernel dropped on
// receiving, and packets that it refused to send.
struct EndpointCounters {
  DropCounters drop_counters;
  uint64_t sent_bytes = 0, kernel_drops = 0, refused_packets = 0;
};

// Runs a session on a thread of its own. One thread calls run(); any thread may read counters.
class Endpoint final : private Network {
 public:
  // `members`: group ranks of the rail. `payload`: maximum bytes of a packet after its header.
  // Throws Error(kSystem) if no thread can be started.
  Endpoint(const Rail& rail, std::vector<int> members, std::unique_ptr<Socket> socket,
           size_t payload, Transport& transport);
  ~Endpoint() override;

  // Runs an operation and waits until it is done. `poll` is called ten times a second with the
  // group rank that is awaited, or -1; if it throws, the endpoint cannot be used any more. Throws
  // Error if a rank is lost or has called another operation.
  const Outcome& run(const AllReduceJob& job, const std::function<void(int)>& poll);
  // Result and layout of the last operation.
  const std::byte* result() { return session_.result(); }
  const BucketLayout& layout() const { return session_.layout(); }
  EndpointCounters counters();
  // Returns datagrams and bytes, including headers, sent to each group rank of the rail.
  std::map<int, Transport::Traffic> sent();
  // Sends this rank's last record to peers that lack it, and ends the thread. Called before the
  // transport closes.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;
  struct PendingMessage {  // a message in progress, and its memory
    RequestPtr request;
    std::shared_ptr<std::vector<std::byte>> memory;
  };
  // Messages in progress with a peer, and its failure.
  struct Peer {
    PendingMessage notice, record;
    std::optional<Error> loss;
    Transport::Traffic sent;  // datagrams
  };

  static constexpr uint64_t kNoticeTag = uint64_t{1} << 62 | 1, kRecordTag = uint64_t{1} << 62 | 2;

  static Time now() { return Clock::now().time_since_epoch(); }
  std::byte* reserve(size_t max_bytes) override { return socket_->reserve(max_bytes); }
  void send(int to, size_t bytes) override;
  uint32_t overruns() const override { return socket_->kernel_drops(); }
  void send_notice(int to, const Notice& notice) override;
  void send_record(int to, const std::vector<std::byte>& record) override;
  void run_thread();
  void handle_messages();
  void check_lost_peers();
  PendingMessage post_receive(int from, uint64_t tag, size_t bytes);
  void send_message(int to, uint64_t tag, const void* data, size_t bytes);
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }

  const Rail rail_;
  const std::vector<int> members_;
  Transport& transport_;
  std::unique_ptr<Socket> socket_;
  std::shared_ptr<Fd> wake_fd_;
  std::mutex mutex_;  // guards all below
  std::condition_variable done_;
  Session session_;
  std::vector<Peer> peers_;
  std::list<PendingMessage> sends_;
  std::optional<Error> error_;
  bool stop_requested_ = false;
  std::thread thread_;
};

}  // namespace fsccl::datagram
