#!/usr/bin/env python3
"""Mutation tests of fsccl's core: insert one fault at a time and check that its tests detect it.

    tools/dev/mutants.py                # all mutants, about a minute each
    tools/dev/mutants.py wake stripe    # those whose names contain one of the words

Each mutant changes one line of ``csrc/core`` in a copy. The programs of tests/unit/fsccl/core that
it lists are compiled with the copy and run until one of them fails. A mutant that passes all of
them survives: write the test that detects it. Run by hand, not in CI.

Exits with 4 if a mutant survives.
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
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""Compiler flags of all programs, except those whose ranks are fibers."""
SURVIVED = 4
"""Exit code if a mutant survives."""

RANKS = (
    ("ranks_test", "4", "1", "5"),
    ("ranks_test", "2,2", "1", "5"),
    ("ranks_test", "1,1,1", "1", "5"),
    ("ranks_test", "1,2,2", "3", "4", "ring"),
    ("ranks_test", "1,2,2", "3", "4", "tree"),
    ("ranks_test", "1,2,2", "3", "4", "transpose"),
)
MAILBOXES = tuple(
    ("ranks_test", "1,1,1,1", "4", "7", f"{name}@mailboxes")
    for name in ("ring", "tree", "transpose", "auto")
)
ONE_NODE = (("ranks_test", "4", "1", "6"),)
PIPELINED = (
    ("ranks_test", "5", "2", "5", "6", "1000"),
    ("ranks_test", "3,2", "2", "5", "4", "777"),
)
MESSAGES = (("messages_test", "1"), ("raw_peer_test",))
FUZZ = (("fuzz_test", "1", "3000"),)
INTERLEAVINGS = tuple(
    ("interleavings_test", *arguments.split())
    for arguments in ("steps 2 3 2", "roots 3 2 1", "rings 2 3 2")
)
COUNTER_WRAP = (("interleavings_test", "wrap", "2", "3", "2"),)
SCALE = (("scale_test", "meet", "20"), ("scale_test", "meet", "20", "roll"))


@dataclass(frozen=True)
class Mutant:
    """One fault: ``original``, which occurs once in ``file``, becomes ``replacement``."""

    name: str
    file: str
    original: str
    replacement: str
    runs: tuple[tuple[str, ...], ...]
    """Test programs with their arguments."""
    timeout: int = 180
    """Seconds per run; a hanging run counts as detected."""


