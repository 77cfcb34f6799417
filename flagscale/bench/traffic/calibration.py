"""Calibration of burst sizes to a tail ratio.

The path is measured without traffic first. Short windows then steer the burst size
(:mod:`.steering`). Finally the size is held, and samples are collected until the 95 % interval
of the ratio is as narrow as the tolerance. If the interval leaves the target, the size is
corrected and the samples start anew. The load stays constant.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flagscale.bench.traffic.session import Traffic
from flagscale.bench.traffic.spec import (
    LARGEST_BURST,
    SMALLEST_BURST,
    Environment,
    ProbeResult,
    format_bytes,
)
from flagscale.bench.traffic.steering import Steering
from flagscale.bench.traffic.summary import summarize

IDLE_SAMPLES = 400
WINDOW_SAMPLES = 200
BATCH_SAMPLES = 400
WINDOW_BURSTS, HOLD_BURSTS = 50, 200
"""Least number of bursts of all flows, on average: in a window, and before the ratio of held
bursts is used. With fewer it depends on chance whether one operation in a hundred met a
burst.
"""
LARGEST_CYCLE = 1.0
"""Longest mean time from one burst of a flow to its next, in seconds. With longer cycles a 99th
percentile would take too long to measure.
"""
_WINDOWS, _REFINING = 6, 3
_REFINED_WIDTH, _REFINED_SAMPLES = 2.5, 1600
"""A refining window ends when its interval is that many tolerances wide, or after so many
samples. Three of them take less time than holding a burst size that is slightly wrong.
"""
_WINDOW_SECONDS = 12.0
HELD_REACH = 0.4
"""Largest correction of held bursts: a factor of 1.5."""
_SETTLE_SAMPLES = 10
MOST_SAMPLES = 20000


class CalibrationListener(Protocol):
    """Receiver of the progress of a calibration."""

    def on_phase(self, text: str) -> None:
        """Called when a phase begins."""

    def on_samples(self, samples: Sequence[float]) -> None:
        """Called with the probe's times since the phase or the last window began."""


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration. ``why`` is the reason for missing the target; empty if it was
    reached.
    """

    environment: Environment
    seconds: float
    windows: int
    why: str = ""


def calibrate(
    traffic: Traffic, target: float, tolerance: float, seconds: float, listener: CalibrationListener
) -> Calibration:
    """Steer a session's burst size until the probe's p99 ÷ p50 is ``target`` ± ``tolerance``
    with a sufficiently narrow interval. The bursts stay in effect.

    Raises:
        UnreachableError: a host was lost.
    """
    return _CalibrationLoop(traffic, target, tolerance, time.monotonic() + seconds, listener).run()


class _CalibrationLoop:
    def __init__(
        self,
        traffic: Traffic,
        target: float,
        tolerance: float,
        deadline: float,
        teller: CalibrationListener,
    ) -> None:
        self._traffic, self._target, self._tolerance = traffic, target, tolerance
        self._deadline, self._listener = deadline, teller
        self._begin = time.monotonic()
        pattern = traffic.environment.pattern
        most = min(LARGEST_BURST, max(2 * SMALLEST_BURST, pattern.load * LARGEST_CYCLE / 8))
        self._steering = Steering(target, min(pattern.burst, most), most=most)
        self._windows = 0
        self._best: Environment | None = None

    def run(self) -> Calibration:
        idle = self._measure_idle()
        traffic = self._traffic
        traffic.environment = replace(
            traffic.environment, target=self._target, tolerance=self._tolerance, idle=idle
        )
        if idle.low > self._target + self._tolerance:
            why = f"this path without traffic is at {idle.label} already"
            return self._finish(replace(traffic.environment, found=idle), why)
        self._apply_burst(self._steering.burst)
        for _ in range(_WINDOWS):
            if self._remaining() <= 0 or self._steering.stuck:
                break
            self._steer()
        for _ in range(_REFINING):
            if self._remaining() <= 0 or self._steering.stuck:
                break
            self._refine()
        return self._hold()

    def _measure_idle(self) -> ProbeResult:
        self._listener.on_phase("the path without traffic")
        self._traffic.pause()
        times = self._sample(IDLE_SAMPLES)
        self._traffic.resume()
        return summarize(times, self._seed)

    def _steer(self) -> None:
        """Take one step of the control loop."""
        burst = self._traffic.environment.pattern.burst
        self._listener.on_phase(f"steering: bursts of {format_bytes(burst)}")
        begin = time.monotonic()
        times = self._sample(WINDOW_SAMPLES, min(_WINDOW_SECONDS, self._remaining()))
        seconds = time.monotonic() - begin
        extra_seconds = min(
            self._seconds_until(WINDOW_BURSTS, begin), _WINDOW_SECONDS - seconds, self._remaining()
        )
        if extra_seconds > 0:
            count = math.ceil(len(times) * extra_seconds / seconds)
            times += self._sample(count, extra_seconds, before=tuple(times))
        self._record_window(times)

    def _refine(self) -> None:
        """Take one step of the control loop with a longer window."""
        burst = self._traffic.environment.pattern.burst
        self._listener.on_phase(f"refining: bursts of {format_bytes(burst)}")
        begin = time.monotonic()
        times: list[float] = []
        while self._remaining() > 0 and len(times) < _REFINED_SAMPLES:
            times += self._sample(BATCH_SAMPLES, self._remaining(), before=tuple(times))
            wide = summarize(times, self._seed).half_width > _REFINED_WIDTH * self._tolerance
            if not wide and self._seconds_until(WINDOW_BURSTS, begin) <= 0:
                break
        if times:
            self._record_window(times, HELD_REACH)

    def _seconds_until(self, bursts: int, begin: float) -> float:
        """Return the expected seconds until so many bursts have been sent since ``begin``."""
        pattern, flows = self._traffic.environment.pattern, len(self._traffic.environment.flows)
        cycle = 8 * pattern.burst / pattern.load / flows
        return begin + bursts * cycle - time.monotonic()

    def _record_window(self, times: Sequence[float], reach: float = math.log(4)) -> None:
        result = summarize(times, self._seed)
        self._windows += 1
        burst = self._traffic.environment.pattern.burst
        self._apply_burst(self._steering.record_window(burst, result.ratio, result.samples, reach))

    def _apply_burst(self, burst: float) -> None:
        self._traffic.change(replace(self._traffic.environment.pattern, burst=burst))
        self._sample(_SETTLE_SAMPLES)

    def _hold(self) -> Calibration:
        """Collect samples until the interval is narrow enough, or the time is over."""
        times: list[float] = []
        begin = time.monotonic()
        while True:
            burst = self._traffic.environment.pattern.burst
            self._listener.on_phase(f"holding bursts of {format_bytes(burst)}")
            times += self._sample(BATCH_SAMPLES, max(1.0, self._remaining()), before=tuple(times))
            result = summarize(times, self._seed)
            environment = replace(self._traffic.environment, found=result)
            enough_bursts = self._seconds_until(HOLD_BURSTS, begin) <= 0
            if enough_bursts or self._best is None:
                self._keep_best(environment)
            if enough_bursts and environment.reached and result.half_width <= self._tolerance:
                return self._finish(environment)
            if self._remaining() <= 0 or len(times) >= MOST_SAMPLES or self._steering.stuck:
                return self._finish_missed()
            if enough_bursts and self._is_outside(result):
                self._record_window(times, HELD_REACH)
                times, begin = [], time.monotonic()

    def _is_outside(self, result: ProbeResult) -> bool:
        """Return whether the ratio differs from the target, as far as the interval shows."""
        low, high = self._target - self._tolerance, self._target + self._tolerance
        if result.half_width <= self._tolerance:
            return not low <= result.ratio <= high
        return result.high < low or result.low > high

    def _keep_best(self, environment: Environment) -> None:
        """Keep the environment that is nearest to the target."""

        def distance(candidate: Environment) -> float:
            result = candidate.found
            return abs(result.ratio / self._target - 1) if result else float("inf")

        same = self._best is not None and self._best.pattern == environment.pattern
        if self._best is None or same or distance(environment) < distance(self._best):
            self._best = environment

    def _finish_missed(self) -> Calibration:
        """Return the nearest result, with the reason for missing the target."""
        best = self._best or self._traffic.environment
        result = best.found
        if best.pattern != self._traffic.environment.pattern:
            self._apply_burst(best.pattern.burst)
        outcome = result.label if result else "nothing"
        why = f"bursts of {format_bytes(best.pattern.burst)} gave {outcome}"
        if self._steering.stuck:
            why = f"no burst reaches it at this load on this path: {why}"
        elif best.reached:
            width = f"the interval is wider than ± {self._tolerance:g}"
            why = f"{width} after {self._seconds:.0f} s: {why}"
        else:
            why = f"not reached within {self._seconds:.0f} s: {why}"
        return self._finish(best, why)

    def _finish(self, environment: Environment, why: str = "") -> Calibration:
        self._traffic.environment = environment
        return Calibration(environment, self._seconds, self._windows, why)

    def _sample(
        self,
        count: int,
        seconds: float = 30.0,
        before: Sequence[float] = (),
    ) -> list[float]:
        """Return times of the probe. ``before`` are shown with them."""
        return self._traffic.sample(
            count, seconds, lambda new: self._listener.on_samples([*before, *new])
        )

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    @property
    def _seed(self) -> int:
        return self._traffic.environment.pattern.seed
