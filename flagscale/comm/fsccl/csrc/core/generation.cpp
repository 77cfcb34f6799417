#include "generation.h"

#include <algorithm>
#include <set>
#include <thread>
#include <vector>

#include "text.h"
#include "topology.h"

namespace fsccl {
namespace {

constexpr const char* kLatestProposalKey = "generation/latest";

// One rank's part in the agreement.
class GenerationAgreement {
 public:
  GenerationAgreement(Store& store, int rank, int size)
      : store_(store), rank_(rank), size_(size), nonce_(std::to_string(random_number())) {
    for (int r = 0; r < size_; ++r) nonce_keys_.push_back("generation/nonce/" + std::to_string(r));
    store_.set(nonce_keys_[static_cast<size_t>(rank_)], nonce_);
  }

  // Takes the steps that are possible now. Returns the generation; empty if there is none yet.
  std::string advance() {
    if (rank_ == 0) publish_proposal();
    accept_proposal();
    for (const std::string& name : accepted_) {
      if (store_.has({"generation/agreed/" + name})) return name;
    }
    return "";
  }

  // Ranks that have not accepted the latest proposal, or have not written a nonce.
  std::vector<int> absent_ranks() {
    std::vector<int> out;
    for (int r = 0; r < size_; ++r) {
      const std::string accepted_key =
          accepted_.empty() ? nonce_keys_[static_cast<size_t>(r)]
                            : acceptance_key(accepted_.back(), r);
      if (!store_.has({accepted_key})) out.push_back(r);
    }
    return out;
  }

 private:
  static std::string proposal_key(const std::string& name) { return "generation/of/" + name; }
  static std::string acceptance_key(const std::string& name, int rank) {
    return "generation/accepted/" + name + "/" + std::to_string(rank);
  }

  void publish_proposal() {
    if (!store_.has(nonce_keys_)) return;
    std::string nonces;
    for (const std::string& nonce : store_.get(nonce_keys_)) nonces += nonce + '\n';
    if (nonces == proposed_nonces_) return;
    // A rank that has found an agreed proposal may leave and come again, with another nonce. That
    // is no reason for a new proposal: this rank has not noticed the agreement yet.
    for (const std::string& name : accepted_) {
      if (store_.has({"generation/agreed/" + name})) return;
    }
    proposed_nonces_ = nonces;
    const std::string name = text_of(random_key());
    store_.set(proposal_key(name), nonces);
    store_.set(kLatestProposalKey, name);
  }

  void accept_proposal() {
    if (!store_.has({kLatestProposalKey})) return;
    const std::string name = store_.get({kLatestProposalKey})[0];
    if (!examined_.insert(name).second) return;
    const std::vector<std::string> nonces = split(store_.get({proposal_key(name)})[0], '\n');
    if (nonces.size() != static_cast<size_t>(size_) ||
        nonces[static_cast<size_t>(rank_)] != nonce_) {
      return;  // of an earlier generation, or with an old nonce of this rank
    }
    // A later proposal may contain the new nonce of a rank that has left this generation.
    for (const std::string& earlier : accepted_) {
      if (store_.has({"generation/agreed/" + earlier})) return;
    }
    accepted_.push_back(name);
    store_.set(acceptance_key(name, rank_), "");
    if (store_.add("generation/acceptances/" + name, 1) == size_) {
      store_.set("generation/agreed/" + name, "");
    }
  }

  Store& store_;
  const int rank_, size_;
  const std::string nonce_;
  std::vector<std::string> nonce_keys_;   // by rank
  std::string proposed_nonces_;           // on rank 0: of its last proposal
  std::set<std::string> examined_;        // names of proposals that this rank has read
  std::vector<std::string> accepted_;     // those that it has accepted, the oldest first
};

}  // namespace

std::string agree_on_generation(Store& store, int rank, const std::vector<std::string>& names,
                                const Deadline& deadline) {
  const int size = static_cast<int>(names.size());
  if (size == 1) return text_of(random_key());
  GenerationAgreement agreement(store, rank, size);
  // The interval grows with the number of ranks, which bounds the load of the store.
  const std::chrono::microseconds max_interval(std::max(10000, 50 * size));
  auto interval = std::chrono::microseconds(200);
  for (;;) {
    const std::string generation = agreement.advance();
    if (!generation.empty()) return generation;
    if (deadline.passed()) {
      const std::vector<int> absent = agreement.absent_ranks();
      std::string text;
      for (const int r : absent) text += (text.empty() ? "" : ", ") + names[static_cast<size_t>(r)];
      throw Error(Fault::kTimeout, absent.empty() ? -1 : absent[0],
                  (text.empty() ? "the store" : text) + " did not come to connect within the timeout of " +
                      deadline.text());
    }
    std::this_thread::sleep_for(interval);
    interval = std::min(interval * 2, max_interval);
  }
}

}  // namespace fsccl
