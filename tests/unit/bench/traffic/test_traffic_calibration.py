"""The loop that calibrates, on a path that is played in a time of its own: its operations meet
bursts by chance, and are held up by how large these are."""

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

MEDIAN = 0.01


class Path:
    """As :class:`~flagscale.bench.traffic.session.Traffic`, whose probe feels ``tail(burst)``."""

    def __init__(self, tail: Callable[[float], float], seed: int, noise: float = 0.03) -> None:
        hosts = tuple(TrafficHost(f"h{i}", f"10.0.0.{i}") for i in range(4))
        pattern = Pattern(250e6, 15e6, 64 << 10, seed=seed)
        self.environment = Environment(hosts, flows_between(4, "pairs"), pattern)
        self.tail, self.noise, self.now, self.playing = tail, noise, 100.0, True
        self._draw = np.random.default_rng(seed)

    def monotonic(self) -> float:
        return self.now

    def pause(self) -> None:
        self.playing = False

    def resume(self) -> None:
        self.playing = True

    def change(self, pattern: Pattern) -> None:
        self.environment = replace(self.environment, pattern=pattern, found=None)

    def sample(
        self, count: int, seconds: float, watch: Callable[[Sequence[float]], None]
    ) -> list[float]:
        """Runs of three operations meet a burst, one operation in forty."""
        count = max(1, min(count, int(seconds / MEDIAN)))
        begins = self._draw.random(count + 2) < 1 / 120
        hit = np.convolve(begins, np.ones(3), "valid")[:count] > 0
        held = self.tail(self.environment.pattern.burst) if self.playing else self.tail(0)
        times = np.exp(self.noise * self._draw.standard_normal(count)) * np.where(hit, held, 1)
        self.now += float(MEDIAN * times.sum())
        watch(list(times))
        return [float(t) for t in MEDIAN * times]


class Silent:
    def on_phase(self, text: str) -> None: ...
    def on_samples(self, samples: Sequence[float]) -> None: ...


def grows(burst: float) -> float:
    """1.06 at 1 KiB, 1.5 at 36 KiB, 3 at 360 KiB."""
    return 1 + float((burst / (115 << 10)) ** 0.6)


def _calibrate(
    path: Path, target: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> Calibration:
    monkeypatch.setattr(calibration, "time", path)
    on: Any = path
    return calibrate(on, target, default_tolerance(target), seconds, Silent())


@pytest.mark.parametrize("target", [1.5, 3.0])
def test_calibration_reaches_the_target(target: float, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(grows, seed=0)
    done = _calibrate(path, target, 600, monkeypatch)
    found, tolerance = done.environment.found, default_tolerance(target)
    assert done.why == ""
    assert found is not None
    assert done.environment.reached
    assert found.half_width <= tolerance
    assert grows(done.environment.pattern.burst) == pytest.approx(target, abs=1.5 * tolerance)
    # What it says is what is played.
    assert path.environment == done.environment
    assert path.playing
    assert done.environment.idle is not None
    assert done.environment.idle.ratio < 1.2
    assert done.seconds < 300
    assert done.windows >= 6


MISSED: dict[str, tuple[Callable[[float], float], float, float, float, str]] = {
    "no burst": (
        lambda burst: 1.2,
        0.03,
        3.0,
        600,
        "no burst reaches it at this load on this path",
    ),
    "above already": (grows, 0.5, 1.5, 600, "this path without traffic is at 3"),
    "too short": (grows, 0.03, 3.0, 8, "s: bursts of"),
}


@pytest.mark.parametrize("case", MISSED)
def test_missed_target_is_reported_with_the_nearest_result(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, noise, target, seconds, told = MISSED[case]
    path = Path(tail, 3, noise)
    done = _calibrate(path, target, seconds, monkeypatch)
    assert told in done.why
    assert done.environment.found is not None
    assert path.environment == done.environment
    assert done.seconds < max(seconds, 200) + 5
