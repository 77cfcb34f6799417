#include "intra_node.h"

#include <algorithm>
#include <cstring>

namespace fsccl {
namespace {

// Returns the part of `range` that is exchanged in step k, with `step_bytes` bytes per step.
Interval window(Interval range, size_t k, size_t step_bytes) {
  const size_t lo = std::min(range.lo + k * step_bytes, range.hi);
  return {lo, std::min(lo + step_bytes, range.hi)};
}

size_t max_size(const std::vector<Interval>& bounds) {
  size_t max = 0;
  for (const Interval& b : bounds) max = std::max(max, b.size());
  return max;
}

// Divides a slot among n ranks, in whole cache lines, so that elements of every type fit.
size_t share_bytes(size_t capacity, int n) {
  return capacity / static_cast<size_t>(n) / kCacheLine * kCacheLine;
}

}  // namespace

void IntraNodeCollectives::barrier() {
  shm_.acquire_slot();
  shm_.post();
  shm_.wait_for_all_peers();
}

// Step k: publish chunk k of the input; read all of them and reduce in rank order.
void IntraNodeCollectives::all_reduce_one_shot(const void* in, void* out, size_t count,
                                               const Reduction& r) {
  const size_t width = r.width(), per_step = shm_.capacity() / width;
  std::vector<const void*> sources(static_cast<size_t>(size()));
  for (size_t at = 0; at < count; at += per_step) {
    const size_t n = std::min(per_step, count - at);
    const auto* own_input = static_cast<const std::byte*>(in) + at * width;
    if (size() > 1) {
      std::memcpy(shm_.acquire_slot(), own_input, n * width);
      shm_.post();
    }
    for (int p = 0; p < size(); ++p) {
      sources[static_cast<size_t>(p)] = p == rank() ? own_input : shm_.wait_for_peer(p);
    }
    fsccl::reduce(r, static_cast<std::byte*>(out) + at * width, sources.data(), size(), n);
  }
}

// A chunk is cut into one share per rank. In step k a rank
//
//   - publishes the shares of the other ranks in chunk k of its input, and its own reduced share of
//     chunk k-1;
//   - reads the inputs of its own share of chunk k and reduces them;
//   - copies the reduced shares of all ranks of chunk k-1.
//
// So there is one step per chunk. A slot holds [share of rank 0 | ... | share of rank n-1], where
// this rank's own share is the reduced one. With a root (>= 0), only the root copies, and the other
// ranks never access `out`.
void IntraNodeCollectives::two_shot(const void* in, void* out, size_t count, const Reduction& r,
                                    int root) {
  const size_t total = count * r.width(), n = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  const bool has_output = root < 0 || root == rank();
  const size_t share = share_bytes(shm_.capacity(), size()), chunk = share * n;
  const size_t chunks = ceil_div(total, chunk);
  // The last chunk is smaller. It is cut evenly as well, or one rank would do all its work.
  const auto share_range = [&](size_t k, size_t p) {
    const size_t base = k * chunk;
    const Interval c = cut(std::min(chunk, total - base), n, p, kCacheLine);
    return Interval{base + c.lo, base + c.hi};
  };
  const auto* input = static_cast<const std::byte*>(in);
  auto* output = static_cast<std::byte*>(out);
  std::vector<std::byte> scratch(has_output ? 0 : share);
  const auto reduced = [&](const Interval& i) {
    return has_output ? output + i.lo : scratch.data();
  };
  std::vector<const void*> sources(n);
  for (size_t k = 0; k <= chunks; ++k) {
    std::byte* slot = shm_.acquire_slot();
    for (size_t p = 0; p < n && k < chunks; ++p) {
      const Interval i = share_range(k, p);
      if (p != me) std::memcpy(slot + p * share, input + i.lo, i.size());
    }
    if (k > 0) {
      const Interval reduced_part = share_range(k - 1, me);
      std::memcpy(slot + me * share, reduced(reduced_part), reduced_part.size());
    }
    shm_.post();
    for (size_t d = 1; d < n; ++d) {
      const size_t p = (me + d) % n;
      const std::byte* peer_slot = shm_.wait_for_peer(static_cast<int>(p));
      sources[p] = peer_slot + me * share;
      if (k == 0 || !has_output) continue;
      const Interval reduced_part = share_range(k - 1, p);
      std::memcpy(output + reduced_part.lo, peer_slot + p * share, reduced_part.size());
    }
    if (k == chunks) break;
    const Interval own_range = share_range(k, me);
    sources[me] = input + own_range.lo;
    fsccl::reduce(r, reduced(own_range), sources.data(), size(), own_range.size() / r.width());
  }
}

void IntraNodeCollectives::all_reduce_two_shot(const void* in, void* out, size_t count,
                                               const Reduction& r) {
  if (size() == 1) return all_reduce_one_shot(in, out, count, r);
  two_shot(in, out, count, r, -1);
}

void IntraNodeCollectives::reduce(const void* in, void* out, size_t count, const Reduction& r,
                                  int root) {
  if (size() == 1) return all_reduce_one_shot(in, out, count, r);
  two_shot(in, out, count, r, root);
}

// Step k: publish window k of the interval of every other rank; read the own interval from all
// slots.
void IntraNodeCollectives::reduce_scatter(const BufferList& in, const std::vector<Interval>& bounds,
                                          const BufferList& out, const Reduction& r) {
  const size_t n = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  const size_t share = share_bytes(shm_.capacity(), size());
  const size_t steps = ceil_div(max_size(bounds), share);
  std::vector<const void*> sources(n);
  std::vector<std::byte> input_copy;   // of this rank's input, if it is not contiguous
  std::vector<std::byte> output_copy;  // of its output, if that is not contiguous
  for (size_t k = 0; k < steps; ++k) {
    const Interval own_range = window(bounds[me], k, share);
    if (n > 1) {
      std::byte* slot = shm_.acquire_slot();
      for (size_t p = 0; p < n; ++p) {
        if (p != me) in.copy_to(slot + p * share, window(bounds[p], k, share));
      }
      shm_.post();
    }
    sources[me] = in.contiguous(own_range);
    if (sources[me] == nullptr) {
      input_copy.resize(share);
      in.copy_to(input_copy.data(), own_range);
      sources[me] = input_copy.data();
    }
    for (size_t d = 1; d < n; ++d) {
      const size_t p = (me + d) % n;
      sources[p] = shm_.wait_for_peer(static_cast<int>(p)) + me * share;
    }
    if (own_range.empty()) continue;
    const Interval out_range{own_range.lo - bounds[me].lo, own_range.hi - bounds[me].lo};
    void* target = out.contiguous(out_range);
    if (target == nullptr) {
      output_copy.resize(share);
      target = output_copy.data();
    }
    fsccl::reduce(r, target, sources.data(), size(), own_range.size() / r.width());
    if (target == output_copy.data()) out.copy_from(target, out_range);
  }
}

// Step k: publish window k of the own interval; copy that of all ranks.
void IntraNodeCollectives::all_gather(const BufferList& buffer,
                                      const std::vector<Interval>& bounds) {
  if (size() == 1) return;
  const size_t steps = ceil_div(max_size(bounds), shm_.capacity());
  for (size_t k = 0; k < steps; ++k) {
    const auto me = static_cast<size_t>(rank());
    buffer.copy_to(shm_.acquire_slot(), window(bounds[me], k, shm_.capacity()));
    shm_.post();
    for (size_t d = 1; d < bounds.size(); ++d) {
      const size_t p = (me + d) % bounds.size();
      const std::byte* peer_slot = shm_.wait_for_peer(static_cast<int>(p));
      buffer.copy_from(peer_slot, window(bounds[p], k, shm_.capacity()));
    }
  }
}

// Step k: the root publishes chunk k, one step ahead of the readers.
void IntraNodeCollectives::broadcast(const BufferList& buffer, int root) {
  if (size() == 1) return;
  const Interval all{0, buffer.bytes()};
  const size_t steps = ceil_div(buffer.bytes(), shm_.capacity());
  for (size_t k = 0; k < steps; ++k) {
    const Interval range = window(all, k, shm_.capacity());
    std::byte* slot = shm_.acquire_slot();
    if (rank() == root) buffer.copy_to(slot, range);
    shm_.post();
    if (rank() != root) buffer.copy_from(shm_.wait_for_peer(root), range);
  }
}

// Step k: publish window k of every message; read the own share of all slots.
void IntraNodeCollectives::all_to_all(const BufferLists& send, const BufferLists& recv,
                                      size_t longest_bytes) {
  const size_t n = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  send[me].visit({0, send[me].bytes()}, [&](const std::byte* p, size_t bytes, size_t off) {
    recv[me].copy_from(p, {off, off + bytes});
  });
  if (n == 1) return;
  const size_t share = share_bytes(shm_.capacity(), size());
  for (size_t k = 0; k < ceil_div(longest_bytes, share); ++k) {
    std::byte* slot = shm_.acquire_slot();
    for (size_t p = 0; p < n; ++p) {
      if (p != me) send[p].copy_to(slot + p * share, window({0, send[p].bytes()}, k, share));
    }
    shm_.post();
    for (size_t d = 1; d < n; ++d) {
      const size_t p = (me + d) % n;
      const std::byte* peer_slot = shm_.wait_for_peer(static_cast<int>(p));
      recv[p].copy_from(peer_slot + me * share, window({0, recv[p].bytes()}, k, share));
    }
  }
}

// A single step: publish the sizes that this rank sends; read those of all ranks. This rank's
// message to itself is checked after that, so that its peers complete this step and get the error
// in the next one.
size_t IntraNodeCollectives::exchange_sizes(const BufferLists& send, const BufferLists& recv) {
  const auto n = static_cast<size_t>(size());
  std::vector<uint64_t> sizes(n);
  for (size_t p = 0; p < n; ++p) sizes[p] = send[p].bytes();
  size_t longest = *std::max_element(sizes.begin(), sizes.end());
  if (n > 1) {
    if (n * sizeof(uint64_t) > shm_.capacity()) fail_usage("too many ranks for one slot");
    std::memcpy(shm_.acquire_slot(), sizes.data(), n * sizeof(uint64_t));
    shm_.post();
  }
  check_sent_size(rank(), send[static_cast<size_t>(rank())].bytes(), recv);
  for (size_t d = 1; d < n; ++d) {
    const int p = (rank() + static_cast<int>(d)) % size();
    std::memcpy(sizes.data(), shm_.wait_for_peer(p), n * sizeof(uint64_t));
    longest = std::max<size_t>(longest, *std::max_element(sizes.begin(), sizes.end()));
    check_sent_size(p, sizes[static_cast<size_t>(rank())], recv);
  }
  return longest;
}

void IntraNodeCollectives::check_sent_size(int from, uint64_t sent, const BufferLists& recv) const {
  const size_t expected = recv[static_cast<size_t>(from)].bytes();
  if (sent == expected) return;
  std::string message =
      size_mismatch_text(shm_.name_of(from), sent, shm_.name_of(rank()), expected);
  if (from == rank()) {
    message = shm_.name_of(from) + " sends itself " + std::to_string(sent) + " bytes and expects " +
              std::to_string(expected);
  }
  throw Error(Fault::kMismatch, shm_.group_rank_of(from), message);
}

}  // namespace fsccl
