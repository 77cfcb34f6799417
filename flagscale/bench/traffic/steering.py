"""Control loop for the burst size that gives a requested ratio. Pure.

At a fixed load the ratio grows as a power of the burst size, over the relevant range. Therefore
ln(burst) is changed by ln(target ÷ ratio), divided by the slope estimated from all windows so
far. Windows near the current position count most, and long windows more than short ones.
"""

from __future__ import annotations

import math

from flagscale.bench.traffic.spec import LARGEST_BURST, SMALLEST_BURST

_SLOPE, _SLOPE_WEIGHT = 0.5, 0.15
"""Prior of the slope, and its weight."""
_LEAST_SLOPE, _MOST_SLOPE = 0.25, 1.5
_REACH = math.log(4)
"""Distance at which a window's weight falls by a factor of e, and the largest step."""
_STUCK = 3


class Steering:
    """Control loop: records the results of windows, and proposes the next burst size."""

    def __init__(
        self,
        target: float,
        burst: float,
        least: float = SMALLEST_BURST,
        most: float = LARGEST_BURST,
    ) -> None:
        self._target, self._least, self._most = math.log(target), math.log(least), math.log(most)
        self._position = math.log(burst)
        self._points: list[tuple[float, float, int]] = []
        self._at_limit = 0

    @property
    def burst(self) -> float:
        """The proposed burst size in bytes."""
        return math.exp(self._position)

    @property
    def stuck(self) -> bool:
        """True if bursts were at their limit for three windows without reaching the target."""
        return self._at_limit >= _STUCK

    def record_window(
        self, burst: float, ratio: float, samples: int, reach: float = _REACH
    ) -> float:
        """Record the ratio of a window, and return the next burst size.

        Args:
            burst: burst size of the window, in bytes.
            ratio: p99 ÷ p50 of its samples.
            samples: number of samples.
            reach: largest step of ln(burst).
        """
        self._points.append((math.log(burst), math.log(ratio), samples))
        proposal = self._solve(math.log(burst))
        step = max(-reach, min(reach, proposal - self._position))
        proposal = self._position + step
        limited = not self._least <= proposal <= self._most
        self._position = max(self._least, min(self._most, proposal))
        self._at_limit = self._at_limit + 1 if limited else 0
        return self.burst

    def _solve(self, position: float) -> float:
        """Return ln(burst) at which the regression line of the windows has the target ratio."""
        weights = [n * math.exp(-abs(x - position) / _REACH) for x, _, n in self._points]
        total = sum(weights)
        pairs = list(zip(weights, self._points, strict=True))
        x = sum(w * point[0] for w, point in pairs) / total
        y = sum(w * point[1] for w, point in pairs) / total
        spread = sum(w * (point[0] - x) ** 2 for w, point in pairs) / total
        rise = sum(w * (point[0] - x) * (point[1] - y) for w, point in pairs) / total
        slope = (rise + _SLOPE_WEIGHT * _SLOPE) / (spread + _SLOPE_WEIGHT)
        return x + (self._target - y) / max(_LEAST_SLOPE, min(_MOST_SLOPE, slope))
