"""Steps that stand out of those before them, by one rule that a page can state."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flagscale.report.scale import LARGEST

WINDOW = 50
ENOUGH = 10
"""Before so many values are known nothing stands out."""


@dataclass(frozen=True)
class Rule:
    """More than ``factor`` times the median of the last :data:`WINDOW` values, and more than
    ``least`` above it. Of values in a row that are, the first counts."""

    factor: float
    least: float = 0.0

    def text(self) -> str:
        more = f", and by more than {self.least:g}" if self.least else ""
        return f"more than {self.factor:g} times the median of the last {WINDOW} values{more}"


LOSS = Rule(2.0, 0.5)
"""As training itself warns of, unless ``loss_spike_factor`` says otherwise."""
GRAD_NORM = Rule(5.0)


@dataclass(frozen=True)
class Spike:
    """A value that stands out, at an index of the values; ``usual`` is the median it is held
    against, None for a value that is no number at all."""

    index: int
    value: float
    usual: float | None


def spikes(values: Sequence[float], rule: Rule) -> list[Spike]:
    """The values that stand out by a rule, and those that are NaN or infinite."""
    found: list[Spike] = []
    recent: deque[float] = deque()
    ordered: list[float] = []
    before = False
    for index, value in enumerate(values):
        if not -LARGEST < value < LARGEST:
            if not before:
                found.append(Spike(index, value, None))
            before = True
            continue
        count = len(ordered)
        usual = 0.0
        now = False
        if count >= ENOUGH:
            middle = count // 2
            usual = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
            now = value > rule.factor * usual and value > usual + rule.least
        if now and not before:
            found.append(Spike(index, value, usual))
        before = now
        if count == WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(value)
        insort(ordered, value)
    return found
