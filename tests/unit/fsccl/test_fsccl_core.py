"""Tests of fsccl's C++ core with ranks as threads, built with sanitizers."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.compiled import compile_program
from support.waiting import PATIENCE_SECONDS

CORE_TESTS = Path(__file__).parent / "core"
CORE = Path(__file__).parents[3] / "flagscale" / "comm" / "fsccl" / "csrc" / "core"
# Sizes per collective; those after the fixed ones are random. `make sanitize` runs more.
ROUNDS = os.environ.get("FLAGSCALE_SANITIZE_ROUNDS", "7")
# Algorithm, ranks per node.
ALGORITHMS = [
    ("ring", "1,1,1,1,1"),
    ("ring", "3,2"),
    ("tree", "1,1,1,1,1"),
    ("tree", "2,1,2"),
    ("transpose", "1,1,1"),
    ("transpose", "1,2,2"),
]
NODES = ["1", "4", "2,2", "3,2", "1,2,2", "3,1", "1,1,1,1"]
# Ranks per node, k, nelem: sends that divide a chunk and that do not, rings of every stride.
PIPELINES = [("5", 6, 1000), ("3,2", 4, 777), ("1,1,1,1", 3, 900)]

pytestmark = [pytest.mark.integration, pytest.mark.compiler]


def build(kind: str, test: str, core_sources: tuple[str, ...] = ("core.cpp",)) -> Path:
    """Compile a test with sources of the core and return the path of the program."""
    sources = [CORE_TESTS / test, *(CORE / source for source in core_sources)]
    dependencies = [
        *CORE.iterdir(),
        *CORE.with_name("datagram").iterdir(),
        *CORE_TESTS.glob("*.h"),
    ]
    return compile_program(kind, sources, include=CORE, dependencies=dependencies)


# Compiling and running with a sanitizer takes minutes each.
KINDS = [pytest.param("threads", marks=pytest.mark.slow), "memory"]


@pytest.fixture(scope="module", params=KINDS)
def ranks_program(request: pytest.FixtureRequest) -> Path:
    return build(request.param, "ranks_test.cpp")


def run(program: Path, *arguments: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Run a test program and check that it succeeds within ``seconds``."""
    # ThreadSanitizer assumes that sent memory is read until the call returns. With in-place results
    # it may be overwritten earlier: a peer computed the result from the received data, which the
    # sanitizer does not know.
    intercept_send = "intercept_send=0" if program.name.startswith("ranks_test") else ""
    result = subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={
            **os.environ,
            "TSAN_OPTIONS": f"halt_on_error=1 {intercept_send}",
            "ASAN_OPTIONS": "detect_leaks=1:hard_rss_limit_mb=4000",
        },
    )
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr[-8000:]


