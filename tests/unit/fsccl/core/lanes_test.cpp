// Every interleaving of ranks in shared memory, within a bound. Usage:
//   lanes_test <steps, roots, wrap or rings> <ranks> <rounds> <preemptions>
// prints how many there were, "ok N".
//
// The protocol's own sources are compiled with a Word whose every access is a point at which
// another rank may go on. Ranks are fibers of one thread. All schedules are played, one after
// another, in which a rank that could go on is interrupted at most so many times (Musuvathi and
// Qadeer, "Iterative context bounding for systematic testing of multithreaded programs", 2007); one
// that waits or has ended gives way to any of the others, as often as it comes to that. Memory is
// sequentially consistent here: what weaker orders allow is for ThreadSanitizer. A futex sleeps until
// it is woken, with no limit: a wake-up that gets lost is a deadlock.
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define FSCCL_PLAYS_INTERLEAVINGS

namespace fsccl {

void give_way();

class Word {
 public:
  static constexpr bool is_always_lock_free = true;
  uint32_t load(std::memory_order = std::memory_order_seq_cst) const {
    give_way();
    return value_;
  }
  void store(uint32_t v, std::memory_order = std::memory_order_seq_cst) {
    give_way();
    value_ = v;
  }
  uint32_t fetch_add(uint32_t n, std::memory_order = std::memory_order_seq_cst) {
    give_way();
    return std::exchange(value_, value_ + n);
  }
  uint32_t fetch_sub(uint32_t n, std::memory_order = std::memory_order_seq_cst) {
    return fetch_add(0U - n);
  }
  bool compare_exchange_strong(uint32_t& expected, uint32_t v) {
    give_way();
    if (value_ != expected) {
      expected = value_;
      return false;
    }
    value_ = v;
    return true;
  }
  uint32_t now() const { return value_; }

 private:
  uint32_t value_;
};

}  // namespace fsccl

#include "channels.cpp"
#include "op_card.cpp"
#include "segment.cpp"
#include "shm_steps.cpp"
#include "types.cpp"

