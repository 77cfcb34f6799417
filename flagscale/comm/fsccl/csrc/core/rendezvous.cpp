#include "rendezvous.h"

#include <cstring>

#include "text.h"

namespace fsccl {
namespace {

constexpr const char* kPeerTableKey = "roll";
constexpr char kSameLine = '=', kNewLine = '+', kEndOfIdentity = '.';

}  // namespace

// The table has one line per line of each identity: kSameLine if it equals the line at that
// position of the previous identity, otherwise kNewLine followed by the line. kEndOfIdentity is the
// last line of each identity.
std::string encode_peer_table(const std::vector<std::string>& identities) {
  std::string out;
  std::vector<std::string> previous;
  for (const std::string& text : identities) {
    const std::vector<std::string> lines = split(text, '\n');
    for (size_t i = 0; i < lines.size(); ++i) {
      const bool is_same = i < previous.size() && previous[i] == lines[i];
      out += is_same ? std::string(1, kSameLine) : kNewLine + lines[i];
      out += '\n';
    }
    out += std::string(1, kEndOfIdentity) + '\n';
    previous = lines;
  }
  return out;
}

std::vector<std::string> decode_peer_table(const std::string& table, size_t ranks) {
  std::vector<std::string> out, previous, lines;
  bool valid = true;
  for (const std::string& line : split(table, '\n')) {
    const char kind = line.empty() ? '\0' : line[0];
    if (kind == kNewLine) {
      lines.push_back(line.substr(1));
    } else if (kind == kSameLine && lines.size() < previous.size()) {
      lines.push_back(previous[lines.size()]);
    } else if (kind == kEndOfIdentity) {
      out.emplace_back();
      for (const std::string& l : lines) out.back() += l + '\n';
      previous.swap(lines);
      lines.clear();
    } else {
      valid = false;
    }
  }
  if (!valid || !lines.empty() || out.size() != ranks) {
    throw Error(Fault::kMismatch, -1,
                "the list of the group's ranks, of " + std::to_string(ranks) +
                    " expected, is broken: it has " + std::to_string(out.size()) + ", in " +
                    std::to_string(table.size()) + " bytes");
  }
  return out;
}

Rendezvous::Rendezvous(std::unique_ptr<Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size) {}

std::vector<std::string> Rendezvous::keys(int begin_rank, int end_rank) const {
  std::vector<std::string> out;
  for (int r = begin_rank; r < end_rank; ++r) out.push_back("rank/" + std::to_string(r));
  return out;
}

void Rendezvous::publish(const Identity& identity) {
  host_key_ = std::string(kPeerTableKey) + "/" + identity.domain;
  store_->set(keys(rank_, rank_ + 1)[0], identity.encode());
  if (store_->add("ranks", 1) == size_) write_peer_table();
}

void Rendezvous::write_peer_table() {
  if (size_ > 1) store_->set(kPeerTableKey, encode_peer_table(store_->get(keys(0, size_))));
}

bool Rendezvous::complete() {
  const auto now = Deadline::Clock::now();
  if (size_ == 1) return true;
  if (poll_start_ == Deadline::Clock::time_point()) {
    poll_start_ = now;
    reads_store_ = !shares_table() || store_->add(host_key_ + "/readers", 1) == 1;
  }
  if (store_->has({reads_store_ ? kPeerTableKey : host_key_})) return true;
  if (now - poll_start_ < fallback_interval_) return false;
  fallback_interval_ *= 2;
  if (!reads_store_ && store_->has({kPeerTableKey})) return reads_store_ = true;
  if (!store_->has(keys(0, size_))) return false;
  write_peer_table();  // the last rank has ended before writing it, or runs another version
  return reads_store_ = true;
}

std::vector<int> Rendezvous::absent_ranks() {
  std::vector<int> out;
  find_absent_ranks(0, size_, &out);
  return out;
}

void Rendezvous::find_absent_ranks(int begin_rank, int end_rank, std::vector<int>* out) {
  if (store_->has(keys(begin_rank, end_rank))) return;
  if (end_rank - begin_rank == 1) return out->push_back(begin_rank);
  const int middle = begin_rank + (end_rank - begin_rank) / 2;
  find_absent_ranks(begin_rank, middle, out);
  find_absent_ranks(middle, end_rank, out);
}

std::vector<Identity> Rendezvous::identities() {
  std::vector<Identity> out;
  for (const std::string& text : decode_peer_table(read_peer_table(), static_cast<size_t>(size_))) {
    out.push_back(Identity::decode(text));
  }
  return out;
}

std::string Rendezvous::read_peer_table() {
  if (size_ == 1) return encode_peer_table(store_->get(keys(0, 1)));
  if (!reads_store_ && store_->has({host_key_})) {
    if (auto table = read_shared_peer_table()) return *table;
  }
  std::string table = store_->has({kPeerTableKey}) ? store_->get({kPeerTableKey})[0]
                                                   : encode_peer_table(store_->get(keys(0, size_)));
  if (!shares_table() || !reads_store_) return table;
  try {
    shared_table_ = Segment::create(table.size(), table.size(), "");
  } catch (const Error&) {
    return table;  // no memory: the other ranks of the host fall back to the store
  }
  std::memcpy(shared_table_->data(), table.data(), table.size());
  store_->set(host_key_, std::to_string(table.size()) + "\n" + shared_table_->address());
  return table;
}

// The rank of this host that wrote the segment may have ended since.
std::optional<std::string> Rendezvous::read_shared_peer_table() {
  const std::vector<std::string> entry = split(store_->get({host_key_})[0], '\n');
  size_t bytes = 0;
  if (entry.size() != 2 || !parse_decimal(entry[0], &bytes)) return std::nullopt;
  try {
    const Segment segment = Segment::open(entry[1], bytes, "");
    return std::string(reinterpret_cast<const char*>(segment.data()), bytes);
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace fsccl
