// Rendezvous: exchange of the identities (topology.h) of the ranks of a group through a key-value
// store, with O(N) store operations and bytes for N ranks.
//
// Every rank writes its identity and increments a counter. The rank that increments the counter
// last reads all identities and writes the peer table: a list of all identities, compressed by
// omitting each line that equals that of the previous rank. So publishing never waits for other
// ranks.
//
// In larger groups, one rank per host, the first that polls, reads the peer table from the store
// and copies it to shared memory for the other ranks of the host. If it fails to do so (its process
// has ended), or they cannot open the segment, they read the store. Likewise, a rank that finds all
// identities but no peer table writes the table instead of the last rank.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "segment.h"
#include "topology.h"
#include "types.h"

namespace fsccl {

// Interface of a key-value store that all ranks of a group share. csrc/torch implements it with
// torch's Store. Any thread may call; calls must not wait for other ranks.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual int64_t add(const std::string& key, int64_t n) = 0;  // returns the sum so far
  virtual bool has(const std::vector<std::string>& keys) = 0;  // returns whether all keys exist
  // Returns the values of keys, all of which must exist.
  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;
};

// One rank's end of the rendezvous of a group. One thread at a time polls.
class Rendezvous {
 public:
  // In groups with more ranks, the ranks of a host share the table that one of them has read.
  static constexpr int kMaxRanksWithoutSharing = 16;

  Rendezvous(std::unique_ptr<Store> store, int rank, int size);

  // Writes the identity of this rank. Call it once; it does not wait for other ranks.
  void publish(const Identity& identity);
  // Returns whether all ranks have published, so that identities() may be called. Cheap enough to
  // poll.
  bool complete();
  std::vector<Identity> identities();
  // Returns the ranks that have not published, by binary search: a few store operations per rank.
  std::vector<int> absent_ranks();

  Store& store() { return *store_; }
  // Leaks the store. Called in a forked child, because the store belongs to the parent.
  void release() { static_cast<void>(store_.release()); }

 private:
  std::vector<std::string> keys(int begin_rank, int end_rank) const;
  void find_absent_ranks(int begin_rank, int end_rank, std::vector<int>* out);
  void write_peer_table();
  bool shares_table() const { return size_ > kMaxRanksWithoutSharing; }
  std::string read_peer_table();
  std::optional<std::string> read_shared_peer_table();

  std::unique_ptr<Store> store_;
  int rank_, size_;
  std::string host_key_;     // store key of the shared table of this host
  bool reads_store_ = true;  // this rank reads the table from the store, not from shared memory
  // Time of the first poll. After fallback_interval_, which doubles each time, the rank checks the
  // store itself for the table and the identities.
  Deadline::Clock::time_point poll_start_{};
  std::chrono::milliseconds fallback_interval_{500};
  std::optional<Segment> shared_table_;
};

// Returns the peer table of `identities`, which Identity::encode() has encoded.
std::string encode_peer_table(const std::vector<std::string>& identities);
// Returns the encoded identities of a peer table. Throws Error(kMismatch) unless there are `ranks`.
std::vector<std::string> decode_peer_table(const std::string& table, size_t ranks);

}  // namespace fsccl
