// How a group comes by its tail: at the first all_reduce that may take it, which all ranks call.
#include <cstring>

#include "../core/group.h"
#include "tail.h"

namespace fsccl {
namespace {

constexpr size_t kAddressBytes = 64;

// The last word of what a transport calls itself.
std::string tcp_of(const std::string& address) { return address.substr(address.rfind(' ') + 1); }

}  // namespace

// Everyone's socket, or none where somebody has none. Two collectives of the group.
size_t Group::meet_datagrams(datagram::Socket* socket, const std::string& address,
                             const Deadline& d) {
  const auto ranks = static_cast<size_t>(config_.size);
  std::vector<char> all(ranks * kAddressBytes);
  const auto own = static_cast<size_t>(config_.rank);
  std::memcpy(&all[own * kAddressBytes], address.data(), std::min(address.size(), kAddressBytes - 1));
  const auto gather = [&](void* memory, size_t each) {
    BufferLists out;
    auto* const at = static_cast<std::byte*>(memory);
    for (size_t r = 0; r < ranks; ++r) out.emplace_back(at + r * each, each);
    all_gather(out[own], out, d);
  };
  gather(all.data(), kAddressBytes);
  std::vector<uint64_t> most(ranks, 0);
  std::string lacks;
  std::vector<std::string> members;
  for (size_t r = 0; r < ranks; ++r) {
    if (all[r * kAddressBytes] == '\0') lacks = names_[r];
  }
  for (const int r : datagram::Tail::circle_of(clusters_)) {
    members.emplace_back(&all[static_cast<size_t>(r) * kAddressBytes]);
  }
  try {
    if (lacks.empty()) most[own] = socket->meet(members);
  } catch (const Error& e) {
    warn(e.what());
  }
  gather(most.data(), sizeof most[0]);
  const size_t least = *std::min_element(most.begin(), most.end());
  if (least == 0 && config_.rank == 0) {
    warn("FSCCL_TAIL=bounded: " + (lacks.empty() ? "a rank" : lacks) +
         " has no way for datagrams; all_reduce is exact");
  }
  return least;
}

bool Group::has_tail(const Deadline& d) {
  if (!tail_asked_) open_tail(d);
  return tail_ != nullptr;
}

void Group::open_tail(const Deadline& d) {
  tail_asked_ = true;
  check_here();
  or_fail("connecting", 0, [&] {
    check();
    open_shm(d);
  });
  if (!hierarchical()) return;  // shared memory loses nothing
  if (const std::string why = datagram::Tail::misfit(clusters_); !why.empty()) {
    if (config_.rank == 0) warn("FSCCL_TAIL=bounded: " + why + "; all_reduce is exact");
    return;
  }
  std::unique_ptr<datagram::Socket> socket;
  std::string address;
  try {
    socket = std::make_unique<datagram::Socket>(tcp_of(me_.address));
    address = socket->address();
  } catch (const Error& e) {
    warn(e.what());
  }
  const size_t most = meet_datagrams(socket.get(), address, d);
  if (most == 0) return;
  const Key& fresh = who_[0].key;
  const auto& secret = config_.settings.secret;
  const Key key = secret ? derived(*secret, std::array<uint64_t, 3>{1, fresh.lo, fresh.hi}) : fresh;
  or_fail("connecting", 0, [&] {
    const auto look = [this] {
      shm_->look_at(-1, nullptr);
      transport_->throw_trouble();
    };
    const auto warned = [this](const std::string& words) {
      if (config_.rank == 0) warn(words);
    };
    datagram::Tail::Home home{*transport_, *shm_, *local_, clusters_, key, look, warned};
    tail_ = std::make_unique<datagram::Tail>(config_.settings.tail, std::move(home),
                                             std::move(socket), most);
  });
  say([&] {
    return "all_reduce of gradients by datagrams of " + std::to_string(most) + " bytes, " +
           clusters_.text();
  });
  tail_open_ = true;
}

std::map<std::string, double> Group::tail_statistics() const {
  if (!tail_open_) return {};
  return tail_->statistics();
}

std::vector<Transport::Traffic> Group::datagrams() const {
  std::vector<Transport::Traffic> out(static_cast<size_t>(config_.size));
  if (!tail_open_) return out;
  for (const auto& [rank, sent] : tail_->sent()) out[static_cast<size_t>(rank)] = sent;
  return out;
}

}  // namespace fsccl
