// Collectives of a group whose ranks form clusters by native library: the native library inside a
// cluster, host memory between clusters.
//
// It has the face of Group (core/group.h), with pointers into the memory of its device, so that the
// torch side calls either. What crosses between clusters does not depend on what is inside them:
// ranks on GPUs and ranks on CPUs take part in the same operation, each in its own cluster.
//
// A cluster of a ranks cuts what crosses into a equal intervals, and rank i owns interval i. The
// owner of an interval in one cluster exchanges with the owners in another what the two cuts have
// in common, so every byte crosses once and every rank's link to its host is used. Large buffers
// are cut in chunks; begin(k) reduces chunk k inside and sends it off, end(k) takes what came for
// it, sums and spreads it inside, and begin(k+2) comes before end(k): two chunks cross at a time.
//
// Sums: the partial sums of the clusters are folded in the order of clusters by every owner, by
// operations that round alike everywhere (combine.h), and spread from there: all ranks get the
// same bits.
//
// Where up to eight ranks, all of one host, are on GPUs that have the kernels, one kernel does
// operations of equal parts (host_kernels.h), of what it can reduce, until what crosses the bus
// takes longer than the steps it saves. Others of at most tiny_bytes a rank take neither pipes nor
// the native library either: every rank writes its part on the board and reads everyone's.
//
// One thread at a time.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/group.h"
#include "arena.h"
#include "board.h"
#include "host_kernels.h"
#include "mates.h"
#include "pipe.h"
#include "tracks.h"

namespace fsccl {

class Engine {
 public:
  // Makes the tracks, given whom to ask while a word is awaited.
  using MakeTracks = std::function<std::unique_ptr<Tracks>(std::function<void(int peer)> look)>;
  // Makes the native library's backend for the group's cluster number `cluster`, which has these
  // ranks and this one at `index`.
  using MakeNative =
      std::function<Mates::Backend(int cluster, int index, const std::vector<int>& ranks)>;

  // Waits for all ranks. Throws Error.
  Engine(std::shared_ptr<Group> group, const MakeTracks& tracks, const MakeNative& native,
         const Deadline& d);
  ~Engine();

  void all_reduce(const void* in, void* out, size_t count, const Reduction& r, const Deadline& d);
  void reduce(const void* in, void* out, size_t count, const Reduction& r, int root,
              const Deadline& d);
  void reduce_scatter(const BufferLists& in, const BufferList& out, const Reduction& r,
                      const Deadline& d);
  void all_gather(const BufferList& in, const BufferLists& out, const Deadline& d,
                  size_t width = 1);
  void broadcast(const BufferList& buffer, int root, const Deadline& d);
  void gather(const BufferList& in, const BufferLists& out, int root, const Deadline& d);
  void scatter(const BufferLists& in, const BufferList& out, int root, const Deadline& d);
  void all_to_all(const BufferLists& send, const BufferLists& recv,
                  const Deadline& d);
  // Of groups without devices: the group's barrier, in the order of operations here.
  void barrier(const Deadline& d);

  Tracks& tracks() { return *tracks_; }
  Group& group() { return *group_; }

  // Throws if a rank of this host has ended, or somebody failed. Any thread.
  void look() const;
  // Ends what waits in the native library or in a kernel. Any thread.
  void abort();
  bool abandoned() const { return mates_->abandoned(); }  // see Mates
  bool has_kernels() const { return kernels_ != nullptr; }
  // Throws what a kernel has found out. Any thread.
  void check_kernels() const {
    if (kernels_) kernels_->check();
  }
  // Tells everyone on this host, ends the native library, fails the group; throws.
  [[noreturn]] void fail(const char* what, uint64_t sequence, const Error& why);
  void shutdown();

 private:
  struct Stage;
  using Tensors = std::vector<at::Tensor>;

  static constexpr size_t kLag = 2;

  template <class F>
  void operation(OpCard card, const Deadline& d, F&& body);
  template <class Begin, class End>
  void pipeline(size_t chunks, Begin&& begin, End&& end);

  void open_board(const Deadline& d);
  void open_kernels(const Deadline& d);
  bool by_kernel(nvlink::Collective what, const Tensors& in, const Tensors& out,
                 const Reduction& r, const OpCard& card, int root = 0);
  bool near(int rank) const;
  void look_for(int peer);
  Error explain(const Error& e);
  void log(const OpCard& card, const char* algorithm) const;

  size_t size_of(int cluster) const { return clusters_.ranks[static_cast<size_t>(cluster)].size(); }
  int rank_of(int cluster, size_t i) const {
    return clusters_.ranks[static_cast<size_t>(cluster)][i];
  }
  size_t mine() const { return static_cast<size_t>(clusters_.index); }
  bool bridged() const { return clusters_.count() > 1; }
  bool one_host() const;
  bool tiny(size_t bytes) const;
  int cluster_of(int rank) const;
  // Elements a step moves of `count`, of which at most a slot lies in a part of 1/parts.
  size_t chunk_of(size_t count, size_t width, size_t parts) const;
  size_t smallest_cluster() const;

  Pipe& to(int peer);
  Pipe& from(int peer);

  at::Tensor memory(const void* data, size_t count, at::ScalarType type) const;
  Tensors memories(const BufferLists& list, at::ScalarType type) const;
  at::Tensor share(const at::Tensor& part, size_t stride);
  Tensors rows(const at::Tensor& shared, size_t stride, size_t bytes) const;

  void reduce_over(const at::Tensor& in, const at::Tensor& out, const Reduction& r, int root,
                   const OpCard& card);
  void reduce_begin(Stage& s, const at::Tensor& in, const Reduction& r, int to);
  void reduce_end(Stage& s, const at::Tensor& out, const Reduction& r, int root);
  void reduce_scatter_tiny(const Tensors& parts, const at::Tensor& out, const Reduction& r);
  void scatter_begin(Stage& s, const Tensors& in, size_t lo, size_t window, const Reduction& r);
  void scatter_end(Stage& s, const Tensors& in, const at::Tensor& out, size_t lo, size_t window,
                   const Reduction& r);
  void gather_begin(Stage& s, const Tensors& out, size_t lo, size_t window);
  void gather_end(Stage& s, const Tensors& out, size_t lo, size_t window);
  void unpack(const at::Tensor& packed, const Tensors& out, int cluster, size_t lo, size_t window);
  void broadcast_from(const at::Tensor& buffer, int root);
  void exchange_pairs(const OpCard& card, const BufferLists& send,
                      const BufferLists& recv, const Deadline& d);
  void expect_own(const BufferList& sent, const BufferList& expected) const;
  void exchange_inside(const Tensors& send, const Tensors& recv);
  void exchange_outside(const Tensors& send, const Tensors& recv);

  std::shared_ptr<Group> group_;
  const Settings& config_;
  Clusters clusters_;
  std::vector<Identity> who_;
  int rank_;
  bool enqueued_ = true;  // on all ranks: their devices have streams
  std::unique_ptr<Tracks> tracks_;
  std::unique_ptr<Board> board_;
  std::shared_ptr<void> board_memory_;
  std::unique_ptr<HostKernels> kernels_;
  std::unique_ptr<Mates> mates_;
  std::unique_ptr<Arena> arena_;
  std::map<int, Pipe> out_, in_;
  mutable std::mutex trouble_mutex_;
  std::unique_ptr<Error> trouble_;  // the courier's
  uint64_t sequence_ = 0;
  uint32_t step_ = 0;  // of the board
  bool left_ = false;
  Deadline deadline_ = Deadline::after(Deadline::Ms(0));
  std::unique_ptr<Courier> courier_;  // ends first
};

}  // namespace fsccl
