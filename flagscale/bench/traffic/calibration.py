"""Finding the bursts that give a tail, and holding it.

The path is felt without traffic first. Then short windows steer the bursts (:mod:`.steering`); then
they are held, and samples gathered until the 95 % interval of the ratio is as narrow as the
tolerance. Where the interval leaves the target, the bursts are corrected and the samples begin
anew. The load stays what it is.
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
    Found,
    binary,
)
from flagscale.bench.traffic.statistics import found
from flagscale.bench.traffic.steering import Steering

IDLE_SAMPLES = 400
WINDOW_SAMPLES = 200
BATCH_SAMPLES = 400
WINDOW_BURSTS, HOLD_BURSTS = 50, 200
"""Bursts of all flows, on average, that a window holds at least, and what is believed of one that
is held. With fewer it is chance whether a hundredth of the operations met any."""
LARGEST_CYCLE = 1.0
"""Seconds from one burst of a flow to its next, on average. Bursts of a longer cycle are too few
for a 99th percentile that anybody could wait for."""
_WINDOWS, _REFINING = 6, 3
_REFINED_WIDTH, _REFINED_SAMPLES = 2.5, 1600
"""A window that refines is over when its interval is that many tolerances wide, or has so many
samples. Three of them cost less than to hold bursts that turn out to be a little off."""
_WINDOW_SECONDS = 12.0
HELD_REACH = 0.4
"""Of a correction of bursts that are held: a factor of 1.5."""
_SETTLE_SAMPLES = 10
MOST_SAMPLES = 20000


class Teller(Protocol):
    """Who is told how far calibration is."""

    def phase(self, text: str) -> None:
        """What begins now."""

    def watch(self, samples: Sequence[float]) -> None:
        """Times of the probe that have come since the phase began, or since the last window."""


@dataclass(frozen=True)
class Calibration:
    """What was found. ``why`` says, in words, what kept it from its target; empty where nothing."""

    environment: Environment
    seconds: float
    windows: int
    why: str = ""


def calibrate(
    traffic: Traffic, target: float, tolerance: float, seconds: float, teller: Teller
) -> Calibration:
    """Steer a session's bursts until the probe's p99 ÷ p50 is ``target`` ± ``tolerance``, and known
    that well; the bursts stay.

    Raises:
        UnreachableError: a host was lost.
    """
    return _Loop(traffic, target, tolerance, time.monotonic() + seconds, teller).run()


class _Loop:
    def __init__(
        self, traffic: Traffic, target: float, tolerance: float, deadline: float, teller: Teller
    ) -> None:
        self._traffic, self._target, self._tolerance = traffic, target, tolerance
        self._deadline, self._teller = deadline, teller
        self._begin = time.monotonic()
        pattern = traffic.environment.pattern
        most = min(LARGEST_BURST, max(2 * SMALLEST_BURST, pattern.load * LARGEST_CYCLE / 8))
        self._steering = Steering(target, min(pattern.burst, most), most=most)
        self._windows = 0
        self._best: Environment | None = None

    def run(self) -> Calibration:
        idle = self._feel_idle()
        traffic = self._traffic
        traffic.environment = replace(
            traffic.environment, target=self._target, tolerance=self._tolerance, idle=idle
        )
        if idle.low > self._target + self._tolerance:
            why = f"this path without traffic is at {idle.words} already"
            return self._over(replace(traffic.environment, found=idle), why)
        self._set(self._steering.burst)
        for _ in range(_WINDOWS):
            if self._left() <= 0 or self._steering.stuck:
                break
            self._window()
        for _ in range(_REFINING):
            if self._left() <= 0 or self._steering.stuck:
                break
            self._refine()
        return self._hold()

    def _feel_idle(self) -> Found:
        self._teller.phase("the path without traffic")
        self._traffic.pause()
        times = self._sample(IDLE_SAMPLES)
        self._traffic.resume()
        return found(times, self._seed)

    def _window(self) -> None:
        """One step of the loop."""
        burst = self._traffic.environment.pattern.burst
        self._teller.phase(f"steering: bursts of {binary(burst)}")
        begin = time.monotonic()
        times = self._sample(WINDOW_SAMPLES, min(_WINDOW_SECONDS, self._left()))
        seconds = time.monotonic() - begin
        more = min(self._short(WINDOW_BURSTS, begin), _WINDOW_SECONDS - seconds, self._left())
        if more > 0:
            count = math.ceil(len(times) * more / seconds)
            times += self._sample(count, more, before=tuple(times))
        self._learn(times)

    def _refine(self) -> None:
        """One step of the loop by a longer window."""
        burst = self._traffic.environment.pattern.burst
        self._teller.phase(f"refining: bursts of {binary(burst)}")
        begin = time.monotonic()
        times: list[float] = []
        while self._left() > 0 and len(times) < _REFINED_SAMPLES:
            times += self._sample(BATCH_SAMPLES, self._left(), before=tuple(times))
            wide = found(times, self._seed).half_width > _REFINED_WIDTH * self._tolerance
            if not wide and self._short(WINDOW_BURSTS, begin) <= 0:
                break
        if times:
            self._learn(times, HELD_REACH)

    def _short(self, bursts: int, begin: float) -> float:
        """Seconds until so many bursts have come since ``begin``, on average."""
        pattern, flows = self._traffic.environment.pattern, len(self._traffic.environment.flows)
        cycle = 8 * pattern.burst / pattern.load / flows
        return begin + bursts * cycle - time.monotonic()

    def _learn(self, times: Sequence[float], reach: float = math.log(4)) -> None:
        seen = found(times, self._seed)
        self._windows += 1
        burst = self._traffic.environment.pattern.burst
        self._set(self._steering.learn(burst, seen.ratio, seen.samples, reach))

    def _set(self, burst: float) -> None:
        self._traffic.change(replace(self._traffic.environment.pattern, burst=burst))
        self._sample(_SETTLE_SAMPLES)

    def _hold(self) -> Calibration:
        """Gather samples until the ratio is known well enough, or the time is over."""
        times: list[float] = []
        begin = time.monotonic()
        while True:
            burst = self._traffic.environment.pattern.burst
            self._teller.phase(f"holding bursts of {binary(burst)}")
            times += self._sample(BATCH_SAMPLES, max(1.0, self._left()), before=tuple(times))
            seen = found(times, self._seed)
            here = replace(self._traffic.environment, found=seen)
            known = self._short(HOLD_BURSTS, begin) <= 0
            if known or self._best is None:
                self._keep(here)
            if known and here.reached and seen.half_width <= self._tolerance:
                return self._over(here)
            if self._left() <= 0 or len(times) >= MOST_SAMPLES or self._steering.stuck:
                return self._missed()
            if known and self._is_outside(seen):
                self._learn(times, HELD_REACH)
                times, begin = [], time.monotonic()

    def _is_outside(self, seen: Found) -> bool:
        """Whether the ratio is not the target as far as one can tell."""
        low, high = self._target - self._tolerance, self._target + self._tolerance
        if seen.half_width <= self._tolerance:
            return not low <= seen.ratio <= high
        return seen.high < low or seen.low > high

    def _keep(self, here: Environment) -> None:
        """Remember what has come nearest."""

        def distance(one: Environment) -> float:
            seen = one.found
            return abs(seen.ratio / self._target - 1) if seen else float("inf")

        same = self._best is not None and self._best.pattern == here.pattern
        if self._best is None or same or distance(here) < distance(self._best):
            self._best = here

    def _missed(self) -> Calibration:
        """The nearest that was found, and what kept it from being the target."""
        best = self._best or self._traffic.environment
        seen = best.found
        if best.pattern != self._traffic.environment.pattern:
            self._set(best.pattern.burst)
        reached = seen.words if seen else "nothing"
        why = f"bursts of {binary(best.pattern.burst)} gave {reached}"
        if self._steering.stuck:
            why = f"no burst reaches it at this load on this path: {why}"
        elif best.reached:
            width = f"the interval is wider than ± {self._tolerance:g}"
            why = f"{width} after {self._seconds:.0f} s: {why}"
        else:
            why = f"not reached within {self._seconds:.0f} s: {why}"
        return self._over(best, why)

    def _over(self, environment: Environment, why: str = "") -> Calibration:
        self._traffic.environment = environment
        return Calibration(environment, self._seconds, self._windows, why)

    def _sample(
        self,
        count: int,
        seconds: float = 30.0,
        before: Sequence[float] = (),
    ) -> list[float]:
        """Times of the probe; ``before`` are shown with them."""
        return self._traffic.sample(count, seconds, lambda new: self._teller.watch([*before, *new]))

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    @property
    def _seed(self) -> int:
        return self._traffic.environment.pattern.seed