MUTANTS = (
    Mutant(
        "write-without-waiting", "shm_steps.cpp", "    wait_posted(p, step_);\n", "", INTERLEAVINGS
    ),
    Mutant("one-slot", "shm_steps.cpp", "(step & 1) *", "0 *", INTERLEAVINGS),
    Mutant(
        "no-counter-wrap",
        "shm_steps.cpp",
        "static_cast<int32_t>(posted - step) >= 0",
        "posted >= step",
        COUNTER_WRAP,
    ),
    Mutant(
        "post-without-wake",
        "shm_steps.cpp",
        "store(++step_, std::memory_order_seq_cst);\n  if (own_state.sleepers",
        "store(++step_, std::memory_order_seq_cst);\n  if (false && own_state.sleepers",
        INTERLEAVINGS,
    ),
    Mutant(
        "uncounted-sleeper",
        "shm_steps.cpp",
        "peer_state.sleepers.fetch_add(1",
        "(void)(0",
        INTERLEAVINGS,
    ),
    Mutant(
        "channel-overfull",
        "channels.cpp",
        "- released == kDepth",
        "- released == kDepth + 1",
        INTERLEAVINGS,
    ),
    Mutant(
        "doorbell-without-wake",
        "channels.cpp",
        "!= 0) futex_wake_all(state.doorbell)",
        "== 7) futex_wake_all(state.doorbell)",
        INTERLEAVINGS,
    ),
    Mutant(
        "sleep-flag-missing",
        "channels.cpp",
        "state.sleeping.store(1, std::memory_order_seq_cst);\n",
        "",
        INTERLEAVINGS,
    ),
    Mutant("hello-unsigned", "tcp_io.cpp", "hello.mac != mac_of(key, hello, 0)", "false", MESSAGES),
    Mutant(
        "hello-replayed",
        "tcp_io.cpp",
        "(peer_state(rank).accepted_mask & bit) != 0",
        "false",
        MESSAGES,
    ),
    Mutant(
        "hello-of-unknown-rank",
        "tcp_io.cpp",
        "hello.message >= peer_states_.size() || ",
        "",
        MESSAGES + FUZZ,
    ),
    Mutant(
        "frame-unsigned",
        "connection.cpp",
        "frame.mac == mac_of(key_, frame, next_received_number_)",
        "true",
        MESSAGES,
    ),
    Mutant(
        "farewell-key-signs-all",
        "connection.cpp",
        "(frame.kind == FrameKind::kBye || frame.kind == FrameKind::kAbort) &&",
        "",
        MESSAGES,
    ),
    Mutant(
        "frame-replayed",
        "connection.cpp",
        "if (!std::exchange(header_complete_, true)) next_received_number_ += 2;",
        "header_complete_ = true;",
        MESSAGES,
    ),
    Mutant(
        "seal-ignored",
        "connection.cpp",
        "incoming_frame_.bytes == 0 || incoming_seal_ == Seal::kWhole",
        "true",
        MESSAGES,
    ),
    Mutant(
        "unbounded-message",
        "connection.cpp",
        "incoming_frame_.bytes > kMaxMessageBytes || incoming_frame_.total > kMaxMessageBytes",
        "false",
        MESSAGES,
    ),
    Mutant(
        "stripe-out-of-bounds",
        "tcp_io.cpp",
        "frame.bytes > message->total || frame.offset > message->total - frame.bytes",
        "false",
        FUZZ,
    ),
    Mutant(
        "announced-twice",
        "tcp_transport.cpp",
        "from.inbox.find(incoming.number) != nullptr",
        "false",
        MESSAGES,
    ),
    Mutant(
        "unbounded-buffering",
        "tcp_transport.cpp",
        "return buffered + more > options.max_buffered_bytes ||",
        "return false ||",
        MESSAGES,
    ),
    Mutant(
        "receive-order-ignored",
        "tcp_transport.cpp",
        "first_of_any->number < first_of_peer->number",
        "false",
        MESSAGES + RANKS,
    ),
    Mutant(
        "copies-after-abort",
        "tcp_shutdown.cpp",
        "    flush_queued(hold);\n    hold.wait_for_copies();\n",
        "    flush_queued(hold);\n",
        MESSAGES,
    ),
    Mutant(
        "fails-while-copied",
        "request.h",
        "if (copies_in_progress == 0) finish(kFailed);",
        "finish(kFailed);",
        MESSAGES,
    ),
    Mutant(
        "abort-not-sent",
        "tcp_shutdown.cpp",
        "if (connection.get() != source) send_abort(connection);",
        "",
        MESSAGES,
    ),
    Mutant(
        "abort-not-sent-to-late-peer",
        "tcp_io.cpp",
        "    if (abort_error_) {\n      send_abort(connection);\n    } else if (closed_) {",
        "    if (closed_) {",
        MESSAGES,
    ),
    Mutant(
        "closed-while-sending",
        "tcp_io.cpp",
        "  hold.unlock_until([&] { return !connection->sending(); });\n",
        "",
        MESSAGES,
    ),
    Mutant(
        "fingerprint-ignored",
        "tcp_transport.cpp",
        "message.fingerprint != receive->fingerprint",
        "false",
        MESSAGES,
    ),
    Mutant(
        "size-ignored",
        "tcp_transport.cpp",
        "receive->memory.bytes() != message.total",
        "false",
        MESSAGES,
    ),
    Mutant(
        "no-wake-of-requests",
        "request.h",
        "if (state.exchange(final_state) == kAwaited) futex_wake_all(state);",
        "state.exchange(final_state);",
        MESSAGES,
    ),
    Mutant(
        "input-overwritten",
        "hierarchical_routes.cpp",
        "if (h.adds_own_data && h.is_result && h.targets.empty()) requests.wait(&state.sends);",
        "",
        MAILBOXES,
    ),
    Mutant(
        "one-stream",
        "hierarchical_routes.cpp",
        "return 1 + 2 * segment + (result ? 1 : 0);",
        "return 1;",
        RANKS,
    ),
    Mutant(
        "node-order-ignored",
        "hierarchical_routes.cpp",
        "sources.insert(sources.begin() + (own_position - h.sources.begin()), "
        "state.own_sums[h.segment]);",
        "sources.push_back(state.own_sums[h.segment]);",
        RANKS,
    ),
    Mutant(
        "averaged-at-every-hop",
        "hierarchical_routes.cpp",
        "r.first_stage().last_stage(), target",
        "r.last_stage(), target",
        RANKS,
    ),
    Mutant(
        "multiplied-at-every-hop",
        "hierarchical_routes.cpp",
        "r.first_stage().last_stage(), target",
        "r.first_stage(), target",
        RANKS,
    ),
    Mutant(
        "too-few-chunk-states",
        "hierarchical_routes.cpp",
        "(route.end_time + receive_ahead) / route.stride + 2;",
        "(route.end_time + receive_ahead) / route.stride - 1;",
        RANKS,
    ),
    Mutant(
        "sends-not-awaited",
        "hierarchical_routes.cpp",
        "  requests.wait(&state.sends);\n}\n\n}  // namespace",
        "  state.sends.clear();\n}\n\n}  // namespace",
        MAILBOXES,
    ),
    Mutant(
        "ring-reversed",
        "route.cpp",
        "(me + 2 * count - 1 - t) % count",
        "(me + 1 + t) % count",
        RANKS,
    ),
    Mutant(
        "no-wake-of-steps",
        "shm_steps.cpp",
        "own_state.posted.store(++step_, std::memory_order_seq_cst);\n"
        "  if (own_state.sleepers.load(std::memory_order_seq_cst) > 0) "
        "futex_wake_all(own_state.posted);",
        "own_state.posted.store(++step_, std::memory_order_seq_cst);",
        ONE_NODE,
        15,
    ),
    Mutant(
        "no-wake-by-doorbell",
        "channels.cpp",
        "if (state.sleeping.load(std::memory_order_seq_cst) != 0) futex_wake_all(state.doorbell);",
        "",
        PIPELINED,
        15,
    ),
    Mutant(
        "channel-limit-off-by-one",
        "channels.cpp",
        "- released == kDepth",
        "- released > kDepth",
        PIPELINED,
    ),
    Mutant(
        "peer-table-line-unchecked",
        "rendezvous.cpp",
        "lines.size() < previous.size()",
        "true",
        FUZZ + SCALE,
    ),
)


