#include "session.h"

#include <algorithm>

namespace fsccl::datagram {

double Outcome::lost_share() const {
  double lost = 0, expected = 0;
  for (const RankReport& r : reports) lost += r.lost, expected += r.expected;
  return expected > 0 ? lost / expected : 0;
}

uint64_t Outcome::overruns() const {
  uint64_t total = 0;
  for (const RankReport& r : reports) total += r.overruns;
  return total;
}

Session::Session(const Rail& rail, size_t payload, const ProtocolLimits& limits, Network& network)
    : rail_(rail),
      limits_(limits),
      all_ranks_mask_(rail.ranks == kMaxRanks ? ~uint64_t{0} : bit(rail.ranks) - 1),
      network_(network),
      transfer_(rail, payload, limits),
      peers_(static_cast<size_t>(rail.ranks)) {
  if (rail.ranks < 2 || rail.ranks > kMaxRanks) {
    fail_usage("2 to 64 ranks reduce by datagrams, not " + std::to_string(rail.ranks));
  }
}

void Session::advance_clock(Time now) {
  if (clock_started_ && now > last_time_)
    clock_ += std::min(now - last_time_, limits_.max_clock_step);
  clock_started_ = true;
  last_time_ = now;
}

void Session::start(const AllReduceJob& job, Time now) {
  if (state_ == State::kCancelled) return;
  advance_clock(now);
  ++operation_;
  digest_ = job.digest;
  overruns_ = network_.overruns();
  transfer_.begin_early_phase(job, operation_, clock_);
  state_ = State::kReady;
  state_start_ = clock_;
  next_resend_ = clock_ + limits_.resend_interval;
  reliable_fallback_at_ = clock_ + limits_.fallback_delay;
  reliable_used_ = false;
  own_record(operation_).clear();
  each_peer([&](int r) {
    Peer& p = peer(r);
    p.record_requested = p.has_acknowledged_record = false;
    p.last_answer = clock_ - limits_.resend_interval;
    p.record.assign(record_bytes(), std::byte{0});
    p.fragments = Bitmap(ceil_div(record_bytes(), kFragmentBytes));
    if (p.ready_operation == operation_) check_digest(r, p.digest);
    send_ready(r);
    if (p.ready_notice_owed == operation_) network_.send_notice(r, {Notice::kReady, 0, operation_});
  });
  replay_early();
}

uint64_t Session::ready_mask() const {
  uint64_t mask = 0;
  for (int r = 0; r < rail_.ranks; ++r) {
    if (r != rail_.rank && peer(r).ready_operation >= operation_) mask |= bit(r);
  }
  return mask;
}

uint64_t Session::complete_records_mask() const {
  uint64_t mask = 0;
  for (int r = 0; r < rail_.ranks; ++r) {
    if (r != rail_.rank && peer(r).fragments.all()) mask |= bit(r);
  }
  return mask;
}

void Session::on_packet(int from, const std::byte* packet, size_t bytes, Time now) {
  if (state_ == State::kCancelled) return;
  advance_clock(now);
  const std::optional<Packet> p =
      verify_packet(rail_, from, packet, bytes, operation_, &drop_counters_);
  if (!p) return;
  if (p->kind == PacketKind::kReady) return on_ready(from, *p);
  if (p->operation == operation_ && state_ != State::kIdle) {
    return p->kind == PacketKind::kRecord ? on_fragment(from, *p) : on_data(*p);
  }
  if (p->kind == PacketKind::kRecord) return resend_previous_record(from, *p);
  if (p->kind == PacketKind::kPart && p->operation == operation_ + 1) return buffer_early(*p);
  ++drop_counters_.late;
}

void Session::buffer_early(const Packet& p) {
  Peer& from = peer(p.sender);
  if (from.early_bytes + p.length > Transfer::kMaxEarlyBytes) {
    ++drop_counters_.late;
    return;
  }
  from.early_bytes += p.length;
  from.early_packets.emplace_back(p, Bytes(p.payload, p.payload + p.length));
}

void Session::replay_early() {
  each_peer([&](int r) {
    for (auto& [p, payload] : peer(r).early_packets) {
      p.payload = payload.data();
      on_data(p);
    }
    peer(r).early_packets.clear();
    peer(r).early_bytes = 0;
  });
}

void Session::on_ready(int from, const Packet& p) {
  uint64_t digest = 0;
  if (p.operation > operation_ + 1 || p.length != sizeof digest) {  // no rank can have begun it
    ++drop_counters_.malformed;
    return;
  }
  if (p.operation < operation_) {
    ++drop_counters_.late;
    return;
  }
  std::memcpy(&digest, p.payload, sizeof digest);
  Peer& sender = peer(from);
  const bool is_new = p.operation > sender.ready_operation || sender.digest == 0;
  if (is_new && p.operation >= sender.ready_operation) sender.digest = digest;
  sender.ready_operation = std::max(sender.ready_operation, p.operation);
  if (p.operation != operation_ || state_ == State::kIdle) return;
  check_digest(from, digest);
  // The sender does not know yet that this rank is ready.
  const bool needs_ready = (p.status_word & bit(rail_.rank)) == 0;
  if (needs_ready) send_ready(from);
}

void Session::check_digest(int rank, uint64_t digest) {
  if (digest != 0 && digest != digest_ && mismatched_rank_ < 0) mismatched_rank_ = rank;
}

void Session::on_data(const Packet& p) {
  Peer& from = peer(p.sender);
  if (from.ready_operation < operation_) from.digest = 0;
  from.ready_operation = std::max(from.ready_operation, operation_);
  if (state_ == State::kReady && !p.is_early()) mark_all_ready();
  const bool is_request = p.kind == PacketKind::kRequestParts || p.kind == PacketKind::kRequestSums;
  // A sum that arrives after the record is not in it; a part may still be of use to other ranks.
  const bool is_late = state_ == State::kDone || (state_ == State::kAgreeing && !is_request);
  if (is_late) {
    ++drop_counters_.late;
    return;
  }
  transfer_.handle_packet(p, clock_, &drop_counters_);
}

void Session::send_ready(int to) {
  PacketHeader header;
  header.kind = PacketKind::kReady;
  header.operation = operation_;
  header.length = sizeof digest_;
  std::byte* const buffer = network_.reserve(header_bytes(header.kind) + sizeof digest_);
  std::memcpy(buffer + header_bytes(header.kind), &digest_, sizeof digest_);
  network_.send(to, sign_packet(rail_, to, header, ready_mask(), buffer));
}

void Session::mark_all_ready() {
  each_peer(
      [&](int r) { peer(r).ready_operation = std::max(peer(r).ready_operation, operation_); });
  start_transfer();
}

void Session::start_transfer() {
  outcome_.ready_wait = clock_ - state_start_;
  state_ = State::kTransferring;
  state_start_ = clock_;
  transfer_.start(clock_);
}

void Session::wait_for_ready() {
  const uint64_t mask = ready_mask();
  if (is_complete(mask)) return start_transfer();
  if (clock_ >= next_resend_) {
    // Send less often to ranks that compute for a long time.
    next_resend_ = clock_ + std::clamp((clock_ - state_start_) / 8, limits_.resend_interval,
                                       5 * limits_.resend_interval);
    each_peer([&](int r) {
      if ((mask & bit(r)) == 0) send_ready(r);
    });
  }
  if (reliable_used_ || clock_ < reliable_fallback_at_) return;
  reliable_used_ = true;
  each_peer([&](int r) {
    if ((mask & bit(r)) == 0) network_.send_notice(r, {Notice::kReady, 1, operation_});
  });
}

Time Session::step(Time now) {
  if (state_ == State::kCancelled) return now + std::chrono::seconds(1);
  advance_clock(now);
  if (state_ == State::kReady) wait_for_ready();
  if (state_ == State::kTransferring) {
    transfer_.check_deadlines(clock_, network_);
    if (transfer_.is_finished(clock_)) finish_record();
  }
  if (state_ == State::kIdle || state_ == State::kDone) return now + std::chrono::seconds(1);
  transfer_.send_due(clock_, network_);
  if (state_ == State::kAgreeing) exchange_records();
  if (state_ == State::kDone) return now + std::chrono::seconds(1);
  if (state_ == State::kReady) {
    return now +
           std::max(std::min(next_resend_, transfer_.next_send_time(clock_)) - clock_, Time(0));
  }
  const Time reorder_check = clock_ + limits_.max_reorder_delay;
  return now + (std::min(reorder_check, transfer_.next_send_time(clock_)) - clock_);
}

void Session::finish_record() {
  RankReport report = transfer_.report(clock_);
  report.overruns = network_.overruns() - overruns_;
  Bytes& record = own_record(operation_);
  const RecordHeader head{operation_, digest_, report};
  record.resize(record_bytes());
  std::memcpy(record.data(), &head, sizeof head);
  const std::vector<uint8_t>& bits = transfer_.received_pieces().bytes();
  std::memcpy(record.data() + sizeof head, bits.data(), bits.size());
  state_ = State::kAgreeing;
  state_start_ = next_resend_ = clock_;
  reliable_fallback_at_ = clock_ + limits_.fallback_delay;
  reliable_used_ = false;
  each_peer([&](int r) {
    if (peer(r).record_requested) network_.send_record(r, record);
  });
}

void Session::exchange_records() {
  // The first time, immediately: the last rank that gets here has all records, but no rank has its
  // record.
  if (clock_ >= next_resend_) {
    next_resend_ = clock_ + limits_.resend_interval;
    each_peer([&](int r) {
      if (!peer(r).has_acknowledged_record || !peer(r).fragments.all()) {
        send_fragments(r, operation_, own_record(operation_));
      }
    });
  }
  if (is_complete(complete_records_mask())) return compute_outcome();
  if (reliable_used_ || clock_ < reliable_fallback_at_) return;
  reliable_used_ = true;
  each_peer([&](int r) {
    if (!peer(r).fragments.all()) network_.send_notice(r, {Notice::kRequestRecord, 0, operation_});
  });
}

void Session::send_fragments(int to, uint64_t operation, const Bytes& record) {
  for (size_t at = 0; at < record.size(); at += kFragmentBytes) {
    PacketHeader header;
    header.kind = PacketKind::kRecord;
    header.operation = operation;
    header.position = static_cast<uint32_t>(at);
    header.length = static_cast<uint16_t>(std::min(kFragmentBytes, record.size() - at));
    std::byte* const buffer = network_.reserve(header_bytes(header.kind) + kFragmentBytes);
    std::memcpy(buffer + header_bytes(header.kind), record.data() + at, header.length);
    // This rank has completed earlier operations, so it has all records of those.
    const uint64_t complete_records =
        operation == operation_ ? complete_records_mask() : all_ranks_mask_;
    network_.send(to, sign_packet(rail_, to, header, complete_records, buffer));
  }
}

void Session::on_fragment(int from, const Packet& packet) {
  Peer& p = peer(from);
  const size_t at = packet.position / kFragmentBytes;
  if (packet.position % kFragmentBytes != 0 || packet.position >= p.record.size() ||
      packet.length != std::min<size_t>(kFragmentBytes, p.record.size() - at * kFragmentBytes)) {
    ++drop_counters_.malformed;
    return;
  }
  // A record implies that all ranks are ready.
  if (state_ == State::kReady) mark_all_ready();
  if (p.fragments.set(at)) {
    std::copy(packet.payload, packet.payload + packet.length, p.record.data() + packet.position);
  } else {
    ++drop_counters_.repeated;
  }
  const bool has_acknowledged_record = (packet.status_word & bit(rail_.rank)) != 0;
  p.has_acknowledged_record = p.has_acknowledged_record || has_acknowledged_record;
  const bool record_is_final = state_ == State::kAgreeing || state_ == State::kDone;
  if (!record_is_final || has_acknowledged_record ||
      clock_ < p.last_answer + limits_.resend_interval / 2)
    return;
  p.last_answer = clock_;
  send_fragments(from, operation_, own_record(operation_));
}

// Answers a record of the previous operation: its sender lacks a record of that operation, possibly
// this rank's.
void Session::resend_previous_record(int from, const Packet& packet) {
  const bool is_previous = packet.operation + 1 == operation_;
  const bool has_acknowledged_record = (packet.status_word & bit(rail_.rank)) != 0;
  Peer& p = peer(from);
  if (!is_previous || has_acknowledged_record ||
      clock_ < p.last_answer + limits_.resend_interval / 2) {
    ++drop_counters_.late;
    return;
  }
  p.last_answer = clock_;
  send_fragments(from, packet.operation, own_record(packet.operation));
}

void Session::on_notice(int from, const Notice& notice, Time now) {
  if (state_ == State::kCancelled) return;
  advance_clock(now);
  Peer& p = peer(from);
  if (notice.kind == Notice::kReady) {
    if (notice.operation > operation_ + 1) return;
    if (notice.operation > p.ready_operation) p.digest = 0;
    p.ready_operation = std::max(p.ready_operation, notice.operation);
    if (notice.needs_reply == 0) return;
    if (notice.operation <= operation_) {
      network_.send_notice(from, {Notice::kReady, 0, notice.operation});
    } else {
      p.ready_notice_owed = notice.operation;
    }
    return;
  }
  if (notice.kind != Notice::kRequestRecord) return;
  const bool is_current = notice.operation == operation_;
  if (!is_current && notice.operation + 1 != operation_) return;
  const Bytes& record = own_record(notice.operation);
  if (!record.empty()) return network_.send_record(from, record);
  p.record_requested = is_current;
}

void Session::on_record(int from, const std::vector<std::byte>& record, Time now) {
  if (state_ != State::kAgreeing) return;
  advance_clock(now);
  Peer& p = peer(from);
  if (record.size() != p.record.size() || p.fragments.all()) return;
  RecordHeader head;
  std::memcpy(&head, record.data(), sizeof head);
  // The reply to a request in an earlier operation, whose record has also arrived as datagrams.
  if (head.operation != operation_) return;
  p.record = record;
  for (size_t i = 0; i < p.fragments.size(); ++i) p.fragments.set(i);
}

void Session::compute_outcome() {
  const size_t pieces = layout().pieces();
  outcome_.excluded = Bitmap(pieces);
  outcome_.reports.assign(static_cast<size_t>(rail_.ranks), {});
  outcome_.missing_pieces = pieces - transfer_.received_pieces().count();
  for (int r = 0; r < rail_.ranks; ++r) {
    const Bytes& record = r == rail_.rank ? own_record(operation_) : peer(r).record;
    RecordHeader head;
    std::memcpy(&head, record.data(), sizeof head);
    outcome_.reports[static_cast<size_t>(r)] = head.report;
    check_digest(r, head.digest);
    if (mismatched_rank_ >= 0) return;
    const std::byte* const bits = record.data() + sizeof head;
    for (size_t i = 0; i < pieces; ++i) {
      if ((static_cast<unsigned>(bits[i / 8]) >> (i % 8) & 1) == 0) outcome_.excluded.set(i);
    }
  }
  for (size_t i = 0; i < pieces; ++i) {
    const Interval span = layout().piece_interval(i);
    if (outcome_.excluded.test(i)) std::fill_n(result() + span.lo, span.size(), std::byte{0});
  }
  transfer_.finish();
  state_ = State::kDone;
}

bool Session::awaits(int rank) const {
  if (rank == rail_.rank) return false;
  if (state_ == State::kReady) return peer(rank).ready_operation < operation_;
  return state_ == State::kAgreeing && !peer(rank).fragments.all();
}

int Session::awaited_rank() const {
  for (int r = 0; r < rail_.ranks; ++r) {
    if (awaits(r)) return r;
  }
  return -1;
}

}  // namespace fsccl::datagram
