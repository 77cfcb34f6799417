#!/usr/bin/env python3
"""Faults put into fsccl's core one at a time, to see whether its tests notice.

    tools/dev/mutants.py                # all of them, a minute each
    tools/dev/mutants.py wake stripe    # those whose names hold one of the words

Each mutant is one line of ``csrc/core`` changed in a copy; the programs of tests/unit/fsccl/core
that it names are compiled with it and run until one of them fails. A mutant that passes all of them
is alive: write the test that kills it. By hand, and not in CI.

Exits with 4 when one is alive.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
CORE = PROJECT / "flagscale" / "comm" / "fsccl" / "csrc" / "core"
TESTS = PROJECT / "tests" / "unit" / "fsccl" / "core"
CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""Which the compiler puts into a program, but where ranks are fibers."""
ALIVE = 4
"""The exit code when a mutant is."""

RANKS = (
    *(("ranks_test", shape, "1", "5") for shape in ("4", "2,2", "1,1,1")),
    *(("ranks_test", "1,2,2", "3", "4", name) for name in ("ring", "tree", "transpose")),
)
SLOW = tuple(
    ("ranks_test", "1,1,1,1", "4", "7", f"{name}@mailboxes")
    for name in ("ring", "tree", "transpose", "auto")
)
ALONE = (("ranks_test", "4", "1", "6"),)
PIPELINED = (
    ("ranks_test", "5", "2", "5", "6", "1000"),
    ("ranks_test", "3,2", "2", "5", "4", "777"),
)
MESSAGES = (("messages_test", "1"), ("stranger_test",))
FUZZ = (("fuzz_test", "1", "3000"),)
LANES = tuple(
    ("lanes_test", *play.split()) for play in ("steps 2 3 2", "roots 3 2 1", "rings 2 3 2")
)
WRAP = (("lanes_test", "wrap", "2", "3", "2"),)
SCALE = (("scale_test", "meet", "20"), ("scale_test", "meet", "20", "roll"))


@dataclass(frozen=True)
class Mutant:
    """``found`` stands once in ``file``."""

    name: str
    file: str
    found: str
    put: str
    runs: tuple[tuple[str, ...], ...]
    seconds: int = 180
    """How long a run may take: what hangs is noticed."""