class Builder:
    """Compiler of the test programs, each linked with one copy of the core."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.core = directory / "core"
        self._core_object = directory / "core.o"
        self._test_objects: dict[str, Path] = {}
        # core.cpp includes the sources of datagram/.
        shutil.copytree(CORE.with_name("datagram"), directory / "datagram")

    def apply_mutant(self, mutant: Mutant) -> None:
        """Replace the copy of the core by a fresh one with the fault of ``mutant``."""
        shutil.rmtree(self.core, ignore_errors=True)
        shutil.copytree(CORE, self.core)
        path = self.core / mutant.file
        text = path.read_text()
        occurrences = text.count(mutant.original)
        if occurrences != 1:
            sys.exit(f"{mutant.name}: its line occurs {occurrences} times in {path.name}")
        path.write_text(text.replace(mutant.original, mutant.replacement))
        if mutant.file.endswith(".h"):
            self._test_objects.clear()
        self._core_object.unlink(missing_ok=True)

    def build_program(self, test: str) -> Path:
        """Compile a test program with the current copy of the core and return its path."""
        program = self.directory / test
        source = TESTS / f"{test}.cpp"
        if test == "interleavings_test":  # includes the sources that it tests
            _run_compiler(f"-I{self.core}", str(source), "-o", str(program), sanitizers=())
            return program
        if test not in self._test_objects:
            self._test_objects[test] = self.directory / f"{test}.o"
            self._compile_object(source, self._test_objects[test])
        if not self._core_object.exists():
            self._compile_object(self.core / "core.cpp", self._core_object)
        _run_compiler(str(self._test_objects[test]), str(self._core_object), "-o", str(program))
        return program

    def _compile_object(self, source: Path, target: Path) -> None:
        _run_compiler("-c", f"-I{self.core}", str(source), "-o", str(target))


def _run_compiler(*arguments: str, sanitizers: tuple[str, ...] = SANITIZERS) -> None:
    flags = ["-std=c++17", "-g1", "-O0", "-pthread", *sanitizers]
    subprocess.run(["g++", *flags, *arguments], check=True)


def find_detecting_run(builder: Builder, mutant: Mutant) -> str | None:
    """Return a description of the first run that detects the mutant, None if it survives."""
    builder.apply_mutant(mutant)
    for run in mutant.runs:
        command_line = " ".join(run)
        try:
            result = subprocess.run(
                [str(builder.build_program(run[0])), *run[1:]],
                capture_output=True,
                text=True,
                timeout=mutant.timeout,
                check=False,
                env={"ASAN_OPTIONS": "hard_rss_limit_mb=2000:max_allocation_size_mb=1000"},
            )
        except subprocess.TimeoutExpired:
            return f"{command_line}: more than {mutant.timeout} s"
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or [f"code {result.returncode}"]
            error = next((line for line in lines if "ERROR" in line or "error" in line), lines[0])
            return f"{command_line}: {error[:120]}"
    return None


def main() -> int:
    filters = sys.argv[1:]
    selected = [m for m in MUTANTS if not filters or any(word in m.name for word in filters)]
    survivors = []
    with tempfile.TemporaryDirectory() as directory:
        builder = Builder(Path(directory))
        for mutant in selected:
            detection = find_detecting_run(builder, mutant)
            print(f"{mutant.name:28} {detection or 'SURVIVED'}", flush=True)
            if detection is None:
                survivors.append(mutant.name)
    print(f"{len(survivors)} of {len(selected)} survived: {' '.join(survivors)}")
    return SURVIVED if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
