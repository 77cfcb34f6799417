"""Tests of the processes that measure: their replies, and what remains of those that end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from flagscale.accelerators.registry import CPU
from flagscale.health import ranks
from flagscale.health.messages import DeviceMeasurement

pytestmark = pytest.mark.torch


@pytest.fixture
def two_ranks() -> Iterator[ranks.RankProcesses]:
    processes = ranks.RankProcesses(CPU, 2, 1)
    yield processes
    processes.close()


def exchange(processes: ranks.RankProcesses, name: str, world: int = 2) -> list[object]:
    jobs = [
        ranks.ExchangeJob("exchange", name, "localhost", processes.port, rank, world, 0.01, 5.0)
        for rank in range(2)
    ]
    return list(processes.run(jobs, 20.0))


def test_ranks_measure_and_exchange(two_ranks: ranks.RankProcesses) -> None:
    measured = two_ranks.run([ranks.MeasureJob(0.01)] * 2, 60.0)
    assert all(isinstance(reply, DeviceMeasurement) for reply in measured)
    assert {rate.name for rate in measured[0].rates} == {"matrix product", "memory copy"}
    assert all(rate > 0 for rate in exchange(two_ranks, "first"))
    assert all(rate > 0 for rate in exchange(two_ranks, "second"))
    assert two_ranks.run_on({1: ranks.HostCopyJob(0.01)}, 20.0) == [()]


def test_rank_that_hangs_is_reported_and_started_again(
    two_ranks: ranks.RankProcesses,
) -> None:
    (first, _) = two_ranks.run([ranks.MeasureJob(0.01)] * 2, 60.0)
    os.kill(two_ranks.pids[1], signal.SIGSTOP)
    (stopped,) = two_ranks.run_on({1: ranks.MeasureJob(0.01)}, 0.2)
    assert stopped == ranks.Problem("no answer within 0.2 s")
    (again,) = two_ranks.run_on({1: ranks.MeasureJob(0.01)}, 60.0)
    assert isinstance(again, DeviceMeasurement) and again.product == first.product


def test_partner_that_does_not_come_is_a_problem(two_ranks: ranks.RankProcesses) -> None:
    lone = ranks.ExchangeJob("exchange", "lone", "localhost", two_ranks.port, 0, 2, 0.01, 1.0)
    (reply,) = two_ranks.run([lone], 20.0)
    assert isinstance(reply, ranks.Problem) and reply.reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("[/pytorch/gloo/tcp/unbound_buffer.cc:129] Timed out waiting", "Timed out waiting"),
        ("CUDA error: no\nmore", "CUDA error: no"),
        ("", "RuntimeError"),
    ],
)
def test_error_is_one_line(message: str, reason: str) -> None:
    assert ranks.describe_error(RuntimeError(message)) == reason
