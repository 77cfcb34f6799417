"""Tests of the calibration of burst sizes, on a simulated path with a simulated clock.

On this path operations are hit by bursts at random, and their delay depends on the burst size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flagscale.bench.traffic import calibration
from flagscale.bench.traffic.calibration import Calibration, calibrate
from flagscale.bench.traffic.spec import (
    Environment,
    Pattern,
    TrafficHost,
    default_tolerance,
    flows_between,
)

MEDIAN_SECONDS = 0.01


class SimulatedPath:
    """Stand-in for :class:`~flagscale.bench.traffic.session.Traffic` and for the module ``time``.

    An operation that is hit by a burst takes ``tail(burst)`` times as long.
    """

    def __init__(self, tail: Callable[[float], float], seed: int, noise: float = 0.03) -> None:
        hosts = tuple(TrafficHost(f"h{i}", f"10.0.0.{i}") for i in range(4))
        pattern = Pattern(250e6, 15e6, 64 << 10, seed=seed)
        self.environment = Environment(hosts, flows_between(4, "pairs"), pattern)
        self.tail, self.noise, self.now, self.is_playing = tail, noise, 100.0, True
        self._draw = np.random.default_rng(seed)

    def monotonic(self) -> float:
        return self.now

    def pause(self) -> None:
        self.is_playing = False

    def resume(self) -> None:
        self.is_playing = True

    def change(self, pattern: Pattern) -> None:
        self.environment = replace(self.environment, pattern=pattern, found=None)

    def sample(
        self, count: int, seconds: float, on_samples: Callable[[Sequence[float]], None]
    ) -> list[float]:
        """Return times of operations, of which about one in forty is hit by a burst. A burst hits
        three consecutive operations.
        """
        count = max(1, min(count, int(seconds / MEDIAN_SECONDS)))
        begins = self._draw.random(count + 2) < 1 / 120
        is_hit = np.convolve(begins, np.ones(3), "valid")[:count] > 0
        delay_factor = (
            self.tail(self.environment.pattern.burst) if self.is_playing else self.tail(0)
        )
        times = np.exp(self.noise * self._draw.standard_normal(count)) * np.where(
            is_hit, delay_factor, 1
        )
        self.now += float(MEDIAN_SECONDS * times.sum())
        on_samples(list(times))
        return [float(t) for t in MEDIAN_SECONDS * times]


class SilentListener:
    def on_phase(self, text: str) -> None: ...
    def on_samples(self, samples: Sequence[float]) -> None: ...


def tail_of_burst(burst: float) -> float:
    """Return the tail ratio of a burst size: 1.06 at 1 KiB, 1.5 at 36 KiB, 3 at 360 KiB."""
    return 1 + float((burst / (115 << 10)) ** 0.6)


def _calibrate(
    path: SimulatedPath, target: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> Calibration:
    monkeypatch.setattr(calibration, "time", path)
    traffic: Any = path
    return calibrate(traffic, target, default_tolerance(target), seconds, SilentListener())


@pytest.mark.parametrize("target", [1.5, 3.0])
def test_calibration_reaches_the_target(target: float, monkeypatch: pytest.MonkeyPatch) -> None:
    path = SimulatedPath(tail_of_burst, seed=0)
    calibration_result = _calibrate(path, target, 600, monkeypatch)
    result, tolerance = calibration_result.environment.found, default_tolerance(target)
    assert calibration_result.miss_reason == ""
    assert result is not None
    assert calibration_result.environment.reached
    assert result.half_width <= tolerance
    assert tail_of_burst(calibration_result.environment.pattern.burst) == pytest.approx(
        target, abs=1.5 * tolerance
    )
    # The session has the environment that is reported.
    assert path.environment == calibration_result.environment
    assert path.is_playing
    assert calibration_result.environment.idle is not None
    assert calibration_result.environment.idle.ratio < 1.2
    assert calibration_result.seconds < 300
    assert calibration_result.windows >= 6


MISSED: dict[str, tuple[Callable[[float], float], float, float, float, str]] = {
    "no burst": (
        lambda burst: 1.2,
        0.03,
        3.0,
        600,
        "no burst reaches it at this load on this path",
    ),
    "above already": (tail_of_burst, 0.5, 1.5, 600, "this path without traffic is at 3"),
    "too short": (tail_of_burst, 0.03, 3.0, 8, "s: bursts of"),
}


@pytest.mark.parametrize("case", MISSED)
def test_missed_target_is_reported_with_the_nearest_result(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, noise, target, seconds, reason = MISSED[case]
    path = SimulatedPath(tail, 3, noise)
    calibration_result = _calibrate(path, target, seconds, monkeypatch)
    assert reason in calibration_result.miss_reason
    assert calibration_result.environment.found is not None
    assert path.environment == calibration_result.environment
    assert calibration_result.seconds < max(seconds, 200) + 5
