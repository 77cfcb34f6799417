#include "local.h"

#include <algorithm>
#include <cstring>

namespace fsccl {
namespace {

// The part of [range.lo, range.hi) that step `k` moves when steps move `step` bytes.
Interval window(Interval range, size_t k, size_t step) {
  const size_t lo = std::min(range.lo + k * step, range.hi);
  return {lo, std::min(lo + step, range.hi)};
}

size_t longest_of(const std::vector<Interval>& bounds) {
  size_t most = 0;
  for (const Interval& b : bounds) most = std::max(most, b.size());
  return most;
}

// A slot divided among n ranks, in whole cache lines, so that every element type fits.
size_t share_of(size_t capacity, int n) {
  return capacity / static_cast<size_t>(n) / kCacheLine * kCacheLine;
}

}  // namespace

void Local::barrier() {
  shm_.fill();
  shm_.post();
  shm_.await_all();
}

// Step k: publishes chunk k of the input; reads everyone's and reduces, in rank order.
void Local::all_reduce_one_shot(const void* in, void* out, size_t count, const Reduction& r) {
  const size_t width = r.width(), per_step = shm_.capacity() / width;
  std::vector<const void*> sources(static_cast<size_t>(size()));
  for (size_t at = 0; at < count; at += per_step) {
    const size_t n = std::min(per_step, count - at);
    const auto* mine = static_cast<const std::byte*>(in) + at * width;
    if (size() > 1) {
      std::memcpy(shm_.fill(), mine, n * width);
      shm_.post();
    }
    for (int p = 0; p < size(); ++p) {
      sources[static_cast<size_t>(p)] = p == rank() ? mine : shm_.await(p);
    }
    fsccl::reduce(r, static_cast<std::byte*>(out) + at * width, sources.data(), size(), n);
  }
}

// A chunk is cut in one share a rank. Step k publishes, for every other rank, its share of chunk k
// of the input, and this rank's reduced share of chunk k-1; it reads the inputs of its own share of
// chunk k, reduces them, and copies everyone's reduced shares of chunk k-1: one step a chunk.
// Slot: [share of rank 0 | ... | share of rank n-1], where the own place holds the reduced share.
// With a root (>= 0) only the root copies, and the others never touch `out`.
void Local::two_shot(const void* in, void* out, size_t count, const Reduction& r, int root) {
  const size_t total = count * r.width(), n = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  const bool keeps = root < 0 || root == rank();
  const size_t share = share_of(shm_.capacity(), size()), chunk = share * n;
  const size_t chunks = ceil_div(total, chunk);
  // The last chunk is smaller: cut it evenly too, or one rank would do its work alone.
  const auto part = [&](size_t k, size_t p) {
    const size_t base = k * chunk;
    const Interval c = cut(std::min(chunk, total - base), n, p, kCacheLine);
    return Interval{base + c.lo, base + c.hi};
  };
  const auto* from = static_cast<const std::byte*>(in);
  auto* to = static_cast<std::byte*>(out);
  std::vector<std::byte> scratch(keeps ? 0 : share);
  const auto reduced = [&](const Interval& i) { return keeps ? to + i.lo : scratch.data(); };
  std::vector<const void*> sources(n);
  for (size_t k = 0; k <= chunks; ++k) {
    std::byte* slot = shm_.fill();
    for (size_t p = 0; p < n && k < chunks; ++p) {
      const Interval i = part(k, p);
      if (p != me) std::memcpy(slot + p * share, from + i.lo, i.size());
    }
    if (k > 0) {
      const Interval done = part(k - 1, me);
      std::memcpy(slot + me * share, reduced(done), done.size());
    }
    shm_.post();
    for (size_t d = 1; d < n; ++d) {
      const size_t p = (me + d) % n;
      const std::byte* theirs = shm_.await(static_cast<int>(p));
      sources[p] = theirs + me * share;
      if (k == 0 || !keeps) continue;
      const Interval done = part(k - 1, p);
      std::memcpy(to + done.lo, theirs + p * share, done.size());
    }
    if (k == chunks) break;
    const Interval mine = part(k, me);
    sources[me] = from + mine.lo;
    fsccl::reduce(r, reduced(mine), sources.data(), size(), mine.size() / r.width());
  }
}

void Local::all_reduce_two_shot(const void* in, void* out, size_t count, const Reduction& r) {
  if (size() == 1) return all_reduce_one_shot(in, out, count, r);
  two_shot(in, out, count, r, -1);
}

void Local::reduce(const void* in, void* out, size_t count, const Reduction& r, int root) {
  if (size() == 1) return all_reduce_one_shot(in, out, count, r);
  two_shot(in, out, count, r, root);
}

// Step k: publishes, for every other rank, window k of its interval; reads the own share of all.
void Local::reduce_scatter(const BufferList& in, const std::vector<Interval>& bounds,
                           const BufferList& out, const Reduction& r) {
  const size_t n = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  const size_t share = share_of(shm_.capacity(), size());
  const size_t steps = ceil_div(longest_of(bounds), share);
  std::vector<const void*> sources(n);
  std::vector<std::byte> gathered;  // the own input, where it does not lie in one run
  std::vector<std::byte> result;    // likewise the output
  for (size_t k = 0; k < steps; ++k) {
    const Interval mine = window(bounds[me], k, share);
    if (n > 1) {
      std::byte* slot = shm_.fill();
      for (size_t p = 0; p < n; ++p) {
        if (p != me) in.copy_to(slot + p * share, window(bounds[p], k, share));
      }
      shm_.post();
    }
    sources[me] = in.contiguous(mine);
    if (sources[me] == nullptr) {
      gathered.resize(share);
      in.copy_to(gathered.data(), mine);
      sources[me] = gathered.data();
    }
    for (size_t d = 1; d < n; ++d) {
      const size_t p = (me + d) % n;
      sources[p] = shm_.await(static_cast<int>(p)) + me * share;
    }
    if (mine.empty()) continue;
    const Interval place{mine.lo - bounds[me].lo, mine.hi - bounds[me].lo};
    void* target = out.contiguous(place);
    if (target == nullptr) {
      result.resize(share);
      target = result.data();
    }
    fsccl::reduce(r, target, sources.data(), size(), mine.size() / r.width());
    if (target == result.data()) out.copy_from(target, place);
  }
}

// Step k: publishes window k of the own interval; copies everyone's.
void Local::all_gather(const BufferList& buffer, const std::vector<Interval>& bounds) {
  if (size() == 1) return;
  const size_t steps = ceil_div(longest_of(bounds), shm_.capacity());
  for (size_t k = 0; k < steps; ++k) {
    const auto me = static_cast<size_t>(rank());
    buffer.copy_to(shm_.fill(), window(bounds[me], k, shm_.capacity()));
    shm_.post();
    for (size_t d = 1; d < bounds.size(); ++d) {
      const size_t p = (me + d) % bounds.size();
      const std::byte* theirs = shm_.await(static_cast<int>(p));
      buffer.copy_from(theirs, window(bounds[p], k, shm_.capacity()));
    }
  }
}

// Step k: the root publishes chunk k, one step ahead of the readers.
void Local::broadcast(const BufferList& buffer, int root) {
  if (size() == 1) return;
  const Interval all{0, buffer.bytes()};
  const size_t steps = ceil_div(buffer.bytes(), shm_.capacity());
  for (size_t k = 0; k < steps; ++k) {
    const Interval now = window(all, k, shm_.capacity());
    std::byte* slot = shm_.fill();
    if (rank() == root) buffer.copy_to(slot, now);
    shm_.post();
    if (rank() != root) buffer.copy_from(shm_.await(root), now);
  }
}

// Step k: publishes window k of every message; reads the own share of everyone's slot.
void Local::all_to_all(const BufferLists& send, const BufferLists& recv, size_t longest) {
  const size_t n = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  send[me].visit({0, send[me].bytes()}, [&](const std::byte* p, size_t bytes, size_t off) {
    recv[me].copy_from(p, {off, off + bytes});
  });
  if (n == 1) return;
  const size_t share = share_of(shm_.capacity(), size());
  for (size_t k = 0; k < ceil_div(longest, share); ++k) {
    std::byte* slot = shm_.fill();
    for (size_t p = 0; p < n; ++p) {
      if (p != me) send[p].copy_to(slot + p * share, window({0, send[p].bytes()}, k, share));
    }
    shm_.post();
    for (size_t d = 1; d < n; ++d) {
      const size_t p = (me + d) % n;
      const std::byte* theirs = shm_.await(static_cast<int>(p));
      recv[p].copy_from(theirs + me * share, window({0, recv[p].bytes()}, k, share));
    }
  }
}

// One step: publishes the sizes this rank sends; reads everyone's. The own part is looked at after
// that: mates get their step, and learn why there is no other.
size_t Local::agree_on_sizes(const BufferLists& send, const BufferLists& recv) {
  const auto n = static_cast<size_t>(size());
  std::vector<uint64_t> sizes(n);
  for (size_t p = 0; p < n; ++p) sizes[p] = send[p].bytes();
  size_t longest = *std::max_element(sizes.begin(), sizes.end());
  if (n > 1) {
    if (n * sizeof(uint64_t) > shm_.capacity()) fail_usage("too many ranks for one slot");
    std::memcpy(shm_.fill(), sizes.data(), n * sizeof(uint64_t));
    shm_.post();
  }
  expect_sent(rank(), send[static_cast<size_t>(rank())].bytes(), recv);
  for (size_t d = 1; d < n; ++d) {
    const int p = (rank() + static_cast<int>(d)) % size();
    std::memcpy(sizes.data(), shm_.await(p), n * sizeof(uint64_t));
    longest = std::max<size_t>(longest, *std::max_element(sizes.begin(), sizes.end()));
    expect_sent(p, sizes[static_cast<size_t>(rank())], recv);
  }
  return longest;
}

void Local::expect_sent(int from, uint64_t sent, const BufferLists& recv) const {
  const size_t expected = recv[static_cast<size_t>(from)].bytes();
  if (sent == expected) return;
  std::string words = other_size(shm_.name_of(from), sent, shm_.name_of(rank()), expected);
  if (from == rank()) {
    words = shm_.name_of(from) + " sends itself " + std::to_string(sent) + " bytes and expects " +
            std::to_string(expected);
  }
  throw Error(Fault::kMismatch, shm_.member(from), words);
}

}  // namespace fsccl