namespace {

using namespace fsccl;

[[noreturn]] void complain(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

// Plays all schedules of some fibers, by depth first: the choices of the last schedule are played
// again up to the last one that can be another.
class Player {
 public:
  explicit Player(int preemptions) : bound_(preemptions) {}

  using Program = std::function<void(int rank)>;

  // `begin` makes the ranks' world anew and says what each does; how many schedules there were.
  size_t play(int ranks, const std::function<Program()>& begin) {
    fibers_ = std::vector<Fiber>(static_cast<size_t>(ranks));
    size_t played = 0;
    do {
      one_schedule(begin);
      ++played;
    } while (next_schedule());
    return played;
  }

  // Of the fiber that runs: another one may go on here.
  void give_way() {
    if (current_ < 0) return;  // the world is being made
    Fiber& me = fibers_[static_cast<size_t>(current_)];
    swapcontext(&me.context, &main_);
  }
  // It cannot go on until `word` is woken.
  void sleep(const Word& word, uint32_t seen) {
    give_way();
    if (word.now() != seen) return;
    Fiber& me = fibers_[static_cast<size_t>(current_)];
    me.sleeps_on = &word;
    swapcontext(&me.context, &main_);
  }
  void wake(const Word& word) {
    give_way();
    for (Fiber& f : fibers_) {
      if (f.sleeps_on == &word) f.sleeps_on = nullptr;
    }
  }

 private:
  static constexpr size_t kStack = 256 << 10;
  struct Fiber {
    ucontext_t context{};
    std::vector<char> stack = std::vector<char>(kStack);
    const Word* sleeps_on = nullptr;
    bool over = false;
  };
  struct Choice {
    size_t taken, count;
  };

  void ready(Fiber* f) {
    f->sleeps_on = nullptr;
    f->over = false;
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack.data();
    f->context.uc_stack.ss_size = f->stack.size();
    f->context.uc_link = &main_;
    makecontext(&f->context, reinterpret_cast<void (*)()>(&Player::enter), 0);
  }
  void one_schedule(const std::function<Program()>& begin) {
    current_ = -1;
    program_ = begin();
    for (Fiber& f : fibers_) ready(&f);
    at_ = 0;
    left_ = bound_;
    int running = -1;
    for (;;) {
      const std::vector<int> able = who_can(running);
      if (able.empty()) break;
      const int next = able[choose(able.size())];
      if (running >= 0 && next != running && can(running)) --left_;
      running = current_ = next;
      playing = this;
      swapcontext(&main_, &fibers_[static_cast<size_t>(next)].context);
    }
    current_ = -1;
    for (size_t r = 0; r < fibers_.size(); ++r) {
      if (!fibers_[r].over) complain("rank " + std::to_string(r) + " sleeps for good");
    }
    program_ = nullptr;  // with the world
  }
  bool can(int rank) const {
    const Fiber& f = fibers_[static_cast<size_t>(rank)];
    return !f.over && f.sleeps_on == nullptr;
  }
  // First the one that runs, which alone can go on once it may be interrupted no more.
  std::vector<int> who_can(int running) const {
    std::vector<int> out;
    if (running >= 0 && can(running)) out.push_back(running);
    if (!out.empty() && left_ == 0) return out;
    for (int r = 0; r < static_cast<int>(fibers_.size()); ++r) {
      if (r != running && can(r)) out.push_back(r);
    }
    return out;
  }
  size_t choose(size_t count) {
    if (count == 1) return 0;
    if (at_ == choices_.size()) choices_.push_back({0, count});
    if (choices_[at_].count != count) complain("a schedule is not played as it was before");
    return choices_[at_++].taken;
  }
  bool next_schedule() {
    while (!choices_.empty() && choices_.back().taken + 1 == choices_.back().count) {
      choices_.pop_back();
    }
    if (choices_.empty()) return false;
    ++choices_.back().taken;
    return true;
  }
  static void enter() {
    Player& p = *playing;
    const int me = p.current_;
    try {
      p.program_(me);
    } catch (const Error& e) {
      complain(e.what());
    }
    p.fibers_[static_cast<size_t>(me)].over = true;
  }

  static Player* playing;
  const int bound_;
  int left_ = 0, current_ = -1;
  ucontext_t main_{};
  std::vector<Fiber> fibers_;
  std::vector<Choice> choices_;
  size_t at_ = 0;
  Program program_;
};

Player* Player::playing = nullptr;
Player* player = nullptr;

constexpr size_t kSlot = 64;

// The content of a slot. Others may come between its halves, of who writes as of who reads.
void write(std::byte* at, uint32_t value) {
  std::memcpy(at, &value, sizeof value);
  player->give_way();
  std::memcpy(at + kSlot / 2, &value, sizeof value);
}

void read(const std::byte* at, uint32_t expected, const char* what) {
  for (const size_t half : {size_t{0}, kSlot / 2}) {
    uint32_t found = 0;
    std::memcpy(&found, at + half, sizeof found);
    if (found != expected) {
      complain(std::string(what) + ": " + std::to_string(found) + " in place of " +
               std::to_string(expected));
    }
    player->give_way();
  }
}

uint32_t content(int rank, int round) { return static_cast<uint32_t>(1000 * (rank + 1) + round); }

// Ranks that share memory which is zero, as that of a new segment.
struct World {
  World(const Segment& memory, int ranks, uint32_t first_step) {
    std::memset(memory.data(), 0, memory.bytes());
    ShmConfig config;
    config.slot_bytes = kSlot;
    config.process = 1;
    config.first_step = first_step;
    for (int r = 0; r < ranks; ++r) {
      config.members.push_back(r);
      config.names.push_back("rank " + std::to_string(r));
    }
    for (int r = 0; r < ranks; ++r) shm.push_back(std::make_unique<ShmSteps>(memory, r, config));
  }
  std::vector<std::unique_ptr<ShmSteps>> shm;
};

OpCard card_of(int round) {
  OpCard card;
  card.op = OpCode::kBarrier;
  card.sequence = static_cast<uint64_t>(round) + 1;
  return card;
}

Deadline patience() { return Deadline::after(Deadline::Ms(600000)); }

// Everybody reads everybody's slot.
void steps(ShmSteps& shm, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    shm.begin(card_of(round), patience());
    write(shm.fill(), content(shm.rank(), round));
    shm.post();
    for (int k = 1; k < shm.size(); ++k) {
      const int peer = (shm.rank() + k) % shm.size();
      read(shm.await(peer), content(peer, round), "a step");
    }
    shm.end();
  }
}

// Everybody reads the slot of one, who reads none, and is another each time.
void roots(ShmSteps& shm, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int root = round % shm.size();
    shm.begin(card_of(round), patience());
    write(shm.fill(), content(shm.rank(), round));
    shm.post();
    if (shm.rank() != root) read(shm.await(root), content(root, round), "a root's step");
    shm.end();
  }
}

