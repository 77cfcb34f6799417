"""Detection of spikes by one rule that a page can state."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flagscale.report.scale import LARGEST

WINDOW = 50
MIN_VALUES = 10
"""Minimum number of earlier values for a spike."""


@dataclass(frozen=True)
class SpikeRule:
    """Rule: more than ``factor`` times the median of the last :data:`WINDOW` values, and more than
    ``least`` above it. Of consecutive spikes, the first counts.
    """

    factor: float
    least: float = 0.0

    def describe(self) -> str:
        more = f", and by more than {self.least:g}" if self.least else ""
        return f"more than {self.factor:g} times the median of the last {WINDOW} values{more}"


LOSS = SpikeRule(2.0, 0.5)
"""Rule of training's own warning, unless ``loss_spike_factor`` is set."""
GRAD_NORM = SpikeRule(5.0)


@dataclass(frozen=True)
class Spike:
    """Spike at an index of the values.

    ``usual`` is the median before it, None for a value that is not a number.
    """

    index: int
    value: float
    usual: float | None


def find_spikes(values: Sequence[float], rule: SpikeRule) -> list[Spike]:
    """Return the spikes by a rule, and values that are NaN or infinite."""
    spikes: list[Spike] = []
    recent: deque[float] = deque()
    ordered: list[float] = []
    before = False
    for index, value in enumerate(values):
        if not -LARGEST < value < LARGEST:
            if not before:
                spikes.append(Spike(index, value, None))
            before = True
            continue
        count = len(ordered)
        usual = 0.0
        now = False
        if count >= MIN_VALUES:
            middle = count // 2
            usual = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
            now = value > rule.factor * usual and value > usual + rule.least
        if now and not before:
            spikes.append(Spike(index, value, usual))
        before = now
        if count == WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(value)
        insort(ordered, value)
    return spikes
