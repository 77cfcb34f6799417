#include "rendezvous.h"

#include <cstring>

#include "text.h"

namespace fsccl {
namespace {

constexpr const char* kRollKey = "roll";
constexpr char kSame = '=', kOther = '+', kEnd = '.';

}  // namespace

// Line by line: what the line at that place was in the identity before, or another.
std::string encode_roll(const std::vector<std::string>& texts) {
  std::string out;
  std::vector<std::string> before;
  for (const std::string& text : texts) {
    const std::vector<std::string> lines = split(text, '\n');
    for (size_t i = 0; i < lines.size(); ++i) {
      const bool same = i < before.size() && before[i] == lines[i];
      out += same ? std::string(1, kSame) : kOther + lines[i];
      out += '\n';
    }
    out += std::string(1, kEnd) + '\n';
    before = lines;
  }
  return out;
}

std::vector<std::string> decode_roll(const std::string& roll, size_t ranks) {
  std::vector<std::string> out, before, lines;
  bool sound = true;
  for (const std::string& line : split(roll, '\n')) {
    const char kind = line.empty() ? '\0' : line[0];
    if (kind == kOther) {
      lines.push_back(line.substr(1));
    } else if (kind == kSame && lines.size() < before.size()) {
      lines.push_back(before[lines.size()]);
    } else if (kind == kEnd) {
      out.emplace_back();
      for (const std::string& one : lines) out.back() += one + '\n';
      before.swap(lines);
      lines.clear();
    } else {
      sound = false;
    }
  }
  if (!sound || !lines.empty() || out.size() != ranks) {
    throw Error(Fault::kMismatch, -1,
                "the list of the group's ranks, of " + std::to_string(ranks) +
                    " expected, is broken: it has " + std::to_string(out.size()) + ", in " +
                    std::to_string(roll.size()) + " bytes");
  }
  return out;
}

Rendezvous::Rendezvous(std::unique_ptr<Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size) {}

std::vector<std::string> Rendezvous::keys(int from, int to) const {
  std::vector<std::string> out;
  for (int r = from; r < to; ++r) out.push_back("rank/" + std::to_string(r));
  return out;
}

void Rendezvous::publish(const Identity& me) {
  here_ = std::string(kRollKey) + "/" + me.domain;
  store_->set(keys(rank_, rank_ + 1)[0], me.encode());
  if (store_->add("ranks", 1) == size_) write_roll();
}

void Rendezvous::write_roll() {
  if (size_ > 1) store_->set(kRollKey, encode_roll(store_->get(keys(0, size_))));
}

bool Rendezvous::complete() {
  const auto now = Deadline::Clock::now();
  if (size_ == 1) return true;
  if (began_ == Deadline::Clock::time_point()) {
    began_ = now;
    reads_ = !shares() || store_->add(here_ + "/readers", 1) == 1;
  }
  if (store_->has({reads_ ? kRollKey : here_})) return true;
  if (now - began_ < patience_) return false;
  patience_ *= 2;
  if (!reads_ && store_->has({kRollKey})) return reads_ = true;
  if (!store_->has(keys(0, size_))) return false;
  write_roll();  // the last to come has ended, or speaks another version
  return reads_ = true;
}

std::vector<int> Rendezvous::absent() {
  std::vector<int> out;
  find_absent(0, size_, &out);
  return out;
}

void Rendezvous::find_absent(int from, int to, std::vector<int>* out) {
  if (store_->has(keys(from, to))) return;
  if (to - from == 1) return out->push_back(from);
  const int middle = from + (to - from) / 2;
  find_absent(from, middle, out);
  find_absent(middle, to, out);
}

std::vector<Identity> Rendezvous::everyone() {
  std::vector<Identity> out;
  for (const std::string& text : decode_roll(read_roll(), static_cast<size_t>(size_))) {
    out.push_back(Identity::decode(text));
  }
  return out;
}

std::string Rendezvous::read_roll() {
  if (size_ == 1) return encode_roll(store_->get(keys(0, 1)));
  if (!reads_ && store_->has({here_})) {
    if (auto roll = read_shared()) return *roll;
  }
  std::string roll = store_->has({kRollKey}) ? store_->get({kRollKey})[0]
                                             : encode_roll(store_->get(keys(0, size_)));
  if (!shares() || !reads_) return roll;
  try {
    shared_ = Segment::create(roll.size(), roll.size(), "");
  } catch (const Error&) {
    return roll;  // no memory: the others do without, in their time
  }
  std::memcpy(shared_->data(), roll.data(), roll.size());
  store_->set(here_, std::to_string(roll.size()) + "\n" + shared_->address());
  return roll;
}

// Of a rank of this host, which may have ended since.
std::optional<std::string> Rendezvous::read_shared() {
  const std::vector<std::string> place = split(store_->get({here_})[0], '\n');
  size_t bytes = 0;
  if (place.size() != 2 || !read_number(place[0], &bytes)) return std::nullopt;
  try {
    const Segment segment = Segment::open(place[1], bytes, "");
    return std::string(reinterpret_cast<const char*>(segment.data()), bytes);
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace fsccl
