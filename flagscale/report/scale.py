"""Axes: positions of values, ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

MAX_DRAWABLE = 1e100
"""Larger numbers are treated as infinite, because their sums may overflow."""
_MIN_MAGNITUDE = 1e-100
"""Smaller values are treated as 0, and smaller differences as none."""
_MIN_RELATIVE_RANGE = 1e-12
"""Values with a smaller relative difference are treated as equal."""
_LOG_SCALE_RATIO = 10.0
"""An axis is logarithmic if its largest value is this many times the median."""
_DECIMAL_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY_SUFFIXES = ("", "K", "M", "G", "T")
Tick = tuple[float, str]


def is_drawable(value: float) -> bool:
    """Return whether a value has a position on an axis: neither NaN nor (practically) infinite."""
    return -MAX_DRAWABLE < value < MAX_DRAWABLE


@dataclass(frozen=True)
class Scale:
    """Axis from ``low`` to ``high``, which differ; both positive if ``log``."""

    low: float
    high: float
    log: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value from 0 (``low``) to 1 (``high``), clamped."""
        if self.log:
            value = max(value, self.low)
            fraction = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return min(max(fraction, 0.0), 1.0)

    def ticks(self, max_ticks: int) -> list[Tick]:
        """Return about ``max_ticks`` round values within the axis, with labels."""
        return _log_ticks(self, max_ticks) if self.log else _linear_ticks(self, max_ticks)


def fit_scale(values: Iterable[float], *, log: bool | None = None, margin: float = 0.0) -> Scale:
    """Return an axis for all values that can be drawn.

    ``log`` None chooses a logarithmic axis for uneven values, so that one spike does not flatten
    the other values. ``margin`` is added at both ends, as a fraction of the axis.
    """
    drawable_values = [value for value in values if is_drawable(value)]
    low, high = (min(drawable_values), max(drawable_values)) if drawable_values else (0.0, 1.0)
    if log is None:
        log = low > _MIN_MAGNITUDE and high > _LOG_SCALE_RATIO * median(drawable_values)
    if log:
        drawable_values = [value for value in drawable_values if value > _MIN_MAGNITUDE] or [1.0]
        low, high = min(drawable_values), max(drawable_values)
        margin_factor = max(high / low, 1.2) ** max(margin, 0.01 if low == high else 0.0)
        return Scale(low / margin_factor, high * margin_factor, log=True)
    if high - low < max(_MIN_MAGNITUDE, abs(high) * _MIN_RELATIVE_RANGE):
        middle, half_range = (low + high) / 2, max(abs(low), abs(high))
        half_range = half_range if half_range > _MIN_MAGNITUDE else 1.0
        return Scale(middle - half_range, middle + half_range)
    padding = (high - low) * margin
    return Scale(low - padding, high + padding)


def _linear_ticks(scale: Scale, max_ticks: int) -> list[Tick]:
    approximate_step = (scale.high - scale.low) / max(max_ticks, 1)
    power = 10.0 ** math.floor(math.log10(approximate_step))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= approximate_step * 0.999)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    values = [number * step for number in range(first, last + 1)]
    return [(value, format_short(value, step)) for value in values]


def _log_ticks(scale: Scale, max_ticks: int) -> list[Tick]:
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        values = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        values = [value for value in values if scale.low <= value <= scale.high]
        if len(values) <= max_ticks:
            break
    values = values[:: max(1, math.ceil(len(values) / max(max_ticks, 1)))]
    if len(values) < 2:  # less than a decade without a round value
        return [(value, format_short(value)) for value in (scale.low, scale.high)]
    return [(value, format_short(value)) for value in values]


def format_short(value: float, step: float = 0.0) -> str:
    """Format a value in few characters: ``20k``, ``1.5M``, ``0.02``.

    ``step`` is the difference to the next label, which must remain visible.
    """
    if abs(value) < step * 1e-6:
        return "0"
    for unit, suffix in _DECIMAL_SUFFIXES:
        if abs(value) >= unit and abs(value) < 1e15:
            return f"{_format_plain(value / unit, step / unit)}{suffix}"
    return _format_plain(value, step)


def _format_plain(value: float, step: float) -> str:
    if step > 0 and 1e-4 <= abs(value) < 1e6:
        digits = min(max(0, -math.floor(math.log10(step) + 1e-9)), 6)
        digits_text = f"{value:.{digits}f}"
        return (
            digits_text
            if step >= 1 or "." not in digits_text
            else digits_text.rstrip("0").rstrip(".")
        )
    return f"{value:.3g}"


def format_number(value: float) -> str:
    """Format a value: ``2,686``, ``5.6448``, ``1.2e-05``."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if 1000 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def format_size(size: int) -> str:
    """Format a size in bytes: ``1048576`` is ``1M``, ``1000`` stays ``1000``."""
    power = 0
    while size and size % 1024 == 0 and power < len(_BINARY_SUFFIXES) - 1:
        size //= 1024
        power += 1
    return f"{size}{_BINARY_SUFFIXES[power]}"


def sample_indices(count: int, max_count: int) -> Sequence[int]:
    """Return at most ``max_count`` of ``count`` indices, evenly spaced, with the first and the
    last.
    """
    if count <= max_count:
        return range(count)
    return sorted({round(i * (count - 1) / (max_count - 1)) for i in range(max_count)})
