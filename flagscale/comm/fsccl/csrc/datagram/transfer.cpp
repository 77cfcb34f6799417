#include "transfer.h"

#include <algorithm>

#include "../core/reduce.h"

namespace fsccl::datagram {
namespace {

size_t offset_of(const Packet& data) { return size_t{data.position} * BucketLayout::kGrain; }

constexpr double kBurstSeconds = 300e-6;         // time for which a burst lasts at the given rate
constexpr size_t kMinBurst = 4, kMaxBurst = 32;  // packets
constexpr double kMaxWakeupDelay = 2.5e-3;       // seconds by which the thread may wake up late
constexpr double kMaxEarlySeconds = 32e-3;       // early data, as sending time at the given rate

}  // namespace

Transfer::Transfer(const Rail& rail, size_t payload, const ProtocolLimits& limits)
    : rail_(rail),
      payload_(payload / BucketLayout::kGrain * BucketLayout::kGrain),
      limits_(limits) {
  if (payload_ == 0) fail_usage("packets of " + std::to_string(payload) + " bytes are too small");
}

void Transfer::begin_early_phase(const AllReduceJob& job, uint64_t operation, Time now) {
  job_ = job;
  operation_ = operation;
  is_transferring_ = false;
  layout_ = {job.bytes, payload_, rail_.ranks};
  own_shard_ = layout_.shard(rail_.rank);
  const auto ranks = static_cast<size_t>(rail_.ranks);
  received_parts_.resize(std::max(received_parts_.size(), ranks * own_shard_.size() * payload_));
  result_.resize(std::max(result_.size(), job.bytes));
  part_received_.assign(ranks, Bitmap(own_shard_.size()));
  part_counts_.assign(own_shard_.size(), 1);
  summed_ = Bitmap(own_shard_.size());
  sum_positions_.resize(own_shard_.size());
  available_sums_ = Bitmap(layout_.pieces());
  part_streams_.assign(ranks, {});
  sum_streams_.assign(ranks, {});
  expected_ = 0;
  for (int r = 0; r < rail_.ranks; ++r) {
    if (r == rail_.rank) continue;
    part_stream(r).missing = own_shard_.size();
    sum_stream(r).missing = layout_.shard(r).size();
    expected_ += part_stream(r).missing + sum_stream(r).missing;
  }
  lost_ = scaled_ = 0;
  const double packets = job.rate * kBurstSeconds / static_cast<double>(max_packet_bytes());
  burst_packets_ = static_cast<size_t>(std::clamp<double>(packets, kMinBurst, kMaxBurst));
  run_length_ = std::max<size_t>(1, burst_packets_ >> job.run_halvings);
  part_turn_ = sum_turn_ = 1;
  part_run_start_ = part_run_position_ = sum_run_start_ = sum_run_length_ = sum_run_position_ = 0;
  sum_order_.clear();
  part_repairs_.clear();
  sum_repairs_.clear();
  peer_requests_.assign(ranks, {});
  credit_time_ = now;
  credit_bytes_ = burst_bytes();
  max_early_bytes_ = std::min(double{kMaxEarlyBytes}, job.rate * kMaxEarlySeconds);
  early_bytes_sent_ = 0;
}

void Transfer::handle_packet(const Packet& packet, Time now, DropCounters* drop_counters) {
  // The deadlines are relative to the first packet, because the others may have waited until now. A
  // first packet after fallback_delay does not change them any more.
  if (!start_confirmed_ && now < start_time_ + limits_.fallback_delay) clock_start_ = now;
  start_confirmed_ = start_confirmed_ || !packet.is_early();
  const uint64_t answered_requests = packet.kind == PacketKind::kStatus ? packet.status_word : 0;
  const bool is_request =
      packet.kind == PacketKind::kRequestParts || packet.kind == PacketKind::kRequestSums;
  if (is_request) return handle_request(packet, drop_counters);
  const bool parts_sent = (packet.flags & PacketHeader::kPartsSent) != 0,
             sums_sent = (packet.flags & PacketHeader::kSumsSent) != 0;
  update_stream(&part_stream(packet.sender), parts_sent, static_cast<uint32_t>(answered_requests),
                now);
  update_stream(&sum_stream(packet.sender), sums_sent,
                static_cast<uint32_t>(answered_requests >> 32), now);
  if (packet.kind == PacketKind::kStatus) return;
  if (packet.kind == PacketKind::kPart) return handle_part(packet, drop_counters);
  handle_sum(packet, drop_counters);
}

void Transfer::update_stream(Stream* stream, bool all_sent, uint32_t answered_request, Time now) {
  if (stream->all_sent ? answered_request <= stream->answered_request : !all_sent) return;
  stream->all_sent = stream->all_sent || all_sent;
  stream->answered_request = std::max(stream->answered_request, answered_request);
  stream->last_status = now;
}

void Transfer::handle_part(const Packet& packet, DropCounters* drop_counters) {
  const size_t piece = layout_.piece_at(offset_of(packet), packet.length);
  if (piece < own_shard_.lo || piece >= own_shard_.hi) {
    ++drop_counters->malformed;
    return;
  }
  const size_t index = piece - own_shard_.lo;
  Bitmap& received = part_received_[packet.sender];
  if (received.test(index)) {
    ++drop_counters->repeated;
    return;
  }
  if (summed_.test(index)) {
    ++drop_counters->late;
    return;
  }
  received.set(index);
  const size_t offset = (packet.sender * own_shard_.size() + index) * payload_;
  std::copy(packet.payload, packet.payload + packet.length, received_parts_.data() + offset);
  --part_stream(packet.sender).missing;
  if (++part_counts_[index] == rail_.ranks) sum_piece(piece);
}

void Transfer::handle_sum(const Packet& packet, DropCounters* drop_counters) {
  const size_t piece = layout_.piece_at(offset_of(packet), packet.length);
  const Interval owned = layout_.shard(packet.sender);
  if (piece < owned.lo || piece >= owned.hi) {
    ++drop_counters->malformed;
  } else if (!available_sums_.set(piece)) {
    ++drop_counters->repeated;
  } else {
    std::copy(packet.payload, packet.payload + packet.length, result_.data() + offset_of(packet));
    --sum_stream(packet.sender).missing;
  }
}

// Queues the requested pieces that have been sent once. Those that are still to be sent are not
// lost.
void Transfer::handle_request(const Packet& packet, DropCounters* drop_counters) {
  const bool for_parts = packet.kind == PacketKind::kRequestParts;
  const Interval range = for_parts ? layout_.shard(packet.sender) : own_shard_;
  const uint64_t limit = uint64_t{packet.length} * 8;
  if (packet.position < range.lo || packet.position >= range.hi ||
      limit > range.hi - packet.position + 7) {
    ++drop_counters->malformed;
    return;
  }
  RequestNumbers& numbers = peer_requests_[packet.sender];
  uint32_t& number = for_parts ? numbers.parts : numbers.sums;
  number = std::max(number, static_cast<uint32_t>(packet.status_word));
  std::deque<QueuedPiece>& repairs = for_parts ? part_repairs_ : sum_repairs_;
  if (repairs.size() > 2 * layout_.pieces()) return;
  for (uint64_t i = 0; i < limit && packet.position + i < range.hi; ++i) {
    if ((static_cast<unsigned>(packet.payload[i / 8]) >> (i % 8) & 1) == 0) continue;
    const size_t piece = static_cast<size_t>(packet.position + i), index = piece - range.lo;
    const bool is_sent =
        for_parts ? is_part_sent(packet.sender, index) : is_sum_sent(packet.sender, index);
    if (!is_sent) continue;
    repairs.push_back({packet.sender, for_parts ? PacketKind::kPart : PacketKind::kSum, piece,
                       std::max(1, int{packet.flags})});
    ++lost_;
  }
}

void Transfer::sum_piece(size_t piece) {
  const size_t index = piece - own_shard_.lo;
  const Interval span = layout_.piece_interval(piece);
  std::vector<const void*> sources;
  for (int r = 0; r < rail_.ranks; ++r) {
    const auto q = static_cast<size_t>(r);
    if (r == rail_.rank) {
      sources.push_back(job_.in + span.lo);
    } else if (part_received_[q].test(index)) {
      sources.push_back(received_parts_.data() + (q * own_shard_.size() + index) * payload_);
    }
  }
  Reduction reduction = job_.reduction;
  const int part_count = static_cast<int>(sources.size());
  if (part_count < rail_.ranks) {
    reduction.op = RedOp::kPremulSum;
    reduction.factor = static_cast<double>(rail_.ranks) / part_count;
    if (job_.reduction.op == RedOp::kAvg) reduction.factor /= job_.reduction.divisor;
    ++scaled_;
  }
  reduce(reduction, result_.data() + span.lo, sources.data(), part_count,
         span.size() / reduction.width());
  summed_.set(index);
  available_sums_.set(piece);
  sum_positions_[index] = sum_order_.size();
  sum_order_.push_back(piece);
}

void Transfer::check_deadlines(Time now, Network& network) {
  if (!is_transferring_) return;
  if (!start_confirmed_ && now < start_time_ + limits_.fallback_delay) clock_start_ = now;
  const Time parts_deadline = clock_start_ + job_.reduce_time,
             sums_deadline = clock_start_ + job_.total_time;
  bool all_given_up = true;
  for (int r = 0; r < rail_.ranks; ++r) {
    if (r == rail_.rank) continue;
    if (!summed_.all()) {
      request_missing(&part_streams_, r, PacketKind::kRequestParts, parts_deadline, now, network);
      all_given_up =
          all_given_up && (part_stream(r).missing == 0 || is_given_up(part_streams_, r, now));
    }
    request_missing(&sum_streams_, r, PacketKind::kRequestSums, sums_deadline, now, network);
  }
  if (summed_.all() || !(now >= parts_deadline || all_given_up)) return;
  for (size_t piece = own_shard_.lo; piece < own_shard_.hi; ++piece) {
    if (!summed_.test(piece - own_shard_.lo)) sum_piece(piece);
  }
}

// Returns the time after which a request is repeated: that for sending all missing pieces, plus
// resend_interval.
Time Transfer::request_interval(const std::vector<Stream>& streams) const {
  size_t missing = 0;
  for (const Stream& stream : streams) missing += stream.missing;
  const double bytes = static_cast<double>(missing * payload_);
  return limits_.resend_interval + Time(static_cast<int64_t>(1e9 * bytes / job_.rate));
}

bool Transfer::is_given_up(const std::vector<Stream>& streams, int rank, Time now) const {
  const Stream& stream = streams[static_cast<size_t>(rank)];
  return stream.requests > 0 && stream.requests >= limits_.max_requests &&
         now >= stream.last_request + request_interval(streams) + job_.repair_grace;
}

void Transfer::request_missing(std::vector<Stream>* streams, int from, PacketKind kind,
                               Time deadline, Time now, Network& network) {
  Stream* const stream = &(*streams)[static_cast<size_t>(from)];
  if (stream->missing == 0 || stream->requests >= limits_.max_requests) return;
  const bool is_answered = stream->all_sent && stream->answered_request >= stream->requests;
  const bool is_due =
      (is_answered && now >= stream->last_status + limits_.max_reorder_delay) ||
      (stream->requests == 0 ? now >= deadline - job_.total_time / 8
                             : now >= stream->last_request + request_interval(*streams));
  if (!is_due) return;
  ++stream->requests;
  stream->last_request = now;
  const bool for_parts = kind == PacketKind::kRequestParts;
  const Interval range = for_parts ? own_shard_ : layout_.shard(from);
  const size_t limit = (max_packet_bytes() - header_bytes(kind)) * 8;
  for (size_t lo = range.lo; lo < range.hi; lo += limit) {
    const size_t hi = std::min(range.hi, lo + limit);
    Bitmap missing_bits(hi - lo);
    for (size_t p = lo; p < hi; ++p) {
      const bool is_here = for_parts
                               ? summed_.test(p - range.lo) ||
                                     part_received_[static_cast<size_t>(from)].test(p - range.lo)
                               : available_sums_.test(p);
      if (!is_here) missing_bits.set(p - lo);
    }
    if (missing_bits.count() == 0) continue;
    PacketHeader header;
    header.kind = kind;
    header.operation = operation_;
    header.position = static_cast<uint32_t>(lo);
    header.flags = static_cast<uint8_t>(std::count_if(
        streams->begin(), streams->end(), [](const Stream& s) { return s.missing > 0; }));
    header.length = static_cast<uint16_t>(missing_bits.bytes().size());
    std::byte* const buffer = network.reserve(max_packet_bytes());
    std::memcpy(buffer + header_bytes(kind), missing_bits.bytes().data(), header.length);
    network.send(from, sign_packet(rail_, from, header, stream->requests, buffer));
  }
}

bool Transfer::next_part(QueuedPiece* out) {
  for (; !all_parts_sent(); part_run_start_ += run_length_, part_turn_ = 1) {
    for (; part_turn_ < rail_.ranks; ++part_turn_, part_run_position_ = 0) {
      const int peer = (rail_.rank + part_turn_) % rail_.ranks;
      const Interval shard = layout_.shard(peer);
      const size_t index = part_run_start_ + part_run_position_;
      if (part_run_position_ == run_length_ || index >= shard.size()) continue;
      ++part_run_position_;
      *out = {peer, PacketKind::kPart, shard.lo + index};
      return true;
    }
  }
  return false;
}

bool Transfer::is_part_sent(int peer, size_t index) const {
  if (index < part_run_start_ || index >= part_run_start_ + run_length_)
    return index < part_run_start_;
  const int turn = turn_of(peer);
  return turn < part_turn_ || (turn == part_turn_ && index < part_run_start_ + part_run_position_);
}

bool Transfer::is_sum_sent(int peer, size_t index) const {
  if (!summed_.test(index)) return false;
  const size_t position = sum_positions_[index];
  if (position < sum_run_start_ || position >= sum_run_start_ + sum_run_length_)
    return position < sum_run_start_;
  const int turn = turn_of(peer);
  return turn < sum_turn_ || (turn == sum_turn_ && position < sum_run_start_ + sum_run_position_);
}

bool Transfer::next_sum(QueuedPiece* out) {
  if (sum_run_position_ == sum_run_length_) {  // the turn is over: next rank, or next run
    if (sum_run_length_ == 0 || ++sum_turn_ == rail_.ranks) {
      sum_run_start_ += sum_run_length_;
      sum_turn_ = 1;
      sum_run_length_ = std::min(run_length_, sum_order_.size() - sum_run_start_);
    }
    sum_run_position_ = 0;
    if (sum_run_length_ == 0) return false;
  }
  const size_t position = sum_run_start_ + sum_run_position_++;
  const int peer = (rail_.rank + sum_turn_) % rail_.ranks;
  *out = {peer, PacketKind::kSum, sum_order_[position]};
  return true;
}

bool Transfer::next_repair(std::deque<QueuedPiece>* from, QueuedPiece* out) {
  if (from->empty()) return false;
  *out = from->front();
  from->pop_front();
  return true;
}

bool Transfer::next_piece(QueuedPiece* out) {
  return next_part(out) || next_repair(&part_repairs_, out) || next_sum(out) ||
         next_repair(&sum_repairs_, out);
}

void Transfer::send_due(Time now, Network& network) {
  if (!may_send()) return;
  const double max_credit = std::max(2 * burst_bytes(), job_.rate * kMaxWakeupDelay);
  credit_bytes_ =
      std::min(max_credit, credit_bytes_ + job_.rate * 1e-9 *
                                               static_cast<double>((now - credit_time_).count()));
  credit_time_ = now;
  QueuedPiece out{};
  while (credit_bytes_ > 0 && may_send()) {
    if (is_transferring_ ? !next_piece(&out) : !next_part(&out)) break;
    send(out, network);
  }
  if (is_transferring_ && credit_bytes_ > 0) send_status(now, network);
}

void Transfer::send(const QueuedPiece& out, Network& network) {
  const Interval span = layout_.piece_interval(out.piece);
  PacketHeader header;
  header.kind = out.kind;
  header.flags = flags();
  header.operation = operation_;
  header.position = static_cast<uint32_t>(span.lo / BucketLayout::kGrain);
  header.length = static_cast<uint16_t>(span.size());
  const std::byte* const from =
      (out.kind == PacketKind::kPart ? job_.in : result_.data()) + span.lo;
  std::byte* const buffer = network.reserve(max_packet_bytes());
  std::copy(from, from + span.size(), buffer + header_bytes(header.kind));
  const size_t bytes = sign_packet(rail_, out.to, header, 0, buffer);
  network.send(out.to, bytes);
  credit_bytes_ -= static_cast<double>(bytes) * out.concurrent_senders;
  if (!is_transferring_) early_bytes_sent_ += static_cast<double>(bytes);
  last_status_sent_ = Time::min();
}

uint8_t Transfer::flags() const {
  const bool parts_sent = all_parts_sent();
  const bool sums_sent = parts_sent && summed_.all() && sum_run_start_ == sum_order_.size();
  return (parts_sent ? PacketHeader::kPartsSent : 0) | (sums_sent ? PacketHeader::kSumsSent : 0) |
         (is_transferring_ ? PacketHeader::kAllReady : 0);
}

// Sends kStatus packets, immediately when everything has been sent, and then periodically.
void Transfer::send_status(Time now, Network& network) {
  if (last_status_sent_ != Time::min() && now < last_status_sent_ + limits_.resend_interval / 2)
    return;
  last_status_sent_ = now;
  for (int r = 0; r < rail_.ranks; ++r) {
    if (r == rail_.rank) continue;
    PacketHeader header;
    header.kind = PacketKind::kStatus;
    header.flags = flags();
    const RequestNumbers& numbers = peer_requests_[static_cast<size_t>(r)];
    header.operation = operation_;
    const uint64_t answered_requests = numbers.parts | uint64_t{numbers.sums} << 32;
    network.send(r, sign_packet(rail_, r, header, answered_requests,
                                network.reserve(header_bytes(header.kind))));
  }
}

Time Transfer::next_send_time(Time now) const {
  const bool sums = sum_run_position_ < sum_run_length_ ||
                    sum_run_start_ + sum_run_length_ < sum_order_.size() ||
                    (sum_run_length_ > 0 && sum_turn_ + 1 < rail_.ranks);
  const bool idle = all_parts_sent() && !sums && part_repairs_.empty() && sum_repairs_.empty();
  if (!may_send() || idle) return Time::max();
  const double missing_credit = burst_bytes() - credit_bytes_;
  return missing_credit <= 0 ? now
                             : now + Time(static_cast<int64_t>(1e9 * missing_credit / job_.rate));
}

bool Transfer::is_finished(Time now) const {
  if (!is_transferring_) return false;
  if (available_sums_.all() || now >= clock_start_ + job_.total_time) return summed_.all();
  if (!summed_.all()) return false;
  for (int r = 0; r < rail_.ranks; ++r) {
    const Stream& stream = sum_streams_[static_cast<size_t>(r)];
    if (r != rail_.rank && stream.missing > 0 && !is_given_up(sum_streams_, r, now)) return false;
  }
  return true;
}

RankReport Transfer::report(Time now) const {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now - clock_start_).count();
  const double early_us = 1e6 * early_bytes_sent_ / job_.rate;
  return {static_cast<uint32_t>(expected_), static_cast<uint32_t>(lost_),
          static_cast<uint32_t>(scaled_), static_cast<uint32_t>(static_cast<double>(us) + early_us),
          0};
}

}  // namespace fsccl::datagram
