"""Which bursts give the wanted ratio: a closed loop in logarithms. Pure.

At a fixed load the ratio grows with the bursts as a power of them, over the range that matters. So
ln(burst) is steered by ln(target ÷ ratio), divided by the slope that the windows so far have shown.
Windows near the place where the loop stands count most, and long ones more than short ones.
"""

from __future__ import annotations

import math

from flagscale.bench.traffic.spec import LARGEST_BURST, SMALLEST_BURST

_SLOPE, _SLOPE_WEIGHT = 0.5, 0.15
"""What a slope is taken for before anything is known, and how much that counts."""
_LEAST_SLOPE, _MOST_SLOPE = 0.25, 1.5
_REACH = math.log(4)
"""Windows this far from where the loop stands count e times less; and no step is larger."""
_STUCK = 3


class Steering:
    """The loop: it is told what windows found, and proposes the next burst."""

    def __init__(
        self,
        target: float,
        burst: float,
        least: float = SMALLEST_BURST,
        most: float = LARGEST_BURST,
    ) -> None:
        self._target, self._least, self._most = math.log(target), math.log(least), math.log(most)
        self._at = math.log(burst)
        self._points: list[tuple[float, float, int]] = []
        self._at_limit = 0

    @property
    def burst(self) -> float:
        """The proposal, in bytes."""
        return math.exp(self._at)

    @property
    def stuck(self) -> bool:
        """Whether bursts are as small or as large as they may be, and have not been enough for
        three windows."""
        return self._at_limit >= _STUCK

    def learn(self, burst: float, ratio: float, samples: int, reach: float = _REACH) -> float:
        """Take what a window of ``samples`` found with ``burst``; the next burst, at most ``reach``
        (a logarithm) away."""
        self._points.append((math.log(burst), math.log(ratio), samples))
        wanted = self._solve(math.log(burst))
        step = max(-reach, min(reach, wanted - self._at))
        wanted = self._at + step
        limited = not self._least <= wanted <= self._most
        self._at = max(self._least, min(self._most, wanted))
        self._at_limit = self._at_limit + 1 if limited else 0
        return self.burst

    def _solve(self, here: float) -> float:
        """ln(burst) at which the line through the windows meets the target."""
        weights = [n * math.exp(-abs(x - here) / _REACH) for x, _, n in self._points]
        total = sum(weights)
        pairs = list(zip(weights, self._points, strict=True))
        x = sum(w * point[0] for w, point in pairs) / total
        y = sum(w * point[1] for w, point in pairs) / total
        spread = sum(w * (point[0] - x) ** 2 for w, point in pairs) / total
        rise = sum(w * (point[0] - x) * (point[1] - y) for w, point in pairs) / total
        slope = (rise + _SLOPE_WEIGHT * _SLOPE) / (spread + _SLOPE_WEIGHT)
        return x + (self._target - y) / max(_LEAST_SLOPE, min(_MOST_SLOPE, slope))
