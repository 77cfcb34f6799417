"""Detection of spikes in a metric, by a rule that the page states in words."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flagscale.report.scale import MAX_DRAWABLE

WINDOW = 50
MIN_VALUES = 10
"""Minimum number of earlier values for a spike."""


@dataclass(frozen=True)
class SpikeRule:
    """Rule: more than ``factor`` times the median of the last :data:`WINDOW` values, and more than
    ``min_increase`` above it. Of consecutive spikes, the first counts.
    """

    factor: float
    min_increase: float = 0.0

    def describe(self) -> str:
        more = f", and by more than {self.min_increase:g}" if self.min_increase else ""
        return f"more than {self.factor:g} times the median of the last {WINDOW} values{more}"


LOSS_RULE = SpikeRule(2.0, 0.5)
"""Rule of training's own warning, unless ``loss_spike_factor`` is set."""
GRAD_NORM_RULE = SpikeRule(5.0)


@dataclass(frozen=True)
class Spike:
    """Spike at an index of the values.

    ``median`` is the median of the values before it, None for a value that is not a number.
    """

    index: int
    value: float
    median: float | None


def find_spikes(values: Sequence[float], rule: SpikeRule) -> list[Spike]:
    """Return the spikes by a rule, and values that are NaN or infinite."""
    spikes: list[Spike] = []
    recent: deque[float] = deque()
    sorted_values: list[float] = []
    was_spike = False
    for index, value in enumerate(values):
        if not -MAX_DRAWABLE < value < MAX_DRAWABLE:
            if not was_spike:
                spikes.append(Spike(index, value, None))
            was_spike = True
            continue
        count = len(sorted_values)
        median = 0.0
        is_spike = False
        if count >= MIN_VALUES:
            middle = count // 2
            median = (
                sorted_values[middle]
                if count % 2
                else (sorted_values[middle - 1] + sorted_values[middle]) / 2
            )
            is_spike = value > rule.factor * median and value > median + rule.min_increase
        if is_spike and not was_spike:
            spikes.append(Spike(index, value, median))
        was_spike = is_spike
        if count == WINDOW:
            del sorted_values[bisect_left(sorted_values, recent.popleft())]
        recent.append(value)
        insort(sorted_values, value)
    return spikes
