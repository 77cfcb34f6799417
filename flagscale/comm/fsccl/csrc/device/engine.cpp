// How an engine comes together, fails and ends. Its operations are in dense.cpp, spread.cpp and
// pairs.cpp.
#include "engine.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <thread>

#include "operation.h"

namespace fsccl {
namespace {

constexpr std::chrono::seconds kGoodbye(5);

bool consecutive(const std::vector<at::Tensor>& list) {
  const auto* next = static_cast<const std::byte*>(list[0].const_data_ptr());
  for (const at::Tensor& t : list) {
    if (t.const_data_ptr() != next) return false;
    next += t.nbytes();
  }
  return true;
}

template <class Condition>
bool wait_until(Condition&& met, std::chrono::milliseconds limit) {
  const Deadline d = Deadline::after(limit);
  while (!met()) {
    if (d.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

Engine::Engine(std::shared_ptr<Group> group, const MakeTracks& tracks, const MakeNative& native,
               const Deadline& d)
    : group_(std::move(group)),
      config_(group_->config().settings),
      rank_(group_->rank()),
      deadline_(d) {
  who_ = group_->everyone(d);
  clusters_ =
      form_native_clusters(rank_, who_, group_->config().global_ranks, group_->config().settings);
  for (const Identity& who : who_) enqueued_ = enqueued_ && who.native.device != "cpu";
  tracks_ = tracks([this](int peer) { look_for(peer); });
  arena_ = std::make_unique<Arena>(tracks_->device());
  open_board(d);
  if (!one_host()) group_->keep_in_touch(d);  // the board does not tell everyone
  open_kernels(d);
  courier_ = std::make_unique<Courier>(*group_, [this](const Error& e) {
    std::lock_guard<std::mutex> hold(trouble_mutex_);
    if (!trouble_) trouble_ = std::make_unique<Error>(e);
  });
  const int size = static_cast<int>(clusters_.own().size());
  std::string who = who_[static_cast<size_t>(rank_)].native.library + " in the cluster of rank";
  for (int i = 0; i < size; ++i) {
    const int r = rank_of(clusters_.mine, static_cast<size_t>(i));
    who += (i == 0 ? "s " : ", ") +
           std::to_string(group_->config().global_ranks[static_cast<size_t>(r)]);
  }
  Mates::Hooks hooks;
  hooks.note = [this](bool begins) { board_->note(begins ? Board::kInNative : Board::kNobody); };
  if (who_[static_cast<size_t>(rank_)].native.library == "gloo") hooks.look = [this] { look(); };
  mates_ = std::make_unique<Mates>(
      size > 1 ? native(clusters_.mine, clusters_.index, clusters_.own()) : nullptr, size,
      clusters_.index, who, std::move(hooks));
}

Engine::~Engine() { shutdown(); }

bool Engine::near(int rank) const {
  return rank == rank_ ||
         (group_->config().settings.shared_memory &&
          who_[static_cast<size_t>(rank)].domain == who_[static_cast<size_t>(rank_)].domain);
}

void Engine::open_board(const Deadline& d) {
  std::vector<int> members;
  std::vector<std::string> names;
  for (int r = 0; r < group_->size(); ++r) {
    if (near(r)) members.push_back(r);
    names.push_back(group_->name(r));
  }
  const size_t area = (config_.tiny_bytes + kCacheLine) * members.size();
  const size_t bytes = Board::segment_bytes(static_cast<int>(members.size()), area);
  Segment segment = group_->shared_segment("board", members, bytes, bytes, d);
  board_ = std::make_unique<Board>(std::move(segment), rank_, std::move(members), clusters_.ranks,
                                   std::move(names), area);
  board_memory_ = tracks_->adopt(board_->memory(), board_->bytes());
}

// Every rank comes to the same answer, which follows from what all of them tell.
void Engine::open_kernels(const Deadline& d) {
  const int size = group_->size();
  if (!bridged() || !one_host() || size < 2 || size > nvlink::kMaxRanks) return;
  if (config_.kernel_bytes == 0) return;
  for (const Identity& who : who_) {
    if (who.native.library.find("+nvlink") == std::string::npos) return;
  }
  const std::string key = "kernels/", none = "none";
  nvlink::Engine* engine = nullptr;
  try {
    engine = nvlink::Engine::of(tracks_->device().index());
  } catch (const std::exception& e) {  // pipes and the board do without
    group_->say([&] { return std::string("no kernels for host memory: ") + e.what(); });
  }
  group_->tell(key + std::to_string(rank_), engine != nullptr ? engine->identity() : none);
  std::set<std::string> gpus;
  for (int p = 0; p < size; ++p) gpus.insert(group_->learn(key + std::to_string(p), p, d));
  if (gpus.count(none) > 0 || gpus.size() != static_cast<size_t>(size)) return;
  const size_t bytes = HostKernels::bytes(size);
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  Segment segment = group_->shared_segment("host-kernels", all, bytes, bytes, d);
  kernels_ = std::make_unique<HostKernels>(*engine, rank_, size, std::move(segment), *tracks_);
}

// Of equal parts. Whether they lie one after the other, as the kernels want them, is this rank's
// own affair, so it decides nothing but whether they are copied.
bool Engine::by_kernel(nvlink::Collective what, const Tensors& in, const Tensors& out,
                       const Reduction& r, const OpCard& card, int root) {
  if (!kernels_ || r.op == RedOp::kPremulSum) return false;
  const size_t part = std::min(in[0].nbytes(), out[0].nbytes());
  for (const Tensors* list : {&in, &out}) {
    for (const at::Tensor& t : *list) {
      if (t.nbytes() != part) return false;
    }
  }
  nvlink::Call call;
  call.collective = what;
  call.bytes = part;
  call.reduction = r;
  call.root = root;
  if (HostKernels::written(call, static_cast<size_t>(group_->size())) > config_.kernel_bytes ||
      !kernels_->takes(call)) {
    return false;
  }
  const bool scattered = !consecutive(out);
  const at::Tensor from = consecutive(in) ? in[0] : at::cat(in);
  const auto total = static_cast<int64_t>(part * out.size());
  const at::Tensor to = scattered ? arena_->take(total, at::kByte) : out[0];
  call.in = from.const_data_ptr();
  call.out = to.data_ptr();
  call.stream = tracks_->stream(Track::kNative)->native_handle();
  const std::chrono::nanoseconds limit = deadline_.limit();
  call.timeout_ns = static_cast<nvlink::u64>(limit.count());
  kernels_->run(call);
  for (size_t i = 0; scattered && i < out.size(); ++i) {
    bytes_of(out[i]).copy_(slice(to, i * part, part));
  }
  log(card, "slots in host memory");
  return true;
}

Pipe& Engine::to(int peer) {
  const auto found = out_.find(peer);
  if (found != out_.end()) return found->second;
  const size_t bytes = Ring::bytes(config_.pipe_bytes);
  std::vector<int> ends{rank_};
  if (near(peer)) ends.push_back(peer);
  Segment segment =
      group_->shared_segment("pipe/" + std::to_string(peer), ends, bytes, bytes, deadline_);
  auto ring = std::make_shared<Ring>(std::move(segment), config_.pipe_bytes, *tracks_);
  Pipe pipe(peer, group_->name(peer), std::move(ring), near(peer) ? nullptr : courier_.get());
  return out_.emplace(peer, std::move(pipe)).first->second;
}

Pipe& Engine::from(int peer) {
  const auto found = in_.find(peer);
  if (found != in_.end()) return found->second;
  const size_t bytes = Ring::bytes(config_.pipe_bytes);
  std::vector<int> ends{rank_};
  if (near(peer)) ends.insert(ends.begin(), peer);
  Segment segment =
      group_->shared_segment("pipe/" + std::to_string(rank_), ends, bytes, bytes, deadline_);
  auto ring = std::make_shared<Ring>(std::move(segment), config_.pipe_bytes, *tracks_);
  ring->opened().store(1, std::memory_order_release);
  Pipe pipe(peer, group_->name(peer), std::move(ring), near(peer) ? nullptr : courier_.get());
  return in_.emplace(peer, std::move(pipe)).first->second;
}

void Engine::look() const {
  board_->look();
  group_->check();
  check_kernels();
  std::lock_guard<std::mutex> hold(trouble_mutex_);
  if (trouble_) throw Error(*trouble_);
}

// Ranks that wait for one of another host, of whose neighbours they cannot see, give that host's
// ranks time to tell who is at fault: as the core does.
void Engine::look_for(int peer) {
  board_->note(peer < 0 ? Board::kNobody : peer);
  if (peer < 0) return;
  look();
  if (!deadline_.passed()) return;
  const int at = board_->culprit(peer);
  const auto margin = std::min(Deadline::Ms(500), deadline_.limit() / 5);
  if (!board_->has(at) && !deadline_.earlier(-margin).passed()) return;
  throw Error(Fault::kTimeout, at, group_->name(at) + " did not come within " + deadline_.text());
}

// A native library does not say whose fault it is that it failed; the ranks of this host often do.
Error Engine::explain(const Error& e) {
  if (e.fault != Fault::kSystem || e.rank >= 0) return e;
  const std::string by_library = std::string(" (") + e.what() + ")";
  std::unique_ptr<Error> told;
  const auto someone_tells = [&] {
    try {
      look();
    } catch (const Error& found) {
      told = std::make_unique<Error>(found.fault, found.rank, found.what() + by_library);
    }
    return told != nullptr;
  };
  if (wait_until(someone_tells, std::chrono::milliseconds(500))) return *told;
  const int at = board_->culprit(rank_);
  if (at == rank_ || !deadline_.passed()) return e;
  return Error(Fault::kTimeout, at,
               group_->name(at) + " did not come within " + deadline_.text() + by_library);
}

void Engine::barrier(const Deadline& d) {
  operation(dense_card(OpCode::kBarrier, 0, nullptr, -1), d,
            [&](const OpCard&) { group_->barrier(d); });
}

void Engine::abort() {
  mates_->abort();
  if (kernels_) kernels_->abort();
}

void Engine::fail(const char* what, uint64_t sequence, const Error& why) {
  Error reason = explain(why);
  if (reason.rank < 0) {
    const std::string text = std::string(reason.what()) + " (told by " + group_->name(rank_) + ")";
    reason = Error(reason.fault, -1, text);
  }
  reason = board_->abort(reason);
  abort();
  group_->fail(what, sequence, reason);
}

// A rank that goes leaves nothing that others have yet to open, or to be sent.
void Engine::shutdown() {
  if (left_) return;
  left_ = true;
  const auto fine = [this] {
    try {
      board_->look();
      return !group_->failure();
    } catch (const Error&) {
      return false;
    }
  };
  if (fine()) {
    courier_->flush(kGoodbye);
    const auto opened = [this, &fine] {
      for (const auto& [peer, pipe] : out_) {
        if (pipe.shared() && pipe.ring().opened().load(std::memory_order_acquire) == 0) {
          return !fine();
        }
      }
      return board_->complete() || !fine();
    };
    wait_until(opened, kGoodbye);
  }
  courier_.reset();
  board_->leave();
  mates_->shutdown();
}

void Engine::log(const OpCard& card, const char* algorithm) const {
  group_->took(algorithm);
  group_->say([&] {
    return card.text() + ": " + algorithm + ", " + clusters_.text() + " by native library (" +
           who_[static_cast<size_t>(rank_)].native.library + " here)";
  });
}

bool Engine::one_host() const {
  return board_->members().size() == static_cast<size_t>(group_->size());
}

bool Engine::tiny(size_t bytes) const { return bytes <= config_.tiny_bytes && one_host(); }

int Engine::cluster_of(int rank) const {
  for (int c = 0; c < clusters_.count(); ++c) {
    const auto& members = clusters_.ranks[static_cast<size_t>(c)];
    if (std::find(members.begin(), members.end(), rank) != members.end()) return c;
  }
  return -1;
}

size_t Engine::smallest_cluster() const {
  size_t least = clusters_.own().size();
  for (const auto& c : clusters_.ranks) least = std::min(least, c.size());
  return least;
}

// Many steps keep all tracks busy. But a host takes some 150 us to enqueue one, in which 6 MiB
// cross a GPU's bus; less crosses a network.
size_t Engine::chunk_of(size_t count, size_t width, size_t parts) const {
  if (!bridged()) return count;
  size_t steps = 8, least = 256 << 10;
  if (enqueued_) {
    steps = one_host() ? 2 : 4;
    least = one_host() ? 2 << 20 : 1 << 20;
  }
  const size_t most = config_.pipe_bytes / width;
  const size_t wanted = std::max(ceil_div(count, steps * parts), least / width);
  return std::min(wanted, most) * parts;
}

at::Tensor Engine::memory(const void* data, size_t count, at::ScalarType type) const {
  const auto options = at::TensorOptions(type).device(tracks_->device());
  if (count == 0) return at::empty({0}, options);
  return at::for_blob(const_cast<void*>(data), {static_cast<int64_t>(count)})
      .options(options)
      .target_device(tracks_->device())
      .make_tensor();
}

Engine::Tensors Engine::memories(const BufferLists& list, at::ScalarType type) const {
  const size_t width = at::elementSize(type);
  Tensors out;
  for (const BufferList& p : list) {
    const void* data = p.bytes() > 0 ? p.list()[0].data : nullptr;
    out.push_back(memory(data, p.bytes() / width, type));
  }
  return out;
}

}  // namespace fsccl
