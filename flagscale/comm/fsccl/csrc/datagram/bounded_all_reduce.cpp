#include "bounded_all_reduce.h"

#include <algorithm>
#include <cstdio>

namespace fsccl::datagram {
namespace {

constexpr char kBoundedText[] = "by datagrams, in bounded time";
constexpr char kLearningText[] = "exactly: learning what the network carries";
constexpr char kRepeatedText[] = "by datagrams, then exactly: too much was lost";
constexpr char kSkippedText[] = "by datagrams, then left out: too much was lost";

bool is_float(DType t) {
  return t == DType::kF16 || t == DType::kBF16 || t == DType::kF32 || t == DType::kF64;
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %%", 100 * share);
  return text;
}

Rail rail_at(const RankPartition& nodes, const Key& key) {
  return Rail::derive(key, static_cast<uint32_t>(nodes.own_index), nodes.own_part, nodes.count());
}

Time steady_now() { return std::chrono::steady_clock::now().time_since_epoch(); }

}  // namespace

// Part of the bucket that this rank's rail reduces.
struct BoundedAllReduce::RailPart {
  std::vector<Interval> parts;  // of all rails, in bytes of the bucket, by index in the node
  Interval own_range;           // of this rank's rail
  const std::byte* in;          // input of this part: summed inside the node
  ErrorFeedback::BucketKey bucket;
};

bool BoundedAllReduce::is_eligible(const BoundedSettings& settings, const Reduction& r,
                                   size_t bytes) {
  const bool sums = r.op == RedOp::kSum || r.op == RedOp::kAvg;
  return settings.enabled && !r.exact && sums && is_float(r.dtype) && bytes >= settings.min_bytes;
}

std::string BoundedAllReduce::unsupported_reason(const RankPartition& nodes) {
  if (nodes.count() > Session::kMaxRanks) {
    return std::to_string(nodes.count()) + " hosts are more than 64";
  }
  for (const auto& node : nodes.ranks) {
    if (node.size() != nodes.ranks[0].size()) {
      return "hosts have different numbers of ranks, " + nodes.text();
    }
  }
  return "";
}

std::vector<int> BoundedAllReduce::rail_of(const RankPartition& nodes) {
  std::vector<int> out;
  for (const auto& node : nodes.ranks) {
    out.push_back(node[static_cast<size_t>(nodes.own_index)]);
  }
  return out;
}

BoundedAllReduce::BoundedAllReduce(const BoundedSettings& settings, Context context,
                                   std::unique_ptr<Socket> socket, size_t max_packet_bytes)
    : settings_(settings),
      context_(std::move(context)),
      endpoint_(rail_at(context_.nodes, context_.key), rail_of(context_.nodes), std::move(socket),
                max_packet_bytes - sizeof(WireHeader), context_.transport),
      rate_controller_(context_.nodes.count(), static_cast<int>(context_.nodes.own_ranks().size()),
                       settings.rate_mbit * 1e6 / 8) {}

const char* BoundedAllReduce::all_reduce(const void* in, void* out, size_t count,
                                         const Reduction& r, const void* bucket,
                                         const ExactAllReduce& run_exact) {
  const size_t bytes = count * r.width();
  const Time start = steady_now();
  if (rate_controller_.should_use_exact(bytes)) {
    run_exact();
    rate_controller_.record_exact(bytes, steady_now() - start);
    const std::lock_guard<std::mutex> lock(mutex_);
    statistics_["exact"] += 1;
    return kLearningText;
  }
  const auto node_ranks = static_cast<size_t>(context_.intra_node.size());
  const auto* const input = static_cast<const std::byte*>(in);
  RailPart rail_part{
      cut_all(0, bytes, node_ranks, BucketLayout::kGrain), {}, input, {bucket, bytes, r.dtype}};
  rail_part.own_range = rail_part.parts[static_cast<size_t>(context_.intra_node.rank())];
  const bool has_residual = settings_.error_feedback && error_feedback_.has(rail_part.bucket);
  if (node_ranks > 1 || has_residual) {
    scratch_.resize(std::max(scratch_.size(), rail_part.own_range.size()));
    rail_part.in = scratch_.data();
    const BufferList own_range(scratch_.data(), rail_part.own_range.size());
    context_.intra_node.reduce_scatter(BufferList(in, bytes), rail_part.parts, own_range,
                                       r.first_stage());
    if (has_residual) error_feedback_.add(rail_part.bucket, scratch_.data());
  }
  AllReduceJob job;
  job.in = rail_part.in;
  job.bytes = rail_part.own_range.size();
  job.reduction = r;
  const uint64_t fingerprint[] = {bytes, static_cast<uint64_t>(r.dtype),
                                  static_cast<uint64_t>(r.op)};
  job.digest = mac_of(Key{}, fingerprint, sizeof fingerprint) | 1;
  rate_controller_.plan_job(bytes, &job);
  const Outcome& outcome = run(job);
  const bool exceeds = exceeds_limit(outcome);
  rate_controller_.record_outcome(bytes, outcome);
  rate_controller_.record_repeat(exceeds);
  count_outcome(outcome, steady_now() - start);
  if (exceeds && !settings_.skip_above_limit) return repeat_exactly(outcome, run_exact);
  store_result(rail_part, outcome, exceeds, out);
  return exceeds ? kSkippedText : kBoundedText;
}

const Outcome& BoundedAllReduce::run(const AllReduceJob& job) {
  ShmSteps& shm = context_.shm;
  const Outcome& outcome = endpoint_.run(job, [&](int rank) {
    shm.set_awaited_rank(rank);
    context_.check_failure();
    if (shm.deadline().passed()) shm.throw_if_timed_out(rank);
  });
  shm.set_awaited_rank(-1);
  return outcome;
}

// Returns whether the limit is exceeded on any rail: all-reduces the outcomes of the rails, which
// the ranks of this node have.
bool BoundedAllReduce::exceeds_limit(const Outcome& outcome) {
  int32_t exceeds = 100 * outcome.excluded_share() > settings_.max_excluded_percent ? 1 : 0;
  if (context_.intra_node.size() > 1) {
    Reduction max_reduction;
    max_reduction.dtype = DType::kI32;
    max_reduction.op = RedOp::kMax;
    context_.intra_node.all_reduce_one_shot(&exceeds, &exceeds, 1, max_reduction);
  }
  return exceeds != 0;
}

void BoundedAllReduce::count_outcome(const Outcome& outcome, Time elapsed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  double expected = 0, lost = 0, scaled = 0;
  for (const RankReport& r : outcome.reports) {
    expected += r.expected, lost += r.lost, scaled += r.scaled;
  }
  statistics_["operations"] += 1;
  statistics_["pieces"] += static_cast<double>(outcome.excluded.size());
  statistics_["excluded"] += static_cast<double>(outcome.excluded.count());
  statistics_["packets"] += expected;
  statistics_["lost"] += lost;
  statistics_["scaled"] += scaled;
  statistics_["seconds"] += 1e-9 * static_cast<double>(elapsed.count());
  statistics_["seconds_ready"] += 1e-9 * static_cast<double>(outcome.ready_wait.count());
  statistics_["rate_mbit"] = rate_controller_.rate() * 8e-6;
}

const char* BoundedAllReduce::repeat_exactly(const Outcome& outcome,
                                             const ExactAllReduce& run_exact) {
  context_.warn("an all_reduce by datagrams lost too much (" + percent(outcome.excluded_share()) +
                " is excluded here, the limit is " + percent(settings_.max_excluded_percent / 100) +
                "): it is repeated exactly, and the next " +
                std::to_string(rate_controller_.backoff()) + " are, too");
  run_exact();
  const std::lock_guard<std::mutex> lock(mutex_);
  statistics_["repeated"] += 1;
  return kRepeatedText;
}

void BoundedAllReduce::store_result(const RailPart& rail_part, const Outcome& outcome, bool skip,
                                    void* out) {
  auto* const to = static_cast<std::byte*>(out) + rail_part.own_range.lo;
  const std::byte* const result = endpoint_.result();
  Bitmap excluded_bits(outcome.excluded.size());
  for (size_t i = 0; skip && i < excluded_bits.size(); ++i) excluded_bits.set(i);
  if (settings_.error_feedback) {
    error_feedback_.store(rail_part.bucket, rail_part.in, endpoint_.layout(),
                          skip ? excluded_bits : outcome.excluded);
  }
  if (skip) {
    std::fill_n(to, rail_part.own_range.size(), std::byte{0});
    context_.warn("an all_reduce by datagrams lost too much (" + percent(outcome.excluded_share()) +
                  " is excluded here, the limit is " +
                  percent(settings_.max_excluded_percent / 100) +
                  "): its result is zero on all ranks, and the next " +
                  std::to_string(rate_controller_.backoff()) + " are done exactly");
    const std::lock_guard<std::mutex> lock(mutex_);
    statistics_["skipped"] += 1;
  } else {
    std::copy(result, result + rail_part.own_range.size(), to);
  }
  if (rail_part.parts.size() > 1) {
    const size_t bytes = rail_part.parts.back().hi;
    context_.intra_node.all_gather(BufferList(out, bytes), rail_part.parts);
  }
}

std::map<std::string, double> BoundedAllReduce::statistics() {
  const EndpointCounters counters = endpoint_.counters();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, double> out = statistics_;
  for (const char* name : {"operations", "exact", "repeated", "skipped", "pieces", "excluded",
                           "packets", "lost", "scaled", "seconds", "seconds_ready", "rate_mbit"}) {
    out.emplace(name, 0);
  }
  out["sent_bytes"] = static_cast<double>(counters.sent_bytes);
  out["forged"] = static_cast<double>(counters.drop_counters.forged);
  out["foreign"] = static_cast<double>(counters.drop_counters.foreign);
  out["late"] = static_cast<double>(counters.drop_counters.late);
  out["doubled"] = static_cast<double>(counters.drop_counters.repeated);
  out["malformed"] = static_cast<double>(counters.drop_counters.malformed);
  out["kernel_drops"] = static_cast<double>(counters.kernel_drops);
  out["refused"] = static_cast<double>(counters.refused_packets);
  return out;
}

}  // namespace fsccl::datagram