@pytest.mark.parametrize("nodes", NODES, ids=lambda s: s.replace(",", "+"))
def test_collectives(ranks_program: Path, nodes: str) -> None:
    run(ranks_program, nodes, "1", ROUNDS, seconds=120 * (1 + int(ROUNDS) // 7))


@pytest.mark.parametrize(("nodes", "k", "nelem"), PIPELINES, ids=str)
def test_pipelined_schedules(ranks_program: Path, nodes: str, k: int, nelem: int) -> None:
    seconds = 120 * (1 + int(ROUNDS) // 7)
    run(ranks_program, nodes, "2", ROUNDS, str(k), str(nelem), seconds=seconds)


@pytest.mark.parametrize(("algorithm", "nodes"), ALGORITHMS, ids=str)
def test_algorithms_by_name(algorithm: str, nodes: str) -> None:
    run(build("memory", "ranks_test.cpp"), nodes, "3", "4", algorithm)


@pytest.mark.parametrize(
    ("algorithm", "nodes"), [("auto", "1,1,1,1,1"), ("auto", "3,2"), *ALGORITHMS], ids=str
)
def test_collectives_over_another_transport(
    ranks_program: Path, algorithm: str, nodes: str
) -> None:
    """Run on the transport in mailbox_transport.h: all other code uses the interface only."""
    run(ranks_program, nodes, "4", ROUNDS, f"{algorithm}@mailboxes")


@pytest.mark.parametrize("kind", KINDS)
def test_messages_between_threads(kind: str) -> None:
    run(build(kind, "messages_test.cpp"), "1")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_agree_on_a_generation(kind: str) -> None:
    run(build(kind, "generation_test.cpp"), "150")


@pytest.mark.parametrize("kind", KINDS)
def test_messages_with_a_raw_peer(kind: str) -> None:
    run(build(kind, "raw_peer_test.cpp"))


# Ranks program, ranks, rounds, preemptions. `make test-slow` explores more.
EXPLORATIONS = [
    "steps 2 3 2",
    "steps 3 2 1",
    "roots 3 2 1",
    "wrap 2 3 2",
    "rings 2 3 2",
    "rings 3 2 1",
]
SLOW_EXPLORATIONS = ["steps 3 2 2", "roots 3 3 2", "wrap 2 4 3", "rings 2 3 3"]


@pytest.mark.parametrize(
    "exploration",
    [
        *EXPLORATIONS,
        *(pytest.param(arguments, marks=pytest.mark.slow) for arguments in SLOW_EXPLORATIONS),
    ],
)
def test_every_interleaving_in_shared_memory(exploration: str) -> None:
    program = build("fast", "interleavings_test.cpp", ())
    result = subprocess.run(
        [str(program), *exploration.split()],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    status, schedules = result.stdout.split()
    assert status == "ok"
    assert int(schedules) > 1000


def test_fuzzed_peers_and_store_values() -> None:
    """Run some seeds; `make fuzz` runs more."""
    seeds = os.environ.get("FLAGSCALE_FUZZ_SEEDS", "100")
    run(build("memory", "fuzz_test.cpp"), "1", seeds, seconds=120 + int(seeds) / 10)


def run_scale_test(*arguments: object) -> str:
    """Run scale_test.cpp, which measures the cost of many ranks, and return its output."""
    program = build("memory", "scale_test.cpp")
    result = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_store_operations_per_rank_do_not_grow_with_the_group() -> None:
    for ranks in (8, 32, 128):
        sets, adds, gets, size = map(int, run_scale_test("meet", ranks).split())
        assert sets <= ranks + 2  # the peer table, and its place in shared memory
        assert adds <= 2 * ranks
        assert gets <= 2 * ranks
        assert size <= 3000 * ranks


@pytest.mark.parametrize("lost_key", ["roll", "roll/<host>"])
def test_rendezvous_survives_loss_of_the_peer_table_publisher(lost_key: str) -> None:
    run_scale_test("meet", 20, lost_key)


def test_barrier_needs_logarithmically_many_sockets_and_two_threads() -> None:
    for ranks in (8, 64):
        sockets, threads = map(int, run_scale_test("barrier", ranks).split())
        # Per round a connection to the next and one from the previous rank; both ends are here.
        assert sockets <= 4 * ranks * math.ceil(math.log2(ranks)) + 4
        # The threads of the program, of the transport and of the sanitizer.
        assert threads <= ranks + 5


def measure_traffic(*arguments: object) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (messages, bytes) by (sender, receiver)."""
    lines = run_scale_test("traffic", *arguments).splitlines()
    rows = [tuple(map(int, line.split())) for line in lines]
    return {(sender, receiver): (messages, size) for sender, receiver, messages, size in rows}


@pytest.mark.parametrize("ranks", [4, 7])
def test_traffic_pattern_of_each_algorithm(ranks: int) -> None:
    size = ranks * (1 << 20)
    share = 2 * size // ranks
    all_ranks = range(ranks)
    ring = {(rank, (rank + 1) % ranks): (ranks - 1) * share for rank in all_ranks}
    transpose = {(a, b): share for a in all_ranks for b in all_ranks if a != b}
    for algorithm, expected in (("ring", ring), ("transpose", transpose)):
        traffic = measure_traffic("all_reduce", ranks, size, algorithm)
        sizes = {pair: pair_bytes for pair, (_, pair_bytes) in traffic.items()}
        assert sizes == pytest.approx(expected, rel=0.1)
    tree = measure_traffic("all_reduce", ranks, size, "tree")
    assert sum(pair_bytes for _, pair_bytes in tree.values()) == 2 * (ranks - 1) * size
    assert {(b, a) for a, b in tree} == set(tree)  # between parents and children
    assert len(tree) <= 4 * (ranks - 1)  # of two trees
    for rank in all_ranks:
        sent_sizes = [pair_bytes for (sender, _), (_, pair_bytes) in tree.items() if sender == rank]
        assert sum(sent_sizes) <= 2 * size
        assert len(sent_sizes) <= 4


@pytest.mark.parametrize("ranks", [8, 32, 128])
def test_small_messages_between_many_nodes_follow_trees(ranks: int) -> None:
    for operation in ("broadcast", "reduce"):
        traffic = measure_traffic(operation, ranks, 1000)
        assert [messages for messages, _ in traffic.values()] == [1] * (ranks - 1)
        assert max(Counter(sender for sender, _ in traffic).values()) <= math.log2(ranks)
    if ranks == 32:
        assert len(measure_traffic("barrier", ranks, 0)) == ranks * math.log2(ranks)
        assert len(measure_traffic("all_reduce", ranks, 1000)) == 2 * (ranks - 1)


def test_descriptor_exhaustion_reports_the_limits() -> None:
    message = run_scale_test("barrier", 16, 60)
    assert re.search(r", rank \d+: ", message), message
    assert "descriptors open that it may have, 60 (RLIMIT_NOFILE; its hard limit is 60)" in message


def test_units() -> None:
    core_sources = (
        "types.cpp",
        "reduce.cpp",
        "rendezvous.cpp",
        "schedule.cpp",
        "segment.cpp",
        "route.cpp",
        "settings.cpp",
        "socket.cpp",
        "topology.cpp",
    )
    program = build("memory", "units_test.cpp", core_sources)
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.skipif(
    os.environ.get("FLAGSCALE_LARGE_TESTS") != "1",
    reason="moves tens of gigabytes: set FLAGSCALE_LARGE_TESTS=1",
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("nodes", "k"), [("2", 0), ("2", 2), ("1,1", 0), ("1,1", 2)])
def test_buffers_of_more_than_four_gibibytes(nodes: str, k: int) -> None:
    run(build("fast", "large_test.cpp"), nodes, str(k), seconds=800)
