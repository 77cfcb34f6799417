// all_reduce in bounded time, for gradients: what a group has of it. Over clusters of as many ranks
// each, the ranks in one place of every cluster are a circle, and reduce an equal part of the bucket
// by datagrams, after it has been summed in shared memory inside the clusters and before it is
// gathered there. Between clusters of one rank each there is one circle, of all.
//
// How much may be excluded is the user's to say; an operation of which more is, in any circle, is
// repeated by the exact algorithm, or is zero on all ranks (`skip`). All ranks know of every
// outcome, so all take the same way.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "../core/local.h"
#include "../core/settings.h"
#include "../core/topology.h"
#include "endpoint.h"
#include "feedback.h"
#include "pace.h"

namespace fsccl::datagram {

class Tail {
 public:
  // Of the group; all outlive the tail but the transport, before whose end stop() is called.
  struct Home {
    Transport& transport;
    ShmSteps& shm;
    Local& local;
    const Clusters& clusters;
    Key key;
    std::function<void()> look;  // throws when the group has failed
    std::function<void(const std::string&)> warn;
  };
  using Exact = std::function<void()>;

  // Whether the settings ask for it, for such an operation; and why such clusters cannot have it,
  // empty if they can.
  static bool takes(const TailSettings& settings, const Reduction& r, size_t bytes);
  static std::string misfit(const Clusters& clusters);
  // The group ranks of the circle of which this rank is.
  static std::vector<int> circle_of(const Clusters& clusters);

  // `most` is what a packet can hold, to whomever: the same on all ranks.
  Tail(const TailSettings& settings, Home home, std::unique_ptr<Socket> socket, size_t most);

  // `of`: the bucket by whose memory it is known. `exact` does the same operation by another way.
  // Returns what it took, in words.
  const char* all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                         const void* of, const Exact& exact);
  // Any thread may call.
  std::map<std::string, double> statistics();
  std::map<int, Transport::Traffic> sent() { return endpoint_.sent(); }
  void stop() { endpoint_.stop(); }

 private:
  struct Part;  // of an operation: this rank's circle's

  const Outcome& run(const Job& job);
  bool over_limit(const Outcome& outcome);
  void count(const Outcome& outcome, Time took);
  void settle(const Part& part, const Outcome& outcome, bool skipped, void* out);
  const char* repeat(const Outcome& outcome, const Exact& exact);

  const TailSettings settings_;
  Home home_;
  Endpoint endpoint_;
  Pace pace_;
  Feedback feedback_;
  std::vector<std::byte> scratch_;
  std::mutex mutex_;  // of what follows
  std::map<std::string, double> counts_;
};

}  // namespace fsccl::datagram
