// How the ranks of a group find each other, through a key-value store, in O(N) operations and
// bytes.
//
// Every rank writes its identity and counts itself. Whoever counts last has all there, reads them
// and writes the roll, a list of everyone in which what a rank has in common with the one before is
// left out. Nobody waits for a rank that has not called anything: the last to come is at it anyway.
//
// In larger groups one rank of each host reads the roll from the store, the first that asks for it,
// and lays it into shared memory for those beside it. Where it does not (it ended), or they cannot
// open that, they read the store's. So does a rank do the last one's work that finds everybody
// there and no roll.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "segment.h"
#include "topology.h"
#include "types.h"

namespace fsccl {

// A key-value store that all ranks of a group reach. Any thread may call; nothing may block long.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual int64_t add(const std::string& key, int64_t n) = 0;  // the sum of all so far
  virtual bool has(const std::vector<std::string>& keys) = 0;  // all of them
  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;  // that exist
};

class Rendezvous {
 public:
  // Above: ranks of a host share what one of them has read.
  static constexpr int kSharedFrom = 16;

  Rendezvous(std::unique_ptr<Store> store, int rank, int size);

  // Once; waits for nobody.
  void publish(const Identity& me);
  // Whether everyone() would find all ranks. Cheap enough to be asked again and again.
  bool complete();
  std::vector<Identity> everyone();
  // Who has not published: a few look-ups for each of them.
  std::vector<int> absent();

  Store& store() { return *store_; }
  // In a forked child, whose parent has the store.
  void release() { static_cast<void>(store_.release()); }

 private:
  std::vector<std::string> keys(int from, int to) const;
  void find_absent(int from, int to, std::vector<int>* out);
  void write_roll();
  bool shares() const { return size_ > kSharedFrom; }
  std::string read_roll();
  std::optional<std::string> read_shared();

  std::unique_ptr<Store> store_;
  int rank_, size_;
  std::string here_;                     // the key of what the ranks of this host share
  bool reads_ = true;                    // this rank the store's roll, and not what is shared
  Deadline::Clock::time_point began_{};  // asking; and when to look for oneself
  std::chrono::milliseconds patience_{500};
  std::optional<Segment> shared_;
};

// `texts` are encoded identities.
std::string encode_roll(const std::vector<std::string>& texts);
// Throws Error(kMismatch) if it is not a roll of so many.
std::vector<std::string> decode_roll(const std::string& roll, size_t ranks);

}  // namespace fsccl
