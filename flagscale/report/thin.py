"""Reduction of a line to fewer points that look the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flagscale.report.scale import is_drawable

Points = tuple[list[float], list[float]]


def thin_points(x: Sequence[float], y: Sequence[float], max_points: int) -> Points:
    """Reduce a line to about ``max_points`` points, at least 4.

    Consecutive points are grouped, and the lowest and highest of each group are kept in order, so
    no extreme is lost. The first and last point are kept. Of values that cannot be drawn, one per
    group is kept, which breaks the line there.

    Args:
        x, y: coordinates of equal length; ``x`` in ascending order.
        max_points: approximate number of points to keep.
    """
    count = len(x)
    if count <= max_points:
        return list(x), list(y)
    group_size = -(-count // max(max_points // 2 - 1, 1))
    selected_indices = {0, count - 1}
    for start in range(0, count, group_size):
        selected_indices |= _extremes(y, range(start, min(start + group_size, count)))
    indices = sorted(selected_indices)
    return [x[i] for i in indices], [y[i] for i in indices]


def _extremes(y: Sequence[float], group: range) -> set[int]:
    """Return the indices of the lowest and highest value in a group of points, and of one value
    that cannot be drawn.
    """
    values = y[group.start : group.stop]
    low, high = min(values), max(values)
    if not (all(map(math.isfinite, values)) and is_drawable(low) and is_drawable(high)):
        drawable_flags = [is_drawable(value) for value in values]
        gap = group.start + drawable_flags.index(False)
        drawable_indices = [i for i, flag in zip(group, drawable_flags, strict=True) if flag]
        if not drawable_indices:
            return {gap}
        return {
            gap,
            min(drawable_indices, key=y.__getitem__),
            max(drawable_indices, key=y.__getitem__),
        }
    return {group.start + values.index(low), group.start + values.index(high)}
