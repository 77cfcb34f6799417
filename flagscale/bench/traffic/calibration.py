"""Calibration of burst sizes to a requested tail ratio (p99 ÷ p50 of the probe's times).

:func:`calibrate` is called by ``flagscale bench traffic --tail`` (:mod:`.cli`) with a running
session (:mod:`.session`). It has three phases, at a constant load:

1. Measure the path without traffic.
2. Adjust the burst size after every window, a short series of samples (:mod:`.steering`).
3. Hold the burst size and collect samples until the 95 % interval of the ratio is as narrow as
   the tolerance. If the interval leaves the target, correct the size and discard the samples.
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
MIN_WINDOW_BURSTS, MIN_HOLD_BURSTS = 50, 200
"""Minimum number of bursts of all flows, on average: in a window, and before the ratio of a held
burst size is used. With fewer bursts it depends on chance whether one operation in a hundred met
a burst.
"""
MAX_BURST_INTERVAL_SECONDS = 1.0
"""Longest mean time from one burst of a flow to its next. With longer intervals a 99th percentile
would take too long to measure.
"""
_MAX_WINDOWS, _MAX_REFINING_WINDOWS = 6, 3
_REFINED_WIDTH, _MAX_REFINED_SAMPLES = 2.5, 1600
"""A refining window ends when half of its interval is at most ``_REFINED_WIDTH`` tolerances wide,
or after ``_MAX_REFINED_SAMPLES``. Three of these windows take less time than holding a burst size
that is slightly wrong.
"""
_WINDOW_SECONDS = 12.0
MAX_HOLD_STEP = 0.4
"""Largest correction of ln(burst) in one step while the ratio is held near its target: a factor of
1.5 in the burst size."""
_SETTLE_SAMPLES = 10
"""Samples that are discarded after a change of the burst size."""
MAX_HELD_SAMPLES = 20000


class CalibrationListener(Protocol):
    """Receiver of the progress of a calibration."""

    def on_phase(self, text: str) -> None:
        """Called when a phase begins, with its description."""

    def on_samples(self, samples: Sequence[float]) -> None:
        """Called with the probe's times in seconds since the current window or phase began."""


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration."""

    environment: Environment
    """Environment with the calibrated burst size; if the target was missed, with the nearest."""
    seconds: float
    """Duration of the calibration."""
    windows: int
    """Number of windows whose ratio was used."""
    miss_reason: str = ""
    """Reason for missing the target; empty if the target was reached."""


def calibrate(
    traffic: Traffic,
    target: float,
    tolerance: float,
    limit_seconds: float,
    listener: CalibrationListener,
) -> Calibration:
    """Adjust a session's burst size until the probe's p99 ÷ p50 is ``target`` ± ``tolerance``,
    with a 95 % interval of at most ± ``tolerance``. The session keeps this burst size.

    Args:
        traffic: running session.
        target: requested ratio, above 1.
        tolerance: accepted error of the ratio and half width of its interval.
        limit_seconds: time after which the nearest result is returned.
        listener: receiver of the progress.

    Raises:
        UnreachableError: a host was lost.
    """
    deadline = time.monotonic() + limit_seconds
    return _CalibrationLoop(traffic, target, tolerance, deadline, listener).run()


class _CalibrationLoop:
    """State of one call of :func:`calibrate`. ``deadline`` is a time of ``time.monotonic``."""

    def __init__(
        self,
        traffic: Traffic,
        target: float,
        tolerance: float,
        deadline: float,
        listener: CalibrationListener,
    ) -> None:
        self._traffic, self._target, self._tolerance = traffic, target, tolerance
        self._deadline, self._listener = deadline, listener
        self._begin = time.monotonic()
        pattern = traffic.environment.pattern
        max_burst = min(
            LARGEST_BURST, max(2 * SMALLEST_BURST, pattern.load * MAX_BURST_INTERVAL_SECONDS / 8)
        )
        self._steering = Steering(target, min(pattern.burst, max_burst), max_burst=max_burst)
        self._window_count = 0
        self._best: Environment | None = None

    def run(self) -> Calibration:
        idle = self._measure_idle()
        traffic = self._traffic
        traffic.environment = replace(
            traffic.environment, target=self._target, tolerance=self._tolerance, idle=idle
        )
        if idle.low > self._target + self._tolerance:
            reason = f"this path without traffic is at {idle.label} already"
            return self._finish(replace(traffic.environment, found=idle), reason)
        self._apply_burst(self._steering.burst)
        for _ in range(_MAX_WINDOWS):
            if self._remaining() <= 0 or self._steering.is_stuck:
                break
            self._run_window()
        for _ in range(_MAX_REFINING_WINDOWS):
            if self._remaining() <= 0 or self._steering.is_stuck:
                break
            self._run_refining_window()
        return self._hold_burst()

    def _measure_idle(self) -> ProbeResult:
        self._listener.on_phase("the path without traffic")
        self._traffic.pause()
        times = self._sample(IDLE_SAMPLES)
        self._traffic.resume()
        return summarize(times, self._seed)

    def _run_window(self) -> None:
        """Measure one window and adjust the burst size."""
        burst = self._traffic.environment.pattern.burst
        self._listener.on_phase(f"steering: bursts of {format_bytes(burst)}")
        begin = time.monotonic()
        times = self._sample(WINDOW_SAMPLES, min(_WINDOW_SECONDS, self._remaining()))
        seconds = time.monotonic() - begin
        extra_seconds = min(
            self._seconds_until(MIN_WINDOW_BURSTS, begin),
            _WINDOW_SECONDS - seconds,
            self._remaining(),
        )
        if extra_seconds > 0:
            count = math.ceil(len(times) * extra_seconds / seconds)
            times += self._sample(count, extra_seconds, earlier=tuple(times))
        self._record_window(times)

    def _run_refining_window(self) -> None:
        """Measure a longer window and adjust the burst size."""
        burst = self._traffic.environment.pattern.burst
        self._listener.on_phase(f"refining: bursts of {format_bytes(burst)}")
        begin = time.monotonic()
        times: list[float] = []
        while self._remaining() > 0 and len(times) < _MAX_REFINED_SAMPLES:
            times += self._sample(BATCH_SAMPLES, self._remaining(), earlier=tuple(times))
            is_wide = summarize(times, self._seed).half_width > _REFINED_WIDTH * self._tolerance
            if not is_wide and self._seconds_until(MIN_WINDOW_BURSTS, begin) <= 0:
                break
        if times:
            self._record_window(times, MAX_HOLD_STEP)

    def _seconds_until(self, bursts: int, begin: float) -> float:
        """Return the expected seconds until ``bursts`` bursts of all flows have been sent since
        ``begin``. Negative if this time is over.
        """
        pattern, flows = self._traffic.environment.pattern, len(self._traffic.environment.flows)
        burst_interval = 8 * pattern.burst / pattern.load / flows
        return begin + bursts * burst_interval - time.monotonic()

    def _record_window(self, times: Sequence[float], max_step: float = math.log(4)) -> None:
        """Change the burst size according to a window's times, by at most exp(``max_step``)."""
        result = summarize(times, self._seed)
        self._window_count += 1
        burst = self._traffic.environment.pattern.burst
        burst = self._steering.record_window(burst, result.ratio, result.samples, max_step)
        self._apply_burst(burst)

    def _apply_burst(self, burst: float) -> None:
        self._traffic.change(replace(self._traffic.environment.pattern, burst=burst))
        self._sample(_SETTLE_SAMPLES)

    def _hold_burst(self) -> Calibration:
        """Collect samples until the interval is narrow enough, or the time is over."""
        times: list[float] = []
        begin = time.monotonic()
        while True:
            burst = self._traffic.environment.pattern.burst
            self._listener.on_phase(f"holding bursts of {format_bytes(burst)}")
            times += self._sample(BATCH_SAMPLES, max(1.0, self._remaining()), earlier=tuple(times))
            result = summarize(times, self._seed)
            environment = replace(self._traffic.environment, found=result)
            enough_bursts = self._seconds_until(MIN_HOLD_BURSTS, begin) <= 0
            if enough_bursts or self._best is None:
                self._keep_best(environment)
            if enough_bursts and environment.reached and result.half_width <= self._tolerance:
                return self._finish(environment)
            timed_out = self._remaining() <= 0
            if timed_out or len(times) >= MAX_HELD_SAMPLES or self._steering.is_stuck:
                return self._finish_missed()
            if enough_bursts and self._is_off_target(result):
                self._record_window(times, MAX_HOLD_STEP)
                times, begin = [], time.monotonic()

    def _is_off_target(self, result: ProbeResult) -> bool:
        """Return whether the ratio differs from the target by more than the tolerance. With an
        interval wider than the tolerance, only if all of the interval does.
        """
        low, high = self._target - self._tolerance, self._target + self._tolerance
        if result.half_width <= self._tolerance:
            return not low <= result.ratio <= high
        return result.high < low or result.low > high

    def _keep_best(self, environment: Environment) -> None:
        """Keep ``environment`` as the best one if it is nearer to the target than the best so far,
        or a later result of the same burst size.
        """

        def distance(candidate: Environment) -> float:
            result = candidate.found
            return abs(result.ratio / self._target - 1) if result else float("inf")

        same_pattern = self._best is not None and self._best.pattern == environment.pattern
        if self._best is None or same_pattern or distance(environment) < distance(self._best):
            self._best = environment

    def _finish_missed(self) -> Calibration:
        """Return the nearest result, with the reason for missing the target."""
        best = self._best or self._traffic.environment
        result = best.found
        if best.pattern != self._traffic.environment.pattern:
            self._apply_burst(best.pattern.burst)
        outcome = result.label if result else "nothing"
        reason = f"bursts of {format_bytes(best.pattern.burst)} gave {outcome}"
        if self._steering.is_stuck:
            reason = f"no burst reaches it at this load on this path: {reason}"
        elif best.reached:
            width = f"the interval is wider than ± {self._tolerance:g}"
            reason = f"{width} after {self._elapsed:.0f} s: {reason}"
        else:
            reason = f"not reached within {self._elapsed:.0f} s: {reason}"
        return self._finish(best, reason)

    def _finish(self, environment: Environment, miss_reason: str = "") -> Calibration:
        self._traffic.environment = environment
        return Calibration(environment, self._elapsed, self._window_count, miss_reason)

    def _sample(
        self,
        count: int,
        seconds: float = 30.0,
        earlier: Sequence[float] = (),
    ) -> list[float]:
        """Return ``count`` times of the probe in seconds, or fewer after ``seconds``. The listener
        is called with the ``earlier`` times of the same window in front of these.
        """
        return self._traffic.sample(
            count, seconds, lambda times: self._listener.on_samples([*earlier, *times])
        )

    def _remaining(self) -> float:
        """Return the seconds until the deadline; negative afterwards."""
        return self._deadline - time.monotonic()

    @property
    def _elapsed(self) -> float:
        """Seconds since the calibration began."""
        return time.monotonic() - self._begin

    @property
    def _seed(self) -> int:
        return self._traffic.environment.pattern.seed
