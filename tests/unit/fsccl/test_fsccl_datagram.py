"""Tests of the bounded all_reduce over a simulated network that loses, duplicates and forges
packets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.compiled import compile_program
from support.waiting import PATIENCE_SECONDS

DATAGRAM_TESTS = Path(__file__).parent / "datagram"
CSRC = Path(__file__).parents[3] / "flagscale" / "comm" / "fsccl" / "csrc"
SOURCES = (
    "datagram/session.cpp",
    "datagram/transfer.cpp",
    "datagram/socket.cpp",
    "core/types.cpp",
    "core/reduce.cpp",
    "core/socket.cpp",
)
RANDOM_STORMS = 15
SEEDS = range(int(os.environ.get("FLAGSCALE_DATAGRAM_SEEDS", "2")))

pytestmark = [pytest.mark.integration, pytest.mark.compiler]

# Ranks, bytes, type, reduction; shares lost and duplicated, maximum delay in ms, mean length of a
# loss burst in packets.
STORMS = {
    "nothing lost": (4, 40_000, "float32", "sum", 0, 0, 0.2, 1),
    "two of three elements per rank": (3, 128, "float32", "sum", 0.02, 0.1, 0.5, 1),
    "two ranks": (2, 5_000, "float32", "sum", 0.05, 0.1, 1, 1),
    "one in a hundred": (3, 99_998, "float16", "avg", 0.01, 0.01, 1, 1),
    "reordered and duplicated": (4, 60_000, "float64", "avg", 0, 0.5, 8, 1),
    "bursts": (8, 60_000, "bfloat16", "avg", 0.1, 0.2, 8, 20),
    "half": (5, 256, "float32", "sum", 0.5, 0.5, 20, 1),
    "nine of ten": (6, 100_000, "float32", "sum", 0.9, 0, 1, 1),
    "many ranks, some without a shard": (24, 5_000, "bfloat16", "sum", 0.02, 0, 1, 1),
}


def run(*arguments: object, test: str = "datagram_test", build: str = "memory") -> None:
    """Compile and run a test program and check that it succeeds."""
    core_and_datagram = [
        path for path in CSRC.glob("*/*") if path.parent.name in ("core", "datagram")
    ]
    program = compile_program(
        build,
        [DATAGRAM_TESTS / f"{test}.cpp", *(CSRC / source for source in SOURCES)],
        include=CSRC,
        dependencies=[*core_and_datagram, *DATAGRAM_TESTS.glob("*.h")],
    )
    result = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr[-4000:]


@pytest.mark.parametrize("storm", STORMS)
def test_replicas_are_identical_and_error_and_time_are_bounded(storm: str) -> None:
    for seed in SEEDS:
        run("storm", seed, *STORMS[storm])


def test_random_storms() -> None:
    """Loss, order, duplicates, delays, forgeries, clocks, ranks, sizes and types are random."""
    for seed in SEEDS:
        run("random-storms", seed, RANDOM_STORMS)


@pytest.mark.parametrize(
    "scenario",
    [
        "forged-packets",
        "clock-jumps",
        "no-datagrams",
        "one-way-loss",
        "dead-rank",
        "late-rank",
        "unbiased-scaling",
        "error-feedback",
    ],
)
def test_failure_scenarios(scenario: str) -> None:
    for seed in SEEDS:
        run(scenario, seed)


@pytest.mark.parametrize("unit", ["packets", "error-feedback", "rate-controller", "socket"])
def test_units(unit: str) -> None:
    for seed in SEEDS:
        run(unit, seed, test="units_test")


@pytest.mark.parametrize("scenario", ["runs", "queue"])
def test_run_length_under_incast(scenario: str) -> None:
    """Built with optimisation, because there are many packets; the storms check memory."""
    for seed in SEEDS:
        run(scenario, seed, test="incast_test", build="fast")
