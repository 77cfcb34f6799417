// Agreement of the ranks of a group on a generation: a random name under which this incarnation of
// the group keeps its keys in the store.
//
// A store may contain the keys of ranks that no longer exist: torchrun restarts the ranks of a job
// with the same store, a program may destroy a group and create it again, and a file store may be
// left over from an earlier run. No rank can tell by the keys alone whether another rank's entry is
// old, so every rank confirms the entries:
//
//   1. Every rank draws a random number, its nonce, and writes it, which replaces an old one.
//   2. Rank 0 reads the nonces of all ranks and publishes them as a proposal with a random name. If
//      a nonce changes afterwards, it had been an old one, and rank 0 publishes another proposal.
//   3. A rank accepts every proposal that contains its own nonce. The name of the first proposal
//      that all ranks have accepted is the generation.
//
// A proposal with the nonce of a rank that no longer exists is never accepted by that rank, so all
// ranks of a generation exist when they agree on it. The ranks wait for each other here.
#pragma once

#include <string>
#include <vector>

#include "rendezvous.h"
#include "types.h"

namespace fsccl {

// Returns the name of the generation, the same on all ranks. `names` are those of the ranks of the
// group, for messages. Throws Error(kTimeout) that names the
// ranks that did not come before the deadline.
std::string agree_on_generation(Store& store, int rank, const std::vector<std::string>& names,
                                const Deadline& deadline);

}  // namespace fsccl
