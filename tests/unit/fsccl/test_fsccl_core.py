"""The C++ core with ranks as threads, under sanitizers."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.compiled import program as program_of

HERE = Path(__file__).parent / "core"
CORE = Path(__file__).parents[3] / "flagscale" / "comm" / "fsccl" / "csrc" / "core"
# Of sizes, the later ones drawn: `make sanitize` asks for many.
ROUNDS = os.environ.get("FLAGSCALE_SANITIZE_ROUNDS", "7")
ALGORITHMS = [
    ("ring", "1,1,1,1,1"),
    ("ring", "3,2"),
    ("tree", "1,1,1,1,1"),
    ("tree", "2,1,2"),
    ("transpose", "1,1,1"),
    ("transpose", "1,2,2"),
]
SHAPES = ["1", "4", "2,2", "3,2", "1,2,2", "3,1", "1,1,1,1"]
# Clusters, k, nelem: sends that divide a chunk and that do not, rings of every stride.
PIPELINES = [("5", 6, 1000), ("3,2", 4, 777), ("1,1,1,1", 3, 900)]

pytestmark = [pytest.mark.integration, pytest.mark.compiler]


def build(kind: str, test: str, parts: tuple[str, ...] = ("core.cpp",)) -> Path:
    sources = [HERE / test, *(CORE / part for part in parts)]
    reads = [*CORE.iterdir(), *CORE.with_name("datagram").iterdir(), *HERE.glob("*.h")]
    return program_of(kind, sources, include=CORE, reads=reads)


# Each is minutes of compiling and of checks.
KINDS = [pytest.param("threads", marks=pytest.mark.slow), "memory"]


@pytest.fixture(scope="module", params=KINDS)
def program(request: pytest.FixtureRequest) -> Path:
    return build(request.param, "ranks_test.cpp")


def run(program: Path, *words: str, seconds: float = 120) -> None:
    # ThreadSanitizer takes what is sent for read when the call has returned. In place results may
    # be there by then: a peer made them of what it got, which the sanitizer does not know.
    late_reads = "intercept_send=0" if program.name.startswith("ranks_test") else ""
    done = subprocess.run(
        [str(program), *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={
            **os.environ,
            "TSAN_OPTIONS": f"halt_on_error=1 {late_reads}",
            "ASAN_OPTIONS": "detect_leaks=1:hard_rss_limit_mb=4000",
        },
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-8000:]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.replace(",", "+"))
def test_ranks_as_threads(program: Path, shape: str) -> None:
    run(program, shape, "1", ROUNDS, seconds=120 * (1 + int(ROUNDS) // 7))


@pytest.mark.parametrize(("shape", "k", "nelem"), PIPELINES, ids=str)
def test_pipelined_schedules(program: Path, shape: str, k: int, nelem: int) -> None:
    run(program, shape, "2", ROUNDS, str(k), str(nelem), seconds=120 * (1 + int(ROUNDS) // 7))


@pytest.mark.parametrize(("algorithm", "shape"), ALGORITHMS, ids=str)
def test_algorithms_by_name(algorithm: str, shape: str) -> None:
    run(build("memory", "ranks_test.cpp"), shape, "3", "4", algorithm)


@pytest.mark.parametrize(
    ("algorithm", "shape"), [("auto", "1,1,1,1,1"), ("auto", "3,2"), *ALGORITHMS], ids=str
)
def test_another_transport_than_those_of_the_product(
    program: Path, algorithm: str, shape: str
) -> None:
    """Whoever brings one brings a file, such as mailboxes.h: all else knows the interface alone."""
    run(program, shape, "4", ROUNDS, f"{algorithm}@mailboxes")


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_threads(kind: str) -> None:
    run(build(kind, "messages_test.cpp"), "1")


@pytest.mark.parametrize("kind", KINDS)
def test_messages_with_a_stranger(kind: str) -> None:
    run(build(kind, "stranger_test.cpp"))


# What is played, ranks, rounds, preemptions. `make test-slow` plays more.
PLAYS = ["steps 2 3 2", "steps 3 2 1", "roots 3 2 1", "wrap 2 3 2", "rings 2 3 2", "rings 3 2 1"]
MORE = ["steps 3 2 2", "roots 3 3 2", "wrap 2 4 3", "rings 2 3 3"]


@pytest.mark.parametrize(
    "play", [*PLAYS, *(pytest.param(play, marks=pytest.mark.slow) for play in MORE)]
)
def test_every_interleaving_in_shared_memory(play: str) -> None:
    program = build("fast", "lanes_test.cpp", ())
    done = subprocess.run(
        [str(program), *play.split()], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    said, played = done.stdout.split()
    assert (said, int(played) > 1000) == ("ok", True)


def test_anything_may_come_from_a_peer_and_from_the_store() -> None:
    """`make fuzz` asks for more."""
    seeds = os.environ.get("FLAGSCALE_FUZZ_SEEDS", "100")
    run(build("memory", "fuzz_test.cpp"), "1", seeds, seconds=120 + int(seeds) / 10)


def scale(*words: object) -> str:
    """What many ranks cost, as scale_test.cpp says it."""
    program = build("memory", "scale_test.cpp")
    done = subprocess.run(
        [str(program), *map(str, words)], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_store_sees_as_much_of_a_rank_in_a_large_group_as_in_a_small_one() -> None:
    for ranks in (8, 32, 128):
        sets, adds, gets, size = map(int, scale("meet", ranks).split())
        assert sets <= ranks + 2  # the roll, and where on the host it lies
        assert (adds, gets) <= (2 * ranks, 2 * ranks)
        assert size <= 3000 * ranks


@pytest.mark.parametrize("lost", ["roll", "roll/<host>"])
def test_ranks_meet_although_one_ends_that_was_to_tell_them(lost: str) -> None:
    scale("meet", 20, lost)


def test_a_barrier_keeps_a_logarithm_of_the_ranks_in_sockets_and_two_threads() -> None:
    for ranks in (8, 64):
        sockets, threads = map(int, scale("barrier", ranks).split())
        # A connection to whom a rank sends and to whom it hears, both ends of which are here.
        assert sockets <= 4 * ranks * math.ceil(math.log2(ranks)) + 4
        assert threads <= ranks + 5  # the program's own, those for messages, and the sanitizer's


def sent_by(*words: object) -> dict[tuple[int, int], tuple[int, int]]:
    """(Messages, bytes) by sender and receiver."""
    rows = [tuple(map(int, line.split())) for line in scale("traffic", *words).splitlines()]
    return {(a, b): (messages, size) for a, b, messages, size in rows}


@pytest.mark.parametrize("ranks", [4, 7])
def test_an_algorithm_sends_as_its_name_says(ranks: int) -> None:
    size = ranks * (1 << 20)
    share, everyone = 2 * size // ranks, range(ranks)
    around = {(r, (r + 1) % ranks): (ranks - 1) * share for r in everyone}
    pairs = {(a, b): share for a in everyone for b in everyone if a != b}
    for algorithm, expected in (("ring", around), ("transpose", pairs)):
        sent = sent_by("all_reduce", ranks, size, algorithm)
        assert {pair: n for pair, (_, n) in sent.items()} == pytest.approx(expected, rel=0.1)
    tree = sent_by("all_reduce", ranks, size, "tree")
    assert sum(n for _, n in tree.values()) == 2 * (ranks - 1) * size
    assert {(b, a) for a, b in tree} == set(tree)  # parents and children
    assert len(tree) <= 4 * (ranks - 1)  # of two trees
    for r in everyone:
        assert sum(n for (a, _), (_, n) in tree.items() if a == r) <= 2 * size
        assert len([pair for pair in tree if pair[0] == r]) <= 4


@pytest.mark.parametrize("ranks", [8, 32, 128])
def test_messages_among_many_clusters_go_along_trees(ranks: int) -> None:
    for operation in ("broadcast", "reduce"):
        sent = sent_by(operation, ranks, 1000)
        assert [n for n, _ in sent.values()] == [1] * (ranks - 1)
        assert max(Counter(sender for sender, _ in sent).values()) <= math.log2(ranks)
    if ranks == 32:
        assert len(sent_by("barrier", ranks, 0)) == ranks * math.log2(ranks)
        assert len(sent_by("all_reduce", ranks, 1000)) == 2 * (ranks - 1)


def test_having_no_descriptor_left_is_told_with_the_numbers() -> None:
    said = scale("barrier", 16, 60)
    assert re.search(r", rank \d+: ", said), said
    assert "descriptors open that it may have, 60 (RLIMIT_NOFILE; its hard limit is 60)" in said


def test_small_parts() -> None:
    parts = ("types.cpp", "reduce.cpp", "rendezvous.cpp", "schedule.cpp", "segment.cpp")
    parts += ("route.cpp", "settings.cpp", "socket.cpp", "topology.cpp")
    program = build("memory", "parts_test.cpp", parts)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(
    os.environ.get("FLAGSCALE_LARGE_TESTS") != "1",
    reason="moves tens of gigabytes: set FLAGSCALE_LARGE_TESTS=1",
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("clusters", "k"), [("2", 0), ("2", 2), ("1,1", 0), ("1,1", 2)])
def test_more_than_four_gibibytes(clusters: str, k: int) -> None:
    run(build("fast", "large_test.cpp"), clusters, str(k), seconds=800)
