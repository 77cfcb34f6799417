"""Control loop for the burst size that gives a requested tail ratio (p99 ÷ p50 of the probe).

Calculation alone: :mod:`.calibration` and :mod:`.cli` measure the windows and apply the sizes. A
window is a series of probe samples under one burst size.

At a fixed load the ratio grows as a power of the burst size, over the relevant range. Therefore
ln(burst) is changed by ln(target ÷ ratio), divided by the slope of ln(ratio) over ln(burst). The
slope is estimated by a weighted regression on all windows so far: windows with a burst size near
the current one have more weight, and so have windows with more samples.
"""

from __future__ import annotations

import math

from flagscale.bench.traffic.spec import LARGEST_BURST, SMALLEST_BURST

_PRIOR_SLOPE, _PRIOR_WEIGHT = 0.5, 0.15
"""Slope that is assumed before any window, and its weight in the regression."""
_MIN_SLOPE, _MAX_SLOPE = 0.25, 1.5
_LOG_SCALE = math.log(4)
"""Distance in ln(burst) at which a window's weight falls by a factor of e. Also the largest step
of ln(burst).
"""
_STUCK_WINDOWS = 3


class Steering:
    """Control loop: records the results of windows, and proposes the next burst size.

    Args:
        target: requested ratio.
        burst: initial burst size in bytes.
        min_burst: smallest size that is proposed, in bytes.
        max_burst: largest size that is proposed, in bytes.
    """

    def __init__(
        self,
        target: float,
        burst: float,
        min_burst: float = SMALLEST_BURST,
        max_burst: float = LARGEST_BURST,
    ) -> None:
        self._log_target = math.log(target)
        self._log_min, self._log_max = math.log(min_burst), math.log(max_burst)
        self._log_burst = math.log(burst)
        self._windows: list[tuple[float, float, int]] = []
        """ln(burst), ln(ratio) and the number of samples of each window."""
        self._windows_at_limit = 0

    @property
    def burst(self) -> float:
        """The proposed burst size in bytes."""
        return math.exp(self._log_burst)

    @property
    def is_stuck(self) -> bool:
        """True if the last three proposals were beyond a limit: no permitted burst size reaches
        the target.
        """
        return self._windows_at_limit >= _STUCK_WINDOWS

    def record_window(
        self, burst: float, ratio: float, samples: int, max_step: float = _LOG_SCALE
    ) -> float:
        """Record the ratio of a window, and return the next burst size in bytes.

        Args:
            burst: burst size of the window, in bytes.
            ratio: p99 ÷ p50 of its samples.
            samples: number of samples.
            max_step: largest change of ln(burst).
        """
        self._windows.append((math.log(burst), math.log(ratio), samples))
        proposal = self._solve(math.log(burst))
        step = max(-max_step, min(max_step, proposal - self._log_burst))
        proposal = self._log_burst + step
        beyond_limit = not self._log_min <= proposal <= self._log_max
        self._log_burst = max(self._log_min, min(self._log_max, proposal))
        self._windows_at_limit = self._windows_at_limit + 1 if beyond_limit else 0
        return self.burst

    def _solve(self, log_burst: float) -> float:
        """Return ln(burst) at which the regression line through the windows has the target ratio.
        Windows are weighted by their distance from ``log_burst``.
        """
        weights = [n * math.exp(-abs(x - log_burst) / _LOG_SCALE) for x, _, n in self._windows]
        total = sum(weights)
        weighted_windows = list(zip(weights, self._windows, strict=True))
        mean_x = sum(w * x for w, (x, _, _) in weighted_windows) / total
        mean_y = sum(w * y for w, (_, y, _) in weighted_windows) / total
        variance = sum(w * (x - mean_x) ** 2 for w, (x, _, _) in weighted_windows) / total
        covariance = (
            sum(w * (x - mean_x) * (y - mean_y) for w, (x, y, _) in weighted_windows) / total
        )
        slope = (covariance + _PRIOR_WEIGHT * _PRIOR_SLOPE) / (variance + _PRIOR_WEIGHT)
        return mean_x + (self._log_target - mean_y) / max(_MIN_SLOPE, min(_MAX_SLOPE, slope))
