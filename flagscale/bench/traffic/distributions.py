"""How bursts and gaps are distributed. Every law has a mean and a largest value, so that traffic is
bounded whatever was drawn. Standard library alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from flagscale.bench.traffic.spec import Law, Pattern

_SHAPE = 1.5
"""Of the Pareto law: its variance would be infinite were it not cut off."""
LARGEST: dict[Law, float] = {"constant": 1.0, "exponential": 20.0, "pareto": 100.0}
"""The largest value of each law, in means. An exponential one exceeds it once in 5e8."""


def draw(law: Law, source: random.Random) -> float:
    """A value of mean 1, at most :data:`LARGEST`."""
    if law == "constant":
        return 1.0
    if law == "exponential":
        return min(source.expovariate(1.0), LARGEST[law])
    # The inverse of the distribution function of a Pareto law between its least and largest value.
    least, most = _least_pareto(), LARGEST[law]
    share: float = source.random() * (1 - (least / most) ** _SHAPE)
    return float(least * (1 - share) ** (-1 / _SHAPE))


@cache
def _least_pareto() -> float:
    """The least value with which the bounded Pareto law has mean 1, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_pareto(middle) < 1 else (low, middle)
    return high


def _mean_pareto(least: float) -> float:
    most = LARGEST["pareto"]
    whole = 1 - (least / most) ** _SHAPE
    part: float = least ** (1 - _SHAPE) - most ** (1 - _SHAPE)
    return float(least**_SHAPE / whole * _SHAPE / (_SHAPE - 1) * part)


class Bursts:
    """The bursts of one flow: the same for the same seed and flow, whatever happens to them. Their
    mean may be changed between two: what is drawn is a share of it."""

    def __init__(self, pattern: Pattern, flow: int) -> None:
        self.pattern = pattern
        self.end = 0.0
        """When the last one is over, at the path's rate; seconds as of :meth:`__next__`."""
        self._source = random.Random(f"{pattern.seed}/{flow}")
        self._first = True

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return self

    def __next__(self) -> tuple[float, int]:
        """When the next burst is due, in seconds since the flow's start, and its bytes."""
        pattern = self.pattern
        # Flows that begin together are not to burst together.
        wait = self._source.random() if self._first else draw(pattern.gaps, self._source)
        self._first = False
        due = self.end + pattern.gap * wait
        size = max(1, round(pattern.burst * draw(pattern.bursts, self._source)))
        self.end = due + 8 * size / pattern.rate
        return due, size
