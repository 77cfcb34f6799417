"""What the samples of trials say: ratios with intervals, losses that agree, time to a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np

from flagscale.sample_statistics import Ratio

_RESAMPLES = 1000
_EARLY = 3
RING = "a ring: every rank to one other"
EARLY_TOLERANCE = 1e-3
"""By how much losses of exact arms may differ in the first steps, relatively: by rounding, which
training makes larger soon after."""
LATE_TOLERANCE = 0.01
"""And the means of their last tenth, beyond what differs to and fro."""
_LAST = 5
"""Or of so many steps, where there are few."""
_SURE = 3.0
"""Standard errors."""


def by_round(values: Sequence[float], rounds: Sequence[int]) -> list[list[float]]:
    """Values of steps as lists of those of one round."""
    pairs = zip(rounds, values, strict=True)
    return [[value for _, value in some] for _, some in groupby(pairs, key=itemgetter(0))]


def block_ratio(
    above: Sequence[float],
    below: Sequence[float],
    rounds: Sequence[int],
    percent: float = 50.0,
    *,
    seed: int = 0,
) -> Ratio:
    """The ratio of two percentiles with a 95 % interval, by the bootstrap over rounds.

    ``above[i]`` and ``below[i]`` are the same step under two conditions and lie in round
    ``rounds[i]``. Rounds are drawn whole, and for both alike: steps that follow each other share
    what disturbs them, and to count each by itself would make the interval too narrow. Of a single
    round steps are drawn, which is then said too narrow by the width of what they share.
    """
    value = float(np.percentile(above, percent) / np.percentile(below, percent))
    tops, bottoms = by_round(above, rounds), by_round(below, rounds)
    if len(tops) == 1:
        tops, bottoms = [[x] for x in tops[0]], [[x] for x in bottoms[0]]
    if len(tops) < 2:
        return Ratio(value, 0.0, math.inf)
    draw = np.random.default_rng(seed)
    first, second = ([np.asarray(part) for part in parts] for parts in (tops, bottoms))
    found = []
    for chosen in draw.integers(len(first), size=(_RESAMPLES, len(first))):
        up = np.percentile(np.concatenate([first[i] for i in chosen]), percent)
        down = np.percentile(np.concatenate([second[i] for i in chosen]), percent)
        found.append(up / down)
    low, high = np.percentile(found, (2.5, 97.5))
    return Ratio(value, float(low), float(high))


@dataclass(frozen=True)
class Agreement:
    """How far two curves of losses are from each other."""

    early: float
    """The largest relative difference of the first steps."""
    late: float
    """The relative difference of the means of their last tenth."""
    noise: float = 0.0
    """What that may be by differences to and fro alone: so many standard errors of it."""

    @property
    def holds(self) -> bool:
        """Whether two exact arms may differ so."""
        return self.early <= EARLY_TOLERANCE and self.late <= max(LATE_TOLERANCE, self.noise)


def agreement(one: Sequence[float | None], other: Sequence[float | None]) -> Agreement:
    """Compare the losses of the same steps under two arms. One that is no number agrees with
    nothing."""
    if None in one or None in other:
        return Agreement(math.inf, math.inf)
    first, second = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    scale = np.maximum(np.abs(first), 1e-12)
    early = float(np.max((np.abs(first - second) / scale)[:_EARLY]))
    tail = min(len(first), max(_LAST, len(first) // 10))
    apart, level = (first - second)[-tail:], max(abs(float(np.mean(first[-tail:]))), 1e-12)
    noise = _SURE * float(np.std(apart)) / math.sqrt(tail)
    return Agreement(early, abs(float(np.mean(apart))) / level, noise / level)


def smoothed(losses: Sequence[float | None]) -> list[float]:
    """Means over the last twentieth of a run up to each step; NaN where one is no number."""
    values = np.asarray([math.nan if loss is None else loss for loss in losses])
    width = max(1, len(values) // 20)
    return [float(np.mean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]


def common_loss(curves: Sequence[Sequence[float]]) -> float | None:
    """The lowest smoothed loss that every curve reaches; None where one reaches none."""
    lowest = [min((x for x in curve if math.isfinite(x)), default=None) for curve in curves]
    known = [x for x in lowest if x is not None]
    return max(known) if known and len(known) == len(lowest) else None


def time_to(loss: float, curve: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Seconds of training until a smoothed curve is at ``loss`` or below; None if it never is."""
    for value, spent in zip(curve, accumulate(seconds), strict=True):
        if value <= loss:
            return spent
    return None


def unlike(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """How unlike two tables of bytes from rank to rank are: the share of bytes (0 to 1) that go
    between other pairs in one than in the other."""
    first, second = (np.asarray(table, dtype=float) for table in (one, other))
    if not first.sum() or not second.sum():
        return 0.0 if first.sum() == second.sum() else 1.0
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def shape(sent: Sequence[Sequence[int]]) -> str:
    """What a table of bytes [from][to] looks like: who sends more than a twentieth of the most
    that goes between any two."""
    size = len(sent)
    most = max((cell for row in sent for cell in row), default=0)
    edges = {
        (a, b) for a, row in enumerate(sent) for b, cell in enumerate(row) if cell > most / 20 > 0
    }
    if not edges:
        return "nothing was sent"
    if size == 2:
        return "two ranks, to each other"
    if any(edges == {(r, (r + k) % size) for r in range(size)} for k in range(1, size)):
        return RING
    if len(edges) == size * (size - 1):
        return "every rank to every other"
    pairs = {frozenset(edge) for edge in edges}
    if len(pairs) == size - 1 and len(edges) == 2 * (size - 1):
        return f"a tree: {size - 1} pairs, both ways"
    return f"{len(edges)} of {size * (size - 1)} directions"
