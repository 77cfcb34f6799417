#include "transfer.h"

#include <algorithm>

#include "../core/reduce.h"

namespace fsccl::datagram {
namespace {

size_t offset_of(const Packet& data) { return size_t{data.place} * Layout::kGrain; }

constexpr double kBurstSeconds = 300e-6;
constexpr size_t kLeastBurst = 4, kMostBurst = 32;  // packets
constexpr double kLateSeconds = 2.5e-3;             // that the thread is at times
constexpr double kLeadSeconds = 32e-3;

}  // namespace

Transfer::Transfer(const Circle& circle, size_t payload, const Limits& limits)
    : circle_(circle),
      payload_(payload / Layout::kGrain * Layout::kGrain),
      limits_(limits) {
  if (payload_ == 0) fail_usage("packets of " + std::to_string(payload) + " bytes are too small");
}

void Transfer::begin(const Job& job, uint64_t operation, Time now) {
  job_ = job;
  operation_ = operation;
  moving_ = false;
  layout_ = {job.bytes, payload_, circle_.ranks};
  mine_ = layout_.shard(circle_.rank);
  const auto ranks = static_cast<size_t>(circle_.ranks);
  parts_in_.resize(std::max(parts_in_.size(), ranks * mine_.size() * payload_));
  result_.resize(std::max(result_.size(), job.bytes));
  got_.assign(ranks, Bits(mine_.size()));
  came_.assign(mine_.size(), 1);
  summed_ = Bits(mine_.size());
  where_.resize(mine_.size());
  have_ = Bits(layout_.pieces());
  parts_.assign(ranks, {});
  sums_.assign(ranks, {});
  expected_ = 0;
  for (int r = 0; r < circle_.ranks; ++r) {
    if (r == circle_.rank) continue;
    parts_of(r).lacks = mine_.size();
    sums_of(r).lacks = layout_.shard(r).size();
    expected_ += parts_of(r).lacks + sums_of(r).lacks;
  }
  lost_ = scaled_ = 0;
  const double packets = job.rate * kBurstSeconds / static_cast<double>(packet());
  burst_ = static_cast<size_t>(std::clamp<double>(packets, kLeastBurst, kMostBurst));
  run_ = std::max<size_t>(1, burst_ >> job.halvings);
  turn_ = sum_turn_ = 1;
  at_ = in_run_ = sum_at_ = sum_run_ = sum_in_run_ = 0;
  order_.clear();
  parts_again_.clear();
  sums_again_.clear();
  asked_.assign(ranks, {});
  sent_ = now;
  credit_ = burst();
  lead_ = std::min(double{kMostLead}, job.rate * kLeadSeconds);
  led_ = 0;
}

void Transfer::take(const Packet& p, Time now, Dropped* dropped) {
  // Until now others may have been waiting; but what comes first so late does not begin it anew.
  if (!heard_ && now < went_ + limits_.patience) began_ = now;
  heard_ = heard_ || !p.leads();
  const uint64_t answered = p.kind == Kind::kMark ? p.word : 0;
  const bool wants = p.kind == Kind::kWantParts || p.kind == Kind::kWantSums;
  if (wants) return take_wants(p, dropped);
  const bool parts = (p.flags & Header::kPartsSent) != 0, sums = (p.flags & Header::kSumsSent) != 0;
  note(&parts_of(p.sender), parts, static_cast<uint32_t>(answered), now);
  note(&sums_of(p.sender), sums, static_cast<uint32_t>(answered >> 32), now);
  if (p.kind == Kind::kMark) return;
  if (p.kind == Kind::kPart) return take_part(p, dropped);
  take_sum(p, dropped);
}

void Transfer::note(Stream* stream, bool sent, uint32_t answered, Time now) {
  if (stream->sent ? answered <= stream->answered : !sent) return;
  stream->sent = stream->sent || sent;
  stream->answered = std::max(stream->answered, answered);
  stream->said = now;
}

void Transfer::take_part(const Packet& p, Dropped* dropped) {
  const size_t piece = layout_.at(offset_of(p), p.length);
  if (piece < mine_.lo || piece >= mine_.hi) {
    ++dropped->malformed;
    return;
  }
  const size_t index = piece - mine_.lo;
  Bits& got = got_[p.sender];
  if (got.test(index)) {
    ++dropped->repeated;
    return;
  }
  if (summed_.test(index)) {
    ++dropped->late;
    return;
  }
  got.set(index);
  const size_t place = (p.sender * mine_.size() + index) * payload_;
  std::copy(p.payload, p.payload + p.length, parts_in_.data() + place);
  --parts_of(p.sender).lacks;
  if (++came_[index] == circle_.ranks) add_up(piece);
}

void Transfer::take_sum(const Packet& p, Dropped* dropped) {
  const size_t piece = layout_.at(offset_of(p), p.length);
  const Interval owned = layout_.shard(p.sender);
  if (piece < owned.lo || piece >= owned.hi) {
    ++dropped->malformed;
  } else if (!have_.set(piece)) {
    ++dropped->repeated;
  } else {
    std::copy(p.payload, p.payload + p.length, result_.data() + offset_of(p));
    --sums_of(p.sender).lacks;
  }
}

// What has been sent and did not come is sent again; what has yet to be is not.
void Transfer::take_wants(const Packet& p, Dropped* dropped) {
  const bool parts = p.kind == Kind::kWantParts;
  const Interval of = parts ? layout_.shard(p.sender) : mine_;
  const uint64_t most = uint64_t{p.length} * 8;
  if (p.place < of.lo || p.place >= of.hi || most > of.hi - p.place + 7) {
    ++dropped->malformed;
    return;
  }
  Asked& asked = asked_[p.sender];
  uint32_t& number = parts ? asked.parts : asked.sums;
  number = std::max(number, static_cast<uint32_t>(p.word));
  std::deque<Out>& again = parts ? parts_again_ : sums_again_;
  if (again.size() > 2 * layout_.pieces()) return;
  for (uint64_t i = 0; i < most && p.place + i < of.hi; ++i) {
    if ((static_cast<unsigned>(p.payload[i / 8]) >> (i % 8) & 1) == 0) continue;
    const size_t piece = static_cast<size_t>(p.place + i), index = piece - of.lo;
    const bool sent = parts ? part_sent(p.sender, index) : sum_sent(p.sender, index);
    if (!sent) continue;
    again.push_back({p.sender, parts ? Kind::kPart : Kind::kSum, piece, std::max(1, int{p.flags})});
    ++lost_;
  }
}

void Transfer::add_up(size_t piece) {
  const size_t index = piece - mine_.lo;
  const Interval span = layout_.span(piece);
  std::vector<const void*> sources;
  for (int r = 0; r < circle_.ranks; ++r) {
    const auto q = static_cast<size_t>(r);
    if (r == circle_.rank) {
      sources.push_back(job_.in + span.lo);
    } else if (got_[q].test(index)) {
      sources.push_back(parts_in_.data() + (q * mine_.size() + index) * payload_);
    }
  }
  Reduction how = job_.how;
  const int came = static_cast<int>(sources.size());
  if (came < circle_.ranks) {
    how.op = RedOp::kPremulSum;
    how.factor = static_cast<double>(circle_.ranks) / came;
    if (job_.how.op == RedOp::kAvg) how.factor /= job_.how.divisor;
    ++scaled_;
  }
  reduce(how, result_.data() + span.lo, sources.data(), came, span.size() / how.width());
  summed_.set(index);
  have_.set(piece);
  where_[index] = order_.size();
  order_.push_back(piece);
}

void Transfer::look(Time now, Network& net) {
  if (!moving_) return;
  if (!heard_ && now < went_ + limits_.patience) began_ = now;
  const Time first = began_ + job_.phase, second = began_ + job_.end;
  bool hopeless = true;
  for (int r = 0; r < circle_.ranks; ++r) {
    if (r == circle_.rank) continue;
    if (!summed_.all()) {
      want(&parts_, r, Kind::kWantParts, first, now, net);
      hopeless = hopeless && (parts_of(r).lacks == 0 || given_up(parts_, r, now));
    }
    want(&sums_, r, Kind::kWantSums, second, now, net);
  }
  if (summed_.all() || !(now >= first || hopeless)) return;
  for (size_t piece = mine_.lo; piece < mine_.hi; ++piece) {
    if (!summed_.test(piece - mine_.lo)) add_up(piece);
  }
}

// What all of them may take together.
Time Transfer::pause(const std::vector<Stream>& streams) const {
  size_t lacks = 0;
  for (const Stream& stream : streams) lacks += stream.lacks;
  const double bytes = static_cast<double>(lacks * payload_);
  return limits_.resend + Time(static_cast<int64_t>(1e9 * bytes / job_.rate));
}

bool Transfer::given_up(const std::vector<Stream>& streams, int rank, Time now) const {
  const Stream& stream = streams[static_cast<size_t>(rank)];
  return stream.wants > 0 && stream.wants >= limits_.repairs &&
         now >= stream.wanted + pause(streams) + job_.early;
}

void Transfer::want(std::vector<Stream>* streams, int from, Kind kind, Time until, Time now,
                    Network& net) {
  Stream* const stream = &(*streams)[static_cast<size_t>(from)];
  if (stream->lacks == 0 || stream->wants >= limits_.repairs) return;
  const bool told = stream->sent && stream->answered >= stream->wants;
  const bool due = (told && now >= stream->said + limits_.reorder) ||
                   (stream->wants == 0 ? now >= until - job_.end / 8
                                       : now >= stream->wanted + pause(*streams));
  if (!due) return;
  ++stream->wants;
  stream->wanted = now;
  const bool parts = kind == Kind::kWantParts;
  const Interval of = parts ? mine_ : layout_.shard(from);
  const size_t most = (packet() - head_of(kind)) * 8;
  for (size_t lo = of.lo; lo < of.hi; lo += most) {
    const size_t hi = std::min(of.hi, lo + most);
    Bits lacks(hi - lo);
    for (size_t p = lo; p < hi; ++p) {
      const bool there = parts ? summed_.test(p - of.lo) || got_[static_cast<size_t>(from)].test(p - of.lo)
                               : have_.test(p);
      if (!there) lacks.set(p - lo);
    }
    if (lacks.count() == 0) continue;
    Header h;
    h.kind = kind;
    h.operation = operation_;
    h.place = static_cast<uint32_t>(lo);
    h.flags = static_cast<uint8_t>(std::count_if(streams->begin(), streams->end(),
                                                 [](const Stream& one) { return one.lacks > 0; }));
    h.length = static_cast<uint16_t>(lacks.bytes().size());
    std::byte* const made = net.place(packet());
    std::memcpy(made + head_of(kind), lacks.bytes().data(), h.length);
    net.send(from, seal(circle_, from, h, stream->wants, made));
  }
}

bool Transfer::next_part(Out* out) {
  for (; !parts_out(); at_ += run_, turn_ = 1) {
    for (; turn_ < circle_.ranks; ++turn_, in_run_ = 0) {
      const int to = (circle_.rank + turn_) % circle_.ranks;
      const Interval shard = layout_.shard(to);
      const size_t index = at_ + in_run_;
      if (in_run_ == run_ || index >= shard.size()) continue;
      ++in_run_;
      *out = {to, Kind::kPart, shard.lo + index};
      return true;
    }
  }
  return false;
}

bool Transfer::part_sent(int to, size_t index) const {
  if (index < at_ || index >= at_ + run_) return index < at_;
  const int turn = turn_of(to);
  return turn < turn_ || (turn == turn_ && index < at_ + in_run_);
}

bool Transfer::sum_sent(int to, size_t index) const {
  if (!summed_.test(index)) return false;
  const size_t place = where_[index];
  if (place < sum_at_ || place >= sum_at_ + sum_run_) return place < sum_at_;
  const int turn = turn_of(to);
  return turn < sum_turn_ || (turn == sum_turn_ && place < sum_at_ + sum_in_run_);
}

bool Transfer::next_sum(Out* out) {
  if (sum_in_run_ == sum_run_) {  // to the next rank; or all have those, and the next run begins
    if (sum_run_ == 0 || ++sum_turn_ == circle_.ranks) {
      sum_at_ += sum_run_;
      sum_turn_ = 1;
      sum_run_ = std::min(run_, order_.size() - sum_at_);
    }
    sum_in_run_ = 0;
    if (sum_run_ == 0) return false;
  }
  const size_t place = sum_at_ + sum_in_run_++;
  const int to = (circle_.rank + sum_turn_) % circle_.ranks;
  *out = {to, Kind::kSum, order_[place]};
  return true;
}

bool Transfer::next_again(std::deque<Out>* from, Out* out) {
  if (from->empty()) return false;
  *out = from->front();
  from->pop_front();
  return true;
}

bool Transfer::next(Out* out) {
  return next_part(out) || next_again(&parts_again_, out) || next_sum(out) ||
         next_again(&sums_again_, out);
}

void Transfer::pump(Time now, Network& net) {
  if (!may_send()) return;
  const double most = std::max(2 * burst(), job_.rate * kLateSeconds);
  credit_ = std::min(most, credit_ + job_.rate * 1e-9 * static_cast<double>((now - sent_).count()));
  sent_ = now;
  Out out{};
  while (credit_ > 0 && may_send()) {
    if (moving_ ? !next(&out) : !next_part(&out)) break;
    send(out, net);
  }
  if (moving_ && credit_ > 0) say_marks(now, net);
}

void Transfer::send(const Out& out, Network& net) {
  const Interval span = layout_.span(out.piece);
  Header h;
  h.kind = out.kind;
  h.flags = flags();
  h.operation = operation_;
  h.place = static_cast<uint32_t>(span.lo / Layout::kGrain);
  h.length = static_cast<uint16_t>(span.size());
  const std::byte* const from = (out.kind == Kind::kPart ? job_.in : result_.data()) + span.lo;
  std::byte* const made = net.place(packet());
  std::copy(from, from + span.size(), made + head_of(h.kind));
  const size_t bytes = seal(circle_, out.to, h, 0, made);
  net.send(out.to, bytes);
  credit_ -= static_cast<double>(bytes) * out.beside;
  if (!moving_) led_ += static_cast<double>(bytes);
  marked_ = Time::min();
}

uint8_t Transfer::flags() const {
  const bool parts = parts_out();
  const bool sums = parts && summed_.all() && sum_at_ == order_.size();
  return (parts ? Header::kPartsSent : 0) | (sums ? Header::kSumsSent : 0) |
         (moving_ ? Header::kAllReady : 0);
}

// At once when everything has been sent, and now and then.
void Transfer::say_marks(Time now, Network& net) {
  if (marked_ != Time::min() && now < marked_ + limits_.resend / 2) return;
  marked_ = now;
  for (int r = 0; r < circle_.ranks; ++r) {
    if (r == circle_.rank) continue;
    Header h;
    h.kind = Kind::kMark;
    h.flags = flags();
    const Asked& asked = asked_[static_cast<size_t>(r)];
    h.operation = operation_;
    const uint64_t answered = asked.parts | uint64_t{asked.sums} << 32;
    net.send(r, seal(circle_, r, h, answered, net.place(head_of(h.kind))));
  }
}

Time Transfer::next(Time now) const {
  const bool sums = sum_in_run_ < sum_run_ || sum_at_ + sum_run_ < order_.size() ||
                    (sum_run_ > 0 && sum_turn_ + 1 < circle_.ranks);
  const bool idle = parts_out() && !sums && parts_again_.empty() && sums_again_.empty();
  if (!may_send() || idle) return Time::max();
  const double lacks = burst() - credit_;
  return lacks <= 0 ? now : now + Time(static_cast<int64_t>(1e9 * lacks / job_.rate));
}

bool Transfer::over(Time now) const {
  if (!moving_) return false;
  if (have_.all() || now >= began_ + job_.end) return summed_.all();
  if (!summed_.all()) return false;
  for (int r = 0; r < circle_.ranks; ++r) {
    const Stream& stream = sums_[static_cast<size_t>(r)];
    if (r != circle_.rank && stream.lacks > 0 && !given_up(sums_, r, now)) return false;
  }
  return true;
}

Report Transfer::report(Time now) const {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now - began_).count();
  const double led_us = 1e6 * led_ / job_.rate;
  return {static_cast<uint32_t>(expected_), static_cast<uint32_t>(lost_),
          static_cast<uint32_t>(scaled_), static_cast<uint32_t>(static_cast<double>(us) + led_us), 0};
}

}  // namespace fsccl::datagram
