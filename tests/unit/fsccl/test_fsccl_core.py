"""The C++ core with ranks as threads, under sanitizers."""

from __future__ import annotations

import math
import os
import re
import subprocess
from pathlib import Path

import pytest
from compiled import program as program_of

HERE = Path(__file__).parent / "core"
CORE = Path(__file__).parents[3] / "flagscale" / "comm" / "fsccl" / "csrc" / "core"
# Of sizes, the later ones drawn: `make sanitize` asks for many.
ROUNDS = os.environ.get("FLAGSCALE_SANITIZE_ROUNDS", "7")
SHAPES = ["1", "4", "2,2", "3,2", "1,2,2", "3,1", "1,1,1,1"]
# Clusters, k, nelem: sends that divide a chunk and that do not, rings of every stride.
PIPELINES = [("5", 6, 1000), ("3,2", 4, 777), ("1,1,1,1", 3, 900)]

pytestmark = [pytest.mark.integration, pytest.mark.compiler]


def build(kind: str, test: str, parts: tuple[str, ...] = ("core.cpp",)) -> Path:
    sources = [HERE / test, *(CORE / part for part in parts)]
    reads = [*CORE.iterdir(), *CORE.with_name("datagram").iterdir(), *HERE.glob("*.h")]
    return program_of(kind, sources, include=CORE, reads=reads)


@pytest.fixture(scope="module", params=["threads", "memory"])
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
            "ASAN_OPTIONS": "detect_leaks=1",
        },
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-8000:]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.replace(",", "+"))
def test_ranks_as_threads(program: Path, shape: str) -> None:
    run(program, shape, "1", ROUNDS, seconds=120 * (1 + int(ROUNDS) // 7))


@pytest.mark.parametrize(("shape", "k", "nelem"), PIPELINES, ids=str)
def test_pipelined_schedules(program: Path, shape: str, k: int, nelem: int) -> None:
    run(program, shape, "2", ROUNDS, str(k), str(nelem), seconds=120 * (1 + int(ROUNDS) // 7))


@pytest.mark.parametrize("kind", ["threads", "memory"])
def test_messages_of_threads(kind: str) -> None:
    run(build(kind, "messages_test.cpp"), "1")


def scale(*words: object) -> str:
    """What many ranks cost, as scale_test.cpp says it."""
    program = build("threads", "scale_test.cpp")
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


def test_having_no_descriptor_left_is_told_with_the_numbers() -> None:
    said = scale("barrier", 16, 60)
    assert re.search(r", rank \d+: ", said), said
    assert "descriptors open that it may have, 60 (RLIMIT_NOFILE; its hard limit is 60)" in said


def test_small_parts() -> None:
    parts = ("types.cpp", "reduce.cpp", "rendezvous.cpp", "schedule.cpp", "segment.cpp")
    parts += ("settings.cpp", "socket.cpp", "topology.cpp")
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
