"""Distributions of burst sizes, and of the gaps between bursts.

Each has a mean of 1 and a maximum, so that the traffic is bounded. Imported by the flows' worker
(:mod:`.flows`), which has only the standard library.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from flagscale.bench.traffic.spec import Distribution, Pattern

_PARETO_SHAPE = 1.5
"""Exponent of the Pareto distribution. Without the upper bound its variance would be infinite."""
MAX_VALUE: dict[Distribution, float] = {"constant": 1.0, "exponential": 20.0, "pareto": 100.0}
"""Largest value of each distribution, as a multiple of its mean. An unbounded exponential
distribution exceeds its maximum once in 5e8 values.
"""


def draw_value(distribution: Distribution, generator: random.Random) -> float:
    """Draw a value with mean 1, at most :data:`MAX_VALUE`."""
    if distribution == "constant":
        return 1.0
    if distribution == "exponential":
        return min(generator.expovariate(1.0), MAX_VALUE[distribution])
    # Inverse of the cumulative distribution function of a Pareto distribution between its bounds.
    min_value, max_value = _pareto_min(), MAX_VALUE[distribution]
    quantile: float = generator.random() * (1 - (min_value / max_value) ** _PARETO_SHAPE)
    return float(min_value * (1 - quantile) ** (-1 / _PARETO_SHAPE))


@cache
def _pareto_min() -> float:
    """Return the lower bound with which the bounded Pareto distribution has mean 1, by
    bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _pareto_mean(middle) < 1 else (low, middle)
    return high


def _pareto_mean(min_value: float) -> float:
    max_value = MAX_VALUE["pareto"]
    mass = 1 - (min_value / max_value) ** _PARETO_SHAPE
    integral: float = min_value ** (1 - _PARETO_SHAPE) - max_value ** (1 - _PARETO_SHAPE)
    return float(min_value**_PARETO_SHAPE / mass * _PARETO_SHAPE / (_PARETO_SHAPE - 1) * integral)


class Bursts:
    """Iterator over the bursts of one flow, determined by the pattern's seed and the flow's index.

    :attr:`pattern` may be replaced between two bursts: the drawn values are multiples of its mean
    size.
    """

    def __init__(self, pattern: Pattern, flow: int) -> None:
        self.pattern = pattern
        self.end = 0.0
        """End of the last burst at the path's rate, in seconds since the flow's start."""
        self._generator = random.Random(f"{pattern.seed}/{flow}")
        self._first = True

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return self

    def __next__(self) -> tuple[float, int]:
        """Return the time of the next burst, in seconds since the flow's start, and its size in
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
