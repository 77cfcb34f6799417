"""Axes: where a value lies between two ends, which values are written beside, and how."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

LARGEST = 1e100
"""Beyond this a number says no more than infinity does, and sums of such ones overflow."""
_SMALLEST = 1e-100
"""What is less is 0, and values that differ by less are the same."""
_FINEST = 1e-12
"""And so are values that differ by less than this share of theirs."""
_UNEVEN = 10.0
"""An axis is logarithmic where its largest value is this many times the usual one."""
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ("", "K", "M", "G", "T")
Tick = tuple[float, str]


def drawable(value: float) -> bool:
    """Whether a value has a place on an axis: not NaN, not infinite, nor as good as that."""
    return -LARGEST < value < LARGEST


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, which are not the same; above 0 where it is ``log``."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value is, from 0 at ``low`` to 1 at ``high``; what lies outside is at the end."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self, most: int) -> list[Tick]:
        """Round values within the axis, about ``most`` of them, as they are written."""
        return _decades(self, most) if self.log else _steps(self, most)


def scale_of(values: Iterable[float], *, log: bool | None = None, room: float = 0.0) -> Scale:
    """The axis that holds all values that can be drawn. ``log`` None: where they are uneven, so
    that one spike does not press everything else flat. ``room`` at both ends is a share of it."""
    found = [value for value in values if drawable(value)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if log is None:
        log = low > _SMALLEST and high > _UNEVEN * median(found)
    if log:
        found = [value for value in found if value > _SMALLEST] or [1.0]
        low, high = min(found), max(found)
        spread = max(high / low, 1.2) ** max(room, 0.01 if low == high else 0.0)
        return Scale(low / spread, high * spread, log=True)
    if high - low < max(_SMALLEST, abs(high) * _FINEST):
        middle, around = (low + high) / 2, max(abs(low), abs(high))
        around = around if around > _SMALLEST else 1.0
        return Scale(middle - around, middle + around)
    more = (high - low) * room
    return Scale(low - more, high + more)


def _steps(scale: Scale, most: int) -> list[Tick]:
    rough = (scale.high - scale.low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough * 0.999)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    found = [number * step for number in range(first, last + 1)]
    return [(value, short(value, step)) for value in found]


def _decades(scale: Scale, most: int) -> list[Tick]:
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        found = [value for value in found if scale.low <= value <= scale.high]
        if len(found) <= most:
            break
    found = found[:: max(1, math.ceil(len(found) / max(most, 1)))]
    if len(found) < 2:  # less than a decade without a round value
        return [(value, short(value)) for value in (scale.low, scale.high)]
    return [(value, short(value)) for value in found]


def short(value: float, step: float = 0.0) -> str:
    """A value in few characters: ``20k``, ``1.5M``, ``0.02``. ``step``: what it has to differ by
    from the next one."""
    if abs(value) < step * 1e-6:
        return "0"
    for unit, suffix in _SUFFIXES:
        if abs(value) >= unit and abs(value) < 1e15:
            return f"{_plain(value / unit, step / unit)}{suffix}"
    return _plain(value, step)


def _plain(value: float, step: float) -> str:
    if step > 0 and 1e-4 <= abs(value) < 1e6:
        digits = min(max(0, -math.floor(math.log10(step) + 1e-9)), 6)
        found = f"{value:.{digits}f}"
        return found if step >= 1 or "." not in found else found.rstrip("0").rstrip(".")
    return f"{value:.3g}"


def number(value: float) -> str:
    """A value as it is told: ``2,686``, ``5.6448``, ``1.2e-05``."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if 1000 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def format_size(size: int) -> str:
    """A size as a person writes it: ``1048576`` is ``1M``, ``1000`` stays ``1000``."""
    power = 0
    while size and size % 1024 == 0 and power < len(_BINARY) - 1:
        size //= 1024
        power += 1
    return f"{size}{_BINARY[power]}"


def sample(count: int, most: int) -> Sequence[int]:
    """At most so many of ``count`` indices, evenly; the first and the last are among them."""
    if count <= most:
        return range(count)
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
