#include "tail.h"

#include <algorithm>
#include <cstdio>

namespace fsccl::datagram {
namespace {

constexpr char kBounded[] = "by datagrams, in bounded time";
constexpr char kLearning[] = "exactly: learning what the network carries";
constexpr char kRepeated[] = "by datagrams, then exactly: too much was lost";
constexpr char kSkipped[] = "by datagrams, then left out: too much was lost";

bool is_float(DType t) {
  return t == DType::kF16 || t == DType::kBF16 || t == DType::kF32 || t == DType::kF64;
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %%", 100 * share);
  return text;
}

Circle circle_at(const Clusters& clusters, const Key& key) {
  return Circle::of(key, static_cast<uint32_t>(clusters.index), clusters.mine, clusters.count());
}

Time steady_now() { return std::chrono::steady_clock::now().time_since_epoch(); }

}  // namespace

struct Tail::Part {
  std::vector<Interval> all;  // bytes of the bucket, by place in the cluster
  Interval mine;
  const std::byte* in;        // of mine
  Feedback::Bucket bucket;
};

bool Tail::takes(const TailSettings& settings, const Reduction& r, size_t bytes) {
  const bool sums = r.op == RedOp::kSum || r.op == RedOp::kAvg;
  return settings.bounded && !r.whole && sums && is_float(r.dtype) && bytes >= settings.bytes;
}

std::string Tail::misfit(const Clusters& clusters) {
  if (clusters.count() > Session::kMostRanks) {
    return std::to_string(clusters.count()) + " hosts are more than 64";
  }
  for (const auto& cluster : clusters.ranks) {
    if (cluster.size() != clusters.ranks[0].size()) {
      return "hosts have unlike numbers of ranks, " + clusters.text();
    }
  }
  return "";
}

std::vector<int> Tail::circle_of(const Clusters& clusters) {
  std::vector<int> out;
  for (const auto& cluster : clusters.ranks) {
    out.push_back(cluster[static_cast<size_t>(clusters.index)]);
  }
  return out;
}

Tail::Tail(const TailSettings& settings, Home home, std::unique_ptr<Socket> socket, size_t most)
    : settings_(settings),
      home_(std::move(home)),
      endpoint_(circle_at(home_.clusters, home_.key), circle_of(home_.clusters), std::move(socket),
                most - sizeof(Wire), home_.transport),
      pace_(home_.clusters.count(), static_cast<int>(home_.clusters.own().size()),
            settings.rate_mbit * 1e6 / 8) {}

const char* Tail::all_reduce(const void* in, void* out, size_t count, const Reduction& r,
                             const void* of, const Exact& exact) {
  const size_t bytes = count * r.width();
  const Time begun = steady_now();
  if (pace_.exact(bytes)) {
    exact();
    pace_.ran_exactly(bytes, steady_now() - begun);
    const std::lock_guard<std::mutex> hold(mutex_);
    counts_["exact"] += 1;
    return kLearning;
  }
  const auto mates = static_cast<size_t>(home_.local.size());
  const auto* const whole = static_cast<const std::byte*>(in);
  Part part{cut_all(0, bytes, mates, Layout::kGrain), {}, whole, {of, bytes, r.dtype}};
  part.mine = part.all[static_cast<size_t>(home_.local.rank())];
  const bool fed = settings_.feedback && feedback_.has(part.bucket);
  if (mates > 1 || fed) {
    scratch_.resize(std::max(scratch_.size(), part.mine.size()));
    part.in = scratch_.data();
    const BufferList mine(scratch_.data(), part.mine.size());
    home_.local.reduce_scatter(BufferList(in, bytes), part.all, mine, r.first_stage());
    if (fed) feedback_.add(part.bucket, scratch_.data());
  }
  Job job;
  job.in = part.in;
  job.bytes = part.mine.size();
  job.how = r;
  const uint64_t what[] = {bytes, static_cast<uint64_t>(r.dtype), static_cast<uint64_t>(r.op)};
  job.digest = mac_of(Key{}, what, sizeof what) | 1;
  pace_.plan(bytes, &job);
  const Outcome& outcome = run(job);
  const bool over = over_limit(outcome);
  pace_.ended(bytes, outcome);
  pace_.repeated(over);
  this->count(outcome, steady_now() - begun);
  if (over && !settings_.skip) return repeat(outcome, exact);
  settle(part, outcome, over, out);
  return over ? kSkipped : kBounded;
}

const Outcome& Tail::run(const Job& job) {
  ShmSteps& shm = home_.shm;
  const Outcome& outcome = endpoint_.run(job, [&](int whom) {
    shm.note_wait(whom);
    home_.look();
    if (shm.deadline().passed()) shm.give_up(whom);
  });
  shm.note_wait(-1);
  return outcome;
}

// In any circle: those beside this rank have learned what is to be known of theirs.
bool Tail::over_limit(const Outcome& outcome) {
  int32_t over = 100 * outcome.excluded_share() > settings_.limit ? 1 : 0;
  if (home_.local.size() > 1) {
    Reduction most;
    most.dtype = DType::kI32;
    most.op = RedOp::kMax;
    home_.local.all_reduce_one_shot(&over, &over, 1, most);
  }
  return over != 0;
}

void Tail::count(const Outcome& outcome, Time took) {
  const std::lock_guard<std::mutex> hold(mutex_);
  double expected = 0, lost = 0, scaled = 0;
  for (const Report& r : outcome.reports) {
    expected += r.expected, lost += r.lost, scaled += r.scaled;
  }
  counts_["operations"] += 1;
  counts_["pieces"] += static_cast<double>(outcome.excluded.size());
  counts_["excluded"] += static_cast<double>(outcome.excluded.count());
  counts_["packets"] += expected;
  counts_["lost"] += lost;
  counts_["scaled"] += scaled;
  counts_["seconds"] += 1e-9 * static_cast<double>(took.count());
  counts_["seconds_ready"] += 1e-9 * static_cast<double>(outcome.waited.count());
  counts_["rate_mbit"] = pace_.rate() * 8e-6;
}

const char* Tail::repeat(const Outcome& outcome, const Exact& exact) {
  home_.warn("an all_reduce by datagrams lost too much (" + percent(outcome.excluded_share()) +
             " is excluded here, the limit is " + percent(settings_.limit / 100) +
             "): it is repeated exactly, and the next " + std::to_string(pace_.ban()) + " are, too");
  exact();
  const std::lock_guard<std::mutex> hold(mutex_);
  counts_["repeated"] += 1;
  return kRepeated;
}

void Tail::settle(const Part& part, const Outcome& outcome, bool skipped, void* out) {
  auto* const to = static_cast<std::byte*>(out) + part.mine.lo;
  const std::byte* const result = endpoint_.result();
  Bits all(outcome.excluded.size());
  for (size_t i = 0; skipped && i < all.size(); ++i) all.set(i);
  if (settings_.feedback) {
    feedback_.keep(part.bucket, part.in, endpoint_.layout(), skipped ? all : outcome.excluded);
  }
  if (skipped) {
    std::fill_n(to, part.mine.size(), std::byte{0});
    home_.warn("an all_reduce by datagrams lost too much (" + percent(outcome.excluded_share()) +
               " is excluded here, the limit is " + percent(settings_.limit / 100) +
               "): its result is zero on all ranks, and the next " + std::to_string(pace_.ban()) +
               " are done exactly");
    const std::lock_guard<std::mutex> hold(mutex_);
    counts_["skipped"] += 1;
  } else {
    std::copy(result, result + part.mine.size(), to);
  }
  if (part.all.size() > 1) {
    const size_t bytes = part.all.back().hi;
    home_.local.all_gather(BufferList(out, bytes), part.all);
  }
}

std::map<std::string, double> Tail::statistics() {
  const Counters c = endpoint_.counters();
  const std::lock_guard<std::mutex> hold(mutex_);
  std::map<std::string, double> out = counts_;
  for (const char* name : {"operations", "exact", "repeated", "skipped", "pieces", "excluded",
                           "packets", "lost", "scaled", "seconds", "seconds_ready", "rate_mbit"}) {
    out.emplace(name, 0);
  }
  out["sent_bytes"] = static_cast<double>(c.sent_bytes);
  out["forged"] = static_cast<double>(c.dropped.forged);
  out["foreign"] = static_cast<double>(c.dropped.foreign);
  out["late"] = static_cast<double>(c.dropped.late);
  out["doubled"] = static_cast<double>(c.dropped.repeated);
  out["malformed"] = static_cast<double>(c.dropped.malformed);
  out["kernel_drops"] = static_cast<double>(c.kernel_drops);
  out["refused"] = static_cast<double>(c.refused);
  return out;
}

}  // namespace fsccl::datagram
