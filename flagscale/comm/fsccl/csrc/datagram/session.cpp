#include "session.h"

#include <algorithm>

namespace fsccl::datagram {

double Outcome::lost_share() const {
  double lost = 0, expected = 0;
  for (const Report& r : reports) lost += r.lost, expected += r.expected;
  return expected > 0 ? lost / expected : 0;
}

uint64_t Outcome::overruns() const {
  uint64_t all = 0;
  for (const Report& r : reports) all += r.overruns;
  return all;
}

Session::Session(const Circle& circle, size_t payload, const Limits& limits, Network& net)
    : circle_(circle),
      limits_(limits),
      everyone_(circle.ranks == kMostRanks ? ~uint64_t{0} : bit(circle.ranks) - 1),
      net_(net),
      transfer_(circle, payload, limits),
      peers_(static_cast<size_t>(circle.ranks)) {
  if (circle.ranks < 2 || circle.ranks > kMostRanks) {
    fail_usage("2 to 64 ranks reduce by datagrams, not " + std::to_string(circle.ranks));
  }
}

void Session::advance(Time now) {
  if (started_ && now > last_) clock_ += std::min(now - last_, limits_.longest_step);
  started_ = true;
  last_ = now;
}

void Session::start(const Job& job, Time now) {
  if (state_ == State::kCancelled) return;
  advance(now);
  ++operation_;
  digest_ = job.digest;
  overruns_ = net_.overruns();
  transfer_.begin(job, operation_, clock_);
  state_ = State::kReady;
  began_ = clock_;
  again_ = clock_ + limits_.resend;
  reliable_ = clock_ + limits_.patience;
  turned_ = false;
  own_record(operation_).clear();
  others([&](int r) {
    Peer& p = peer(r);
    p.asked = p.has_mine = false;
    p.answered = clock_ - limits_.resend;
    p.record.assign(record_bytes(), std::byte{0});
    p.fragments = Bits(ceil_div(record_bytes(), kFragment));
    if (p.ready == operation_) compare(r, p.digest);
    say_ready(r);
    if (p.owed == operation_) net_.tell(r, {Notice::kReady, 0, operation_});
  });
  take_early();
}

uint64_t Session::ready_mask() const {
  uint64_t mask = 0;
  for (int r = 0; r < circle_.ranks; ++r) {
    if (r != circle_.rank && peer(r).ready >= operation_) mask |= bit(r);
  }
  return mask;
}

uint64_t Session::known_mask() const {
  uint64_t mask = 0;
  for (int r = 0; r < circle_.ranks; ++r) {
    if (r != circle_.rank && peer(r).fragments.all()) mask |= bit(r);
  }
  return mask;
}

void Session::on_packet(int from, const std::byte* packet, size_t bytes, Time now) {
  if (state_ == State::kCancelled) return;
  advance(now);
  const std::optional<Packet> p = open(circle_, from, packet, bytes, operation_, &dropped_);
  if (!p) return;
  if (p->kind == Kind::kReady) return on_ready(from, *p);
  if (p->operation == operation_ && state_ != State::kIdle) {
    return p->kind == Kind::kRecord ? on_fragment(from, *p) : on_data(*p);
  }
  if (p->kind == Kind::kRecord) return answer_behind(from, *p);
  if (p->kind == Kind::kPart && p->operation == operation_ + 1) return keep_early(*p);
  ++dropped_.late;
}

void Session::keep_early(const Packet& p) {
  Peer& from = peer(p.sender);
  if (from.early_bytes + p.length > Transfer::kMostLead) {
    ++dropped_.late;
    return;
  }
  from.early_bytes += p.length;
  from.early.emplace_back(p, Bytes(p.payload, p.payload + p.length));
}

void Session::take_early() {
  others([&](int r) {
    for (auto& [p, payload] : peer(r).early) {
      p.payload = payload.data();
      on_data(p);
    }
    peer(r).early.clear();
    peer(r).early_bytes = 0;
  });
}

void Session::on_ready(int from, const Packet& p) {
  uint64_t digest = 0;
  if (p.operation > operation_ + 1 || p.length != sizeof digest) {  // nobody can be there
    ++dropped_.malformed;
    return;
  }
  if (p.operation < operation_) {
    ++dropped_.late;
    return;
  }
  std::memcpy(&digest, p.payload, sizeof digest);
  Peer& sender = peer(from);
  const bool news = p.operation > sender.ready || sender.digest == 0;
  if (news && p.operation >= sender.ready) sender.digest = digest;
  sender.ready = std::max(sender.ready, p.operation);
  if (p.operation != operation_ || state_ == State::kIdle) return;
  compare(from, digest);
  const bool asks = (p.word & bit(circle_.rank)) == 0;  // it has not heard that this rank is
  if (asks) say_ready(from);
}

void Session::compare(int rank, uint64_t digest) {
  if (digest != 0 && digest != digest_ && unlike_ < 0) unlike_ = rank;
}

void Session::on_data(const Packet& p) {
  Peer& from = peer(p.sender);
  if (from.ready < operation_) from.digest = 0;
  from.ready = std::max(from.ready, operation_);
  if (state_ == State::kReady && !p.leads()) all_are_ready();
  const bool wants = p.kind == Kind::kWantParts || p.kind == Kind::kWantSums;
  // After the record a sum that comes is not in it; a part may be of use to others yet.
  const bool late = state_ == State::kDone || (state_ == State::kAgreeing && !wants);
  if (late) {
    ++dropped_.late;
    return;
  }
  transfer_.take(p, clock_, &dropped_);
}

void Session::say_ready(int to) {
  Header h;
  h.kind = Kind::kReady;
  h.operation = operation_;
  h.length = sizeof digest_;
  std::byte* const made = net_.place(head_of(h.kind) + sizeof digest_);
  std::memcpy(made + head_of(h.kind), &digest_, sizeof digest_);
  net_.send(to, seal(circle_, to, h, ready_mask(), made));
}

void Session::all_are_ready() {
  others([&](int r) { peer(r).ready = std::max(peer(r).ready, operation_); });
  go();
}

void Session::go() {
  outcome_.waited = clock_ - began_;
  state_ = State::kMoving;
  began_ = clock_;
  transfer_.go(clock_);
}

void Session::wait_for_ready() {
  const uint64_t mask = ready_mask();
  if (all(mask)) return go();
  if (clock_ >= again_) {
    // A rank that computes for long is not asked at full pace.
    again_ = clock_ + std::clamp((clock_ - began_) / 8, limits_.resend, 5 * limits_.resend);
    others([&](int r) {
      if ((mask & bit(r)) == 0) say_ready(r);
    });
  }
  if (turned_ || clock_ < reliable_) return;
  turned_ = true;
  others([&](int r) {
    if ((mask & bit(r)) == 0) net_.tell(r, {Notice::kReady, 1, operation_});
  });
}

Time Session::step(Time now) {
  if (state_ == State::kCancelled) return now + std::chrono::seconds(1);
  advance(now);
  if (state_ == State::kReady) wait_for_ready();
  if (state_ == State::kMoving) {
    transfer_.look(clock_, net_);
    if (transfer_.over(clock_)) finish_record();
  }
  if (state_ == State::kIdle || state_ == State::kDone) return now + std::chrono::seconds(1);
  transfer_.pump(clock_, net_);
  if (state_ == State::kAgreeing) agree();
  if (state_ == State::kDone) return now + std::chrono::seconds(1);
  if (state_ == State::kReady) {
    return now + std::max(std::min(again_, transfer_.next(clock_)) - clock_, Time(0));
  }
  const Time soon = clock_ + limits_.reorder;
  return now + (std::min(soon, transfer_.next(clock_)) - clock_);
}

void Session::finish_record() {
  Report report = transfer_.report(clock_);
  report.overruns = net_.overruns() - overruns_;
  Bytes& record = own_record(operation_);
  const RecordHead head{operation_, digest_, report};
  record.resize(record_bytes());
  std::memcpy(record.data(), &head, sizeof head);
  const std::vector<uint8_t>& bits = transfer_.have().bytes();
  std::memcpy(record.data() + sizeof head, bits.data(), bits.size());
  state_ = State::kAgreeing;
  began_ = again_ = clock_;
  reliable_ = clock_ + limits_.patience;
  turned_ = false;
  others([&](int r) {
    if (peer(r).asked) net_.tell_record(r, record);
  });
}

void Session::agree() {
  // At once the first time: the last one to come here has all records, and nobody has its own.
  if (clock_ >= again_) {
    again_ = clock_ + limits_.resend;
    others([&](int r) {
      if (!peer(r).has_mine || !peer(r).fragments.all()) {
        say_record(r, operation_, own_record(operation_));
      }
    });
  }
  if (all(known_mask())) return conclude();
  if (turned_ || clock_ < reliable_) return;
  turned_ = true;
  others([&](int r) {
    if (!peer(r).fragments.all()) net_.tell(r, {Notice::kAsk, 0, operation_});
  });
}

void Session::say_record(int to, uint64_t operation, const Bytes& record) {
  for (size_t at = 0; at < record.size(); at += kFragment) {
    Header h;
    h.kind = Kind::kRecord;
    h.operation = operation;
    h.place = static_cast<uint32_t>(at);
    h.length = static_cast<uint16_t>(std::min(kFragment, record.size() - at));
    std::byte* const made = net_.place(head_of(h.kind) + kFragment);
    std::memcpy(made + head_of(h.kind), record.data() + at, h.length);
    // Of an earlier operation it has all.
    const uint64_t known = operation == operation_ ? known_mask() : everyone_;
    net_.send(to, seal(circle_, to, h, known, made));
  }
}

void Session::on_fragment(int from, const Packet& h) {
  Peer& p = peer(from);
  const size_t at = h.place / kFragment;
  if (h.place % kFragment != 0 || h.place >= p.record.size() ||
      h.length != std::min<size_t>(kFragment, p.record.size() - at * kFragment)) {
    ++dropped_.malformed;
    return;
  }
  // All that is sent after the first data says that all are ready.
  if (state_ == State::kReady) all_are_ready();
  if (p.fragments.set(at)) {
    std::copy(h.payload, h.payload + h.length, p.record.data() + h.place);
  } else {
    ++dropped_.repeated;
  }
  const bool has_mine = (h.word & bit(circle_.rank)) != 0;
  p.has_mine = p.has_mine || has_mine;
  const bool final = state_ == State::kAgreeing || state_ == State::kDone;
  if (!final || has_mine || clock_ < p.answered + limits_.resend / 2) return;
  p.answered = clock_;
  say_record(from, operation_, own_record(operation_));
}

// A rank that is still at the operation before this one lacks a record of it.
void Session::answer_behind(int from, const Packet& h) {
  const bool before = h.operation + 1 == operation_;
  const bool has_mine = (h.word & bit(circle_.rank)) != 0;
  Peer& p = peer(from);
  if (!before || has_mine || clock_ < p.answered + limits_.resend / 2) {
    ++dropped_.late;
    return;
  }
  p.answered = clock_;
  say_record(from, h.operation, own_record(h.operation));
}

void Session::on_notice(int from, const Notice& notice, Time now) {
  if (state_ == State::kCancelled) return;
  advance(now);
  Peer& p = peer(from);
  if (notice.kind == Notice::kReady) {
    if (notice.operation > operation_ + 1) return;
    if (notice.operation > p.ready) p.digest = 0;
    p.ready = std::max(p.ready, notice.operation);
    if (notice.wants_answer == 0) return;
    if (notice.operation <= operation_) {
      net_.tell(from, {Notice::kReady, 0, notice.operation});
    } else {
      p.owed = notice.operation;
    }
    return;
  }
  if (notice.kind != Notice::kAsk) return;
  const bool here = notice.operation == operation_;
  if (!here && notice.operation + 1 != operation_) return;
  const Bytes& record = own_record(notice.operation);
  if (!record.empty()) return net_.tell_record(from, record);
  p.asked = here;
}

void Session::on_record(int from, const std::vector<std::byte>& record, Time now) {
  if (state_ != State::kAgreeing) return;
  advance(now);
  Peer& p = peer(from);
  if (record.size() != p.record.size() || p.fragments.all()) return;
  RecordHead head;
  std::memcpy(&head, record.data(), sizeof head);
  if (head.operation != operation_) return;  // asked for in an earlier one, and come otherwise
  p.record = record;
  for (size_t i = 0; i < p.fragments.size(); ++i) p.fragments.set(i);
}

void Session::conclude() {
  const size_t pieces = layout().pieces();
  outcome_.excluded = Bits(pieces);
  outcome_.reports.assign(static_cast<size_t>(circle_.ranks), {});
  outcome_.lacked = pieces - transfer_.have().count();
  for (int r = 0; r < circle_.ranks; ++r) {
    const Bytes& record = r == circle_.rank ? own_record(operation_) : peer(r).record;
    RecordHead head;
    std::memcpy(&head, record.data(), sizeof head);
    outcome_.reports[static_cast<size_t>(r)] = head.report;
    compare(r, head.digest);
    if (unlike_ >= 0) return;
    const std::byte* const bits = record.data() + sizeof head;
    for (size_t i = 0; i < pieces; ++i) {
      if ((static_cast<unsigned>(bits[i / 8]) >> (i % 8) & 1) == 0) outcome_.excluded.set(i);
    }
  }
  for (size_t i = 0; i < pieces; ++i) {
    const Interval span = layout().span(i);
    if (outcome_.excluded.test(i)) std::fill_n(result() + span.lo, span.size(), std::byte{0});
  }
  transfer_.end();
  state_ = State::kDone;
}

bool Session::awaits(int rank) const {
  if (rank == circle_.rank) return false;
  if (state_ == State::kReady) return peer(rank).ready < operation_;
  return state_ == State::kAgreeing && !peer(rank).fragments.all();
}

int Session::awaited() const {
  for (int r = 0; r < circle_.ranks; ++r) {
    if (awaits(r)) return r;
  }
  return -1;
}

}  // namespace fsccl::datagram
