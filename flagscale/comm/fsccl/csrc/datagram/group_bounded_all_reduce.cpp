// Part of Group: setup and statistics of its BoundedAllReduce. All ranks set it up together, at the
// first all_reduce that may use it.
#include <cstring>

#include "../core/group.h"
#include "bounded_all_reduce.h"

namespace fsccl {
namespace {

constexpr size_t kAddressBytes = 64;

// Returns the last word of TcpTransport::address(), which is the preferred TCP address.
std::string tcp_address_of(const std::string& address) {
  return address.substr(address.rfind(' ') + 1);
}

}  // namespace

// Exchanges the addresses of the datagram sockets, by two collectives of the group. Returns the
// largest size of a packet that every rank can send to its rail, 0 if a rank has no socket.
// `socket` is null and `address` empty if this rank has none.
size_t Group::exchange_datagram_addresses(datagram::Socket* socket, const std::string& address,
                                          const Deadline& d) {
  const auto ranks = static_cast<size_t>(config_.size);
  std::vector<char> addresses(ranks * kAddressBytes);
  const auto own_rank = static_cast<size_t>(config_.rank);
  std::memcpy(&addresses[own_rank * kAddressBytes], address.data(),
              std::min(address.size(), kAddressBytes - 1));
  const auto gather = [&](void* memory, size_t bytes_per_rank) {
    BufferLists out;
    auto* const at = static_cast<std::byte*>(memory);
    for (size_t r = 0; r < ranks; ++r) out.emplace_back(at + r * bytes_per_rank, bytes_per_rank);
    all_gather(out[own_rank], out, d);
  };
  gather(addresses.data(), kAddressBytes);
  std::vector<uint64_t> max_bytes(ranks, 0);
  std::string rank_without;
  std::vector<std::string> members;
  for (size_t r = 0; r < ranks; ++r) {
    if (addresses[r * kAddressBytes] == '\0') rank_without = names_[r];
  }
  for (const int r : datagram::BoundedAllReduce::rail_of(nodes_)) {
    members.emplace_back(&addresses[static_cast<size_t>(r) * kAddressBytes]);
  }
  try {
    if (rank_without.empty()) max_bytes[own_rank] = socket->set_peers(members);
  } catch (const Error& e) {
    warn(e.what());
  }
  gather(max_bytes.data(), sizeof max_bytes[0]);
  const size_t common_bytes = *std::min_element(max_bytes.begin(), max_bytes.end());
  if (common_bytes == 0 && config_.rank == 0) {
    warn("FSCCL_TAIL=bounded: " + (rank_without.empty() ? "a rank" : rank_without) +
         " has no way for datagrams; all_reduce is exact");
  }
  return common_bytes;
}

bool Group::has_bounded_all_reduce(const Deadline& d) {
  if (!bounded_all_reduce_attempted_) open_bounded_all_reduce(d);
  return bounded_all_reduce_ != nullptr;
}

void Group::open_bounded_all_reduce(const Deadline& d) {
  bounded_all_reduce_attempted_ = true;
  check_usable();
  run_or_fail("connecting", 0, [&] {
    throw_if_failed();
    open_shared_memory(d);
  });
  if (!spans_nodes()) return;  // shared memory loses nothing
  if (const std::string reason = datagram::BoundedAllReduce::unsupported_reason(nodes_);
      !reason.empty()) {
    if (config_.rank == 0) warn("FSCCL_TAIL=bounded: " + reason + "; all_reduce is exact");
    return;
  }
  std::unique_ptr<datagram::Socket> socket;
  std::string address;
  try {
    socket = std::make_unique<datagram::Socket>(tcp_address_of(identity_.address));
    address = socket->address();
  } catch (const Error& e) {
    warn(e.what());
  }
  const size_t max_bytes = exchange_datagram_addresses(socket.get(), address, d);
  if (max_bytes == 0) return;
  const Key& rank0_key = identities_[0].key;
  const auto& secret = config_.settings.secret;
  const Key key = secret
                      ? derive_key(*secret, std::array<uint64_t, 3>{1, rank0_key.lo, rank0_key.hi})
                      : rank0_key;
  run_or_fail("connecting", 0, [&] {
    const auto check_failure = [this] {
      shm_->check_peers(-1, nullptr);
      transport_->raise_transport_error();
    };
    const auto warn_once = [this](const std::string& message) {
      if (config_.rank == 0) warn(message);
    };
    datagram::BoundedAllReduce::Context context{*transport_, *shm_,         *intra_node_, nodes_,
                                                key,         check_failure, warn_once};
    bounded_all_reduce_ = std::make_unique<datagram::BoundedAllReduce>(
        config_.settings.bounded, std::move(context), std::move(socket), max_bytes);
  });
  log_debug([&] {
    return "all_reduce of gradients by datagrams of " + std::to_string(max_bytes) + " bytes, " +
           nodes_.text();
  });
  bounded_all_reduce_open_ = true;
}

std::map<std::string, double> Group::bounded_statistics() const {
  if (!bounded_all_reduce_open_) return {};
  return bounded_all_reduce_->statistics();
}

std::vector<Transport::Traffic> Group::datagram_traffic() const {
  std::vector<Transport::Traffic> out(static_cast<size_t>(config_.size));
  if (!bounded_all_reduce_open_) return out;
  for (const auto& [rank, sent] : bounded_all_reduce_->sent())
    out[static_cast<size_t>(rank)] = sent;
  return out;
}

}  // namespace fsccl
