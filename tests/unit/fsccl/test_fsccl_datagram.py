"""All_reduce by datagrams over a played network: what holds whatever is lost, doubled or forged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.compiled import program as program_of

HERE = Path(__file__).parent / "datagram"
CSRC = Path(__file__).parents[3] / "flagscale" / "comm" / "fsccl" / "csrc"
PARTS = (
    *("datagram/session.cpp", "datagram/transfer.cpp", "datagram/socket.cpp"),
    *("core/types.cpp", "core/reduce.cpp", "core/socket.cpp"),
)
RANDOM_STORMS = 15
SEEDS = range(int(os.environ.get("FLAGSCALE_DATAGRAM_SEEDS", "2")))

pytestmark = [pytest.mark.integration, pytest.mark.compiler]

# Ranks, bytes, type and reduction; shares lost and doubled, the most that one is late in ms, and
# how many are lost together.
STORMS = {
    "nothing lost": (4, 40_000, "float32", "sum", 0, 0, 0.2, 1),
    "two of three elements a rank": (3, 128, "float32", "sum", 0.02, 0.1, 0.5, 1),
    "two ranks": (2, 5_000, "float32", "sum", 0.05, 0.1, 1, 1),
    "one in a hundred": (3, 99_998, "float16", "avg", 0.01, 0.01, 1, 1),
    "out of order and doubled": (4, 60_000, "float64", "avg", 0, 0.5, 8, 1),
    "bursts": (8, 60_000, "bfloat16", "avg", 0.1, 0.2, 8, 20),
    "half": (5, 256, "float32", "sum", 0.5, 0.5, 20, 1),
    "nine of ten": (6, 100_000, "float32", "sum", 0.9, 0, 1, 1),
    "many ranks, of whom some own nothing": (24, 5_000, "bfloat16", "sum", 0.02, 0, 1, 1),
}


def run(*words: object, test: str = "datagram_test", build: str = "memory") -> None:
    files = [path for path in CSRC.glob("*/*") if path.parent.name in ("core", "datagram")]
    program = program_of(
        build,
        [HERE / f"{test}.cpp", *(CSRC / f for f in PARTS)],
        include=CSRC,
        reads=[*files, *HERE.glob("*.h")],
    )
    done = subprocess.run(
        [str(program), *map(str, words)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]


@pytest.mark.parametrize("storm", STORMS)
def test_replicas_are_alike_and_the_error_and_time_are_bounded(storm: str) -> None:
    for seed in SEEDS:
        run("storm", seed, *STORMS[storm])


def test_storms_that_nobody_has_chosen() -> None:
    """Of drawn loss, order, duplicates, delays, forgeries, clocks, ranks, sizes and types."""
    for seed in SEEDS:
        run("random-storms", seed, RANDOM_STORMS)


@pytest.mark.parametrize(
    "case",
    ["stranger", "clocks", "silence", "one-way", "dead", "late", "unbiased", "feedback"],
)
def test_what_happens_to_ranks(case: str) -> None:
    for seed in SEEDS:
        run(case, seed)


@pytest.mark.parametrize("part", ["packets", "feedback", "pace", "socket"])
def test_what_it_is_made_of(part: str) -> None:
    for seed in SEEDS:
        run(part, seed, test="parts_test")


@pytest.mark.parametrize("part", ["runs", "queue"])
def test_runs_of_many_senders_that_meet_in_a_queue(part: str) -> None:
    """Optimised, for there are many packets; storms look after memory."""
    for seed in SEEDS:
        run(part, seed, test="incast_test", build="fast")