// Everybody sends to the next, as long as there is room, and takes from the one before.
void ring(ShmSteps& shm, Channels& channels, int rounds) {
  const int next = (shm.rank() + 1) % shm.size();
  const int before = (shm.rank() + shm.size() - 1) % shm.size();
  shm.begin(card_of(0), patience());
  for (int sent = 0, taken = 0; sent < rounds || taken < rounds;) {
    const uint32_t seen = channels.bell();
    bool moved = false;
    if (sent < rounds && !channels.full(0, next)) {
      write(channels.to_fill(0), content(shm.rank(), sent++));
      channels.post(0, next);
      moved = true;
    }
    if (taken < rounds && !channels.empty(0, before)) {
      read(channels.to_read(0, before), content(before, taken++), "a send");
      channels.take(0, before);
      moved = true;
    }
    if (!moved) channels.rest({taken < rounds ? before : next}, seen);
  }
  shm.end();
}

}  // namespace

void fsccl::give_way() { player->give_way(); }

void fsccl::futex_wait(const Word& word, uint32_t seen, std::chrono::milliseconds) {
  player->sleep(word, seen);
}

void fsccl::futex_wake_all(const Word& word) { player->wake(word); }

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const std::string what = argv[1];
  const int ranks = std::atoi(argv[2]), rounds = std::atoi(argv[3]);
  Player all(std::atoi(argv[4]));
  player = &all;
  const uint32_t first_step = what == "wrap" ? 0xFFFFFFFE : 0;
  const size_t bytes = ShmSteps::segment_bytes(ranks, kSlot);
  const Segment memory = Segment::create(bytes, bytes, "");
  std::shared_ptr<Segment> rings;  // one for all schedules
  const size_t played = all.play(ranks, [&]() -> Player::Program {
    const auto world = std::make_shared<World>(memory, ranks, first_step);
    if (what != "rings") {
      return [=](int rank) {
        ShmSteps& shm = *world->shm[static_cast<size_t>(rank)];
        what == "roots" ? roots(shm, rounds) : steps(shm, rounds);
      };
    }
    auto channels = std::make_shared<std::vector<std::unique_ptr<Channels>>>();
    const auto make = [&rings](size_t size, size_t first, int) {
      if (!rings) rings = std::make_shared<Segment>(Segment::create(size, first, ""));
      return *rings;
    };
    if (rings) std::memset(rings->data(), 0, rings->bytes());
    for (const auto& shm : world->shm) {
      channels->push_back(std::make_unique<Channels>(*shm, 1, make));
      channels->back()->prepare(kSlot);
    }
    return [=](int rank) {
      const auto r = static_cast<size_t>(rank);
      ring(*world->shm[r], *(*channels)[r], rounds);
    };
  });
  std::printf("ok %zu\n", played);
  return 0;
}
