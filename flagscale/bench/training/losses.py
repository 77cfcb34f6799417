"""Comparison of loss curves: agreement between two arms, and time until a loss that all reach.

Used for the results of ``flagscale bench training`` (:mod:`.summary`). An arm is one of the
compared ways to reduce gradients (:mod:`.arms`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

EARLY_TOLERANCE = 1e-3
"""Largest relative difference between losses of exact arms in the first steps. Exact arms round
differently, and training amplifies the difference soon after.
"""
LATE_TOLERANCE = 0.01
"""Largest relative difference between the mean losses of their last tenths, in addition to
fluctuations.
"""
_EARLY_STEPS = 3
_MIN_LATE_STEPS = 5
_STANDARD_ERRORS = 3.0
"""Late differences of at most this many standard errors are explained by fluctuations."""


@dataclass(frozen=True)
class LossAgreement:
    """Differences between two loss curves."""

    early: float
    """Largest relative difference in the first steps."""
    late: float
    """Relative difference between the means of the last tenth."""
    noise: float = 0.0
    """Relative late difference that fluctuations alone explain: three standard errors."""

    @property
    def is_acceptable(self) -> bool:
        """True if two exact arms may differ by this much."""
        return self.early <= EARLY_TOLERANCE and self.late <= max(LATE_TOLERANCE, self.noise)


def compare_losses(first: Sequence[float | None], second: Sequence[float | None]) -> LossAgreement:
    """Compare the losses of the same steps under two arms. With a loss that is not finite (None)
    the differences are infinite.
    """
    if None in first or None in second:
        return LossAgreement(math.inf, math.inf)
    first_losses, second_losses = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    scale = np.maximum(np.abs(first_losses), 1e-12)
    early = float(np.max((np.abs(first_losses - second_losses) / scale)[:_EARLY_STEPS]))
    late_steps = min(len(first_losses), max(_MIN_LATE_STEPS, len(first_losses) // 10))
    difference = (first_losses - second_losses)[-late_steps:]
    level = max(abs(float(np.mean(first_losses[-late_steps:]))), 1e-12)
    noise = _STANDARD_ERRORS * float(np.std(difference)) / math.sqrt(late_steps)
    return LossAgreement(early, abs(float(np.mean(difference))) / level, noise / level)


def smooth(losses: Sequence[float | None]) -> list[float]:
    """Return the moving average of losses. Its window ends at each step and is a twentieth of the
    run; an average with a loss that is not finite (None) is NaN.
    """
    values = np.asarray([math.nan if loss is None else loss for loss in losses])
    width = max(1, len(values) // 20)
    return [float(np.mean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]


def common_loss(curves: Sequence[Sequence[float]]) -> float | None:
    """Return the lowest smoothed loss that every curve reaches; None if a curve has no finite
    value.
    """
    minima = [min((x for x in curve if math.isfinite(x)), default=None) for curve in curves]
    finite = [x for x in minima if x is not None]
    return max(finite) if finite and len(finite) == len(minima) else None


def time_to_loss(loss: float, curve: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Return the seconds of training until a smoothed curve is at ``loss`` or below; None if it
    never is."""
    for value, elapsed in zip(curve, accumulate(seconds), strict=True):
        if value <= loss:
            return elapsed
    return None
