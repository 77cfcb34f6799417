"""Distributions of bursts and gaps. Each has a mean of 1 and a largest value, so that traffic is
bounded whatever is drawn. Standard library alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from flagscale.bench.traffic.spec import Distribution, Pattern

_SHAPE = 1.5
"""Exponent of the Pareto distribution. Without the upper bound its variance would be infinite."""
LARGEST: dict[Distribution, float] = {"constant": 1.0, "exponential": 20.0, "pareto": 100.0}
"""Largest value of each distribution, in means. An unbounded exponential one exceeds it once in
5e8.
"""


def draw_value(distribution: Distribution, generator: random.Random) -> float:
    """Draw a value with mean 1, at most :data:`LARGEST`."""
    if distribution == "constant":
        return 1.0
    if distribution == "exponential":
        return min(generator.expovariate(1.0), LARGEST[distribution])
    # The inverse of the distribution function of a Pareto law between its least and largest value.
    least, most = _least_pareto(), LARGEST[distribution]
    share: float = generator.random() * (1 - (least / most) ** _SHAPE)
    return float(least * (1 - share) ** (-1 / _SHAPE))


@cache
def _least_pareto() -> float:
    """Return the lower bound with which the bounded Pareto distribution has mean 1, by
    bisection.
    """
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
    """Iterator over the bursts of one flow, determined by its seed and index. The mean may
    change between two bursts, because drawn values are multiples of it.
    """

    def __init__(self, pattern: Pattern, flow: int) -> None:
        self.pattern = pattern
        self.end = 0.0
        """End of the last burst at the path's rate, on the clock of :meth:`__next__`."""
        self._generator = random.Random(f"{pattern.seed}/{flow}")
        self._first = True

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return self

    def __next__(self) -> tuple[float, int]:
        """Return when the next burst is due, in seconds since the flow's start, and its size in
        bytes.
        """
        pattern = self.pattern
        # Flows that start at the same time must not burst at the same time.
        wait = (
            self._generator.random() if self._first else draw_value(pattern.gaps, self._generator)
        )
        self._first = False
        due = self.end + pattern.gap * wait
        size = max(1, round(pattern.burst * draw_value(pattern.bursts, self._generator)))
        self.end = due + 8 * size / pattern.rate
        return due, size
