"""Tests of the number of measurements of a hardware check."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from flagscale.accelerators.health import Rate
from flagscale.health.judgement import Severity
from flagscale.health.messages import DeviceMeasurement, HealthEvent
from flagscale.health.passes import Passes, measure_in_passes

HOSTS = 8
CHECKS = ("matrix product", "memory copy", "all_reduce")
MOST_PASSES = 5

Factor = Callable[[int, int], float]
"""Rate of a host in a pass, relative to the usual one."""


def run_check(factor: Factor, *, full: bool = False) -> Passes:
    """Check hosts without devices and without addresses, so that no pairs are measured."""
    generator = random.Random(0)
    ready = {host: HealthEvent("ready", device="cpu", ranks=1) for host in range(HOSTS)}
    steps = measure_in_passes(ready, {}, "check", full=full)
    batch = next(steps)
    for number in range(MOST_PASSES + 1):
        replies = {
            host: HealthEvent("measured", devices=(measure(factor(host, number), generator),))
            for host in batch.commands
        }
        try:
            batch = steps.send(replies)
        except StopIteration as end:
            passes: Passes = end.value
            return passes
    raise AssertionError("the check does not end")


def measure(factor: float, generator: random.Random) -> DeviceMeasurement:
    rates = [Rate(name, 100 * factor * generator.gauss(1, 0.005), "GB/s") for name in CHECKS]
    return DeviceMeasurement("CPU device 0", "processor", is_host=True, rates=tuple(rates))


def slow_host(share: float) -> Factor:
    return lambda host, _: share if host == 3 else 1.0


@pytest.mark.parametrize(
    ("factor", "full", "count", "sick"),
    [
        pytest.param(slow_host(1.0), False, 1, [], id="equal"),
        pytest.param(slow_host(1.0), True, 2, [], id="equal, full"),
        pytest.param(slow_host(0.8), False, 2, [3], id="slow"),
        pytest.param(
            lambda host, number: 0.8 if host == 3 and number == 0 else 1.0, False, 2, [], id="once"
        ),
        pytest.param(
            # The others differ by more than what this one lacks.
            lambda host, number: 0.87 if host == 3 else 1 + 0.05 * (-1) ** host,
            False,
            MOST_PASSES,
            [],
            id="within the noise",
        ),
    ],
)
def test_number_of_passes(factor: Factor, full: bool, count: int, sick: list[int]) -> None:
    passes = run_check(factor, full=full)
    assert len(passes.measurements) == count
    assert passes.judgement.hosts_with(Severity.SICK) == sick
