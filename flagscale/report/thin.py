"""Reduction of a line to fewer points that look the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flagscale.report.scale import is_drawable

Points = tuple[list[float], list[float]]


def thin_points(x: Sequence[float], y: Sequence[float], most: int) -> Points:
    """Reduce a line to about ``most`` points, at least 4.

    Consecutive points are grouped, and the lowest and highest of each group are kept in order, so
    no extreme is lost. The first and last point are kept. Of values that cannot be drawn, one per
    group is kept, which breaks the line there.

    Args:
        x, y: coordinates of equal length; ``x`` in ascending order.
        most: approximate number of points to keep.
    """
    count = len(x)
    if count <= most:
        return list(x), list(y)
    size = -(-count // max(most // 2 - 1, 1))
    indices_kept = {0, count - 1}
    for start in range(0, count, size):
        indices_kept |= _extremes(y, range(start, min(start + size, count)))
    indices = sorted(indices_kept)
    return [x[i] for i in indices], [y[i] for i in indices]


def _extremes(y: Sequence[float], piece: range) -> set[int]:
    values = y[piece.start : piece.stop]
    low, high = min(values), max(values)
    if not (all(map(math.isfinite, values)) and is_drawable(low) and is_drawable(high)):
        flags = [is_drawable(value) for value in values]
        gap = piece.start + flags.index(False)
        there = [i for i, flag in zip(piece, flags, strict=True) if flag]
        if not there:
            return {gap}
        return {gap, min(there, key=y.__getitem__), max(there, key=y.__getitem__)}
    return {piece.start + values.index(low), piece.start + values.index(high)}
