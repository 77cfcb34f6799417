// Rendezvous: how the ranks of a group find each other through a key-value store, in O(N) store
// operations and bytes.
//
// Every rank writes its identity and increments a counter. The rank that increments it last knows
// that all identities are there; it reads them and writes the peer table: a list of all identities
// in which each line equal to the previous rank's is left out. No rank waits for one that has not
// called anything: the last rank is running at that moment anyway.
//
// In larger groups, one rank per host, the first to poll, reads the peer table from the store and
// puts it in shared memory for the other ranks of the host. If it does not (its process ended) or
// they cannot open the segment, they read the store. Likewise, a rank that finds all identities but
// no peer table writes the table in place of the last one.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "segment.h"
#include "topology.h"
#include "types.h"

namespace fsccl {

// A key-value store that all ranks of a group reach. Any thread may call; no call may block for
// long.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual int64_t add(const std::string& key, int64_t n) = 0;  // returns the sum so far
  virtual bool has(const std::vector<std::string>& keys) = 0;  // whether all keys exist
  // All keys must exist.
  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;
};

// One rank's end of the rendezvous of a group. One thread at a time polls.
class Rendezvous {
 public:
  // In larger groups, the ranks of a host share the table that one of them has read.
  static constexpr int kMaxRanksWithoutSharing = 16;

  Rendezvous(std::unique_ptr<Store> store, int rank, int size);

  // Writes the identity of this rank. Call it once; it does not wait for other ranks.
  void publish(const Identity& identity);
  // Returns whether identities() would return all ranks. Cheap enough to poll.
  bool complete();
  std::vector<Identity> identities();
  // Returns the ranks that have not published. Takes a few look-ups for each of them.
  std::vector<int> absent_ranks();

  Store& store() { return *store_; }
  // Gives up the store. For a forked child, whose parent owns the store.
  void release() { static_cast<void>(store_.release()); }

 private:
  std::vector<std::string> keys(int from, int to) const;
  void find_absent_ranks(int from, int to, std::vector<int>* out);
  void write_peer_table();
  bool shares_table() const { return size_ > kMaxRanksWithoutSharing; }
  std::string read_peer_table();
  std::optional<std::string> read_shared_peer_table();

  std::unique_ptr<Store> store_;
  int rank_, size_;
  std::string host_key_;     // store key of the shared table of this host
  bool reads_store_ = true;  // this rank reads the table from the store, not from shared memory
  // When polling began. After fallback_interval_, which doubles, the rank looks for the table or
  // the identities itself.
  Deadline::Clock::time_point poll_start_{};
  std::chrono::milliseconds fallback_interval_{500};
  std::optional<Segment> shared_table_;
};

// `identities` are encoded by Identity::encode().
std::string encode_peer_table(const std::vector<std::string>& identities);
// Throws Error(kMismatch) unless it is a table of `ranks` identities.
std::vector<std::string> decode_peer_table(const std::string& table, size_t ranks);

}  // namespace fsccl