MUTANTS = (
    Mutant("fill-at-once", "shm_steps.cpp", "    wait_posted(p, step_);\n", "", LANES),
    Mutant("one-slot", "shm_steps.cpp", "(step & 1) *", "0 *", LANES),
    Mutant(
        "no-wrap",
        "shm_steps.cpp",
        "static_cast<int32_t>(posted - step) >= 0",
        "posted >= step",
        WRAP,
    ),
    Mutant(
        "post-and-tell-nobody",
        "shm_steps.cpp",
        "mine.posted.store(++step_, std::memory_order_seq_cst);\n  if (mine.sleepers",
        "mine.posted.store(++step_, std::memory_order_seq_cst);\n  if (false && mine.sleepers",
        LANES,
    ),
    Mutant("sleep-unseen", "shm_steps.cpp", "theirs.sleepers.fetch_add(1", "(void)(0", LANES),
    Mutant("ring-too-long", "channels.cpp", "- taken == kDepth", "- taken == kDepth + 1", LANES),
    Mutant(
        "bell-unheard",
        "channels.cpp",
        "!= 0) futex_wake_all(whose.bell)",
        "== 7) futex_wake_all(whose.bell)",
        LANES,
    ),
    Mutant(
        "asleep-too-late",
        "channels.cpp",
        "mine.asleep.store(1, std::memory_order_seq_cst);\n",
        "",
        LANES,
    ),
    Mutant("hello-unsigned", "tcp_io.cpp", "hello.mac != mac_of(key, hello, 0)", "false", MESSAGES),
    Mutant("hello-again", "tcp_io.cpp", "(pair(rank).called_in & which) != 0", "false", MESSAGES),
    Mutant(
        "hello-of-anyone", "tcp_io.cpp", "hello.message >= pairs_.size() || ", "", MESSAGES + FUZZ
    ),
    Mutant(
        "frame-unsigned",
        "connection.cpp",
        "!header_complete_ && in_.mac != mac_of(key_, in_, next_in_)",
        "false",
        MESSAGES,
    ),
    Mutant(
        "frame-repeated",
        "connection.cpp",
        "if (!std::exchange(header_complete_, true)) next_in_ += 2;",
        "header_complete_ = true;",
        MESSAGES,
    ),
    Mutant(
        "seal-unread",
        "connection.cpp",
        "in_.bytes == 0 || seal_ == Seal::kWhole",
        "true",
        MESSAGES,
    ),
    Mutant(
        "message-without-end",
        "connection.cpp",
        "in_.bytes > kMostBytes || in_.total > kMostBytes",
        "false",
        MESSAGES,
    ),
    Mutant(
        "stripe-outside",
        "tcp_io.cpp",
        "frame.bytes > m->total || frame.offset > m->total - frame.bytes",
        "false",
        FUZZ,
    ),
    Mutant(
        "announced-twice",
        "tcp_transport.cpp",
        "from.inbox.find(m.message) != nullptr",
        "false",
        MESSAGES,
    ),
    Mutant(
        "kept-without-end",
        "tcp_transport.cpp",
        "return kept + more > options.kept_bytes ||",
        "return false ||",
        MESSAGES,
    ),
    Mutant(
        "no-order-of-tags", "tcp_transport.cpp", "b->order < a->order", "false", MESSAGES + RANKS
    ),
    Mutant(
        "copies-after-abort",
        "tcp_ends.cpp",
        "  hold.wait_for_copies();\n  if (getpid()",
        "  if (getpid()",
        MESSAGES,
    ),
    Mutant(
        "settles-while-copied",
        "request.h",
        "if (copies == 0) settle(kFailed);",
        "settle(kFailed);",
        MESSAGES,
    ),
    Mutant(
        "nobody-told",
        "tcp_ends.cpp",
        "if (connection.get() != told_by) tell_failure(connection);",
        "",
        MESSAGES,
    ),
    Mutant("late-not-told", "tcp_io.cpp", "if (failed_) tell_failure(connection);", "", MESSAGES),
    Mutant(
        "closed-while-sending",
        "tcp_io.cpp",
        "  hold.wait_until([&] { return !connection->sending(); });\n",
        "",
        MESSAGES,
    ),
    Mutant("another-card", "tcp_transport.cpp", "m.card != r->card", "false", MESSAGES),
    Mutant("another-size", "tcp_transport.cpp", "r->memory.bytes() != m.total", "false", MESSAGES),
    Mutant(
        "no-wake-of-requests",
        "request.h",
        "if (state.exchange(to) == kAwaited) futex_wake_all(state);",
        "state.exchange(to);",
        MESSAGES,
    ),
    Mutant(
        "input-overwritten",
        "hierarchy_routes.cpp",
        "if (h.adds && h.ends && h.to.empty()) x.wait(&s.sends);",
        "",
        SLOW,
    ),
    Mutant(
        "one-stream",
        "hierarchy_routes.cpp",
        "return 1 + 2 * segment + (result ? 1 : 0);",
        "return 1;",
        RANKS,
    ),
    Mutant(
        "order-of-clusters",
        "hierarchy_routes.cpp",
        "sources.insert(sources.begin() + (before - h.from.begin()), s.own[h.segment]);",
        "sources.push_back(s.own[h.segment]);",
        RANKS,
    ),
    Mutant(
        "averaged-at-every-hop",
        "hierarchy_routes.cpp",
        "r.first_stage().last_stage(), to",
        "r.last_stage(), to",
        RANKS,
    ),
    Mutant(
        "multiplied-at-every-hop",
        "hierarchy_routes.cpp",
        "r.first_stage().last_stage(), to",
        "r.first_stage(), to",
        RANKS,
    ),
    Mutant(
        "stage-too-few",
        "hierarchy_routes.cpp",
        "(route.end + ahead) / route.stride + 2;",
        "(route.end + ahead) / route.stride - 1;",
        RANKS,
    ),
    Mutant(
        "sends-not-awaited",
        "hierarchy_routes.cpp",
        "  x.wait(&s.sends);\n}\n\n}  // namespace",
        "  s.sends.clear();\n}\n\n}  // namespace",
        SLOW,
    ),
    Mutant(
        "ring-the-other-way",
        "route.cpp",
        "(me + 2 * count - 1 - t) % count",
        "(me + 1 + t) % count",
        RANKS,
    ),
    Mutant(
        "no-wake-of-steps",
        "shm_steps.cpp",
        "mine.posted.store(++step_, std::memory_order_seq_cst);\n"
        "  if (mine.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(mine.posted);",
        "mine.posted.store(++step_, std::memory_order_seq_cst);",
        ALONE,
        15,
    ),
    Mutant(
        "no-wake-by-bell",
        "channels.cpp",
        "if (whose.asleep.load(std::memory_order_seq_cst) != 0) futex_wake_all(whose.bell);",
        "",
        PIPELINED,
        15,
    ),
    Mutant("channel-too-full", "channels.cpp", "- taken == kDepth", "- taken > kDepth", PIPELINED),
    Mutant(
        "premature-roll", "rendezvous.cpp", "lines.size() < before.size()", "true", FUZZ + SCALE
    ),
)


class Builder:
    """Programs of the tests with one copy of the core each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.core = directory / "core"
        self._object = directory / "core.o"
        self._tests: dict[str, Path] = {}
        shutil.copytree(CORE.with_name("datagram"), directory / "datagram")  # of the core's unit

    def mutate(self, mutant: Mutant) -> None:
        """A fresh copy with the one change."""
        shutil.rmtree(self.core, ignore_errors=True)
        shutil.copytree(CORE, self.core)
        path = self.core / mutant.file
        text = path.read_text()
        if text.count(mutant.found) != 1:
            sys.exit(f"{mutant.name}: its line is {text.count(mutant.found)} times in {path.name}")
        path.write_text(text.replace(mutant.found, mutant.put))
        if mutant.file.endswith(".h"):
            self._tests.clear()
        self._object.unlink(missing_ok=True)

    def compile(self, source: Path, made: Path) -> None:
        _compile("-c", f"-I{self.core}", str(source), "-o", str(made))

    def program(self, test: str) -> Path:
        if test == LANES[0][0]:  # which has the sources that it plays within itself
            made = self.directory / test
            source = str(TESTS / f"{test}.cpp")
            _compile(f"-I{self.core}", source, "-o", str(made), checks=())
            return made
        if test not in self._tests:
            self._tests[test] = self.directory / f"{test}.o"
            self.compile(TESTS / f"{test}.cpp", self._tests[test])
        if not self._object.exists():
            self.compile(self.core / "core.cpp", self._object)
        made = self.directory / test
        _compile(str(self._tests[test]), str(self._object), "-o", str(made))
        return made


def _compile(*words: str, checks: tuple[str, ...] = CHECKS) -> None:
    flags = ["-std=c++17", "-g1", "-O0", "-pthread", *checks]
    subprocess.run(["g++", *flags, *words], check=True)


def killed_by(builder: Builder, mutant: Mutant) -> str | None:
    """Which run has noticed."""
    builder.mutate(mutant)
    for run in mutant.runs:
        try:
            done = subprocess.run(
                [str(builder.program(run[0])), *run[1:]],
                capture_output=True,
                text=True,
                timeout=mutant.seconds,
                check=False,
                env={"ASAN_OPTIONS": "hard_rss_limit_mb=2000:max_allocation_size_mb=1000"},
            )
        except subprocess.TimeoutExpired:
            return f"{' '.join(run)}: more than {mutant.seconds} s"
        if done.returncode != 0:
            words = done.stderr.strip().splitlines() or [f"code {done.returncode}"]
            why = next((line for line in words if "ERROR" in line or "error" in line), words[0])
            return f"{' '.join(run)}: {why[:120]}"
    return None


def main() -> int:
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(w in m.name for w in sys.argv[1:])]
    alive = []
    with tempfile.TemporaryDirectory() as directory:
        builder = Builder(Path(directory))
        for mutant in chosen:
            why = killed_by(builder, mutant)
            print(f"{mutant.name:28} {why or 'ALIVE'}", flush=True)
            if why is None:
                alive.append(mutant.name)
    print(f"{len(alive)} of {len(chosen)} alive: {' '.join(alive)}")
    return ALIVE if alive else 0


if __name__ == "__main__":
    sys.exit(main())
