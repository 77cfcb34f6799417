"""Fewer points that look the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flagscale.report.scale import drawable

Points = tuple[list[float], list[float]]


def thin(x: Sequence[float], y: Sequence[float], most: int) -> Points:
    """The points of a line cut to about ``most``, at least 4.

    Points that follow each other are taken together, and of each such piece the lowest and the
    highest are kept, in their order: no extreme of the line is lost. So are its first and its last
    point. Of values that cannot be drawn one a piece stays, which breaks the line there.

    Args:
        x, y: as many of each; ``x`` in ascending order.
        most: about how many to keep.
    """
    count = len(x)
    if count <= most:
        return list(x), list(y)
    size = -(-count // max(most // 2 - 1, 1))
    kept = {0, count - 1}
    for start in range(0, count, size):
        kept |= _extremes(y, range(start, min(start + size, count)))
    indices = sorted(kept)
    return [x[i] for i in indices], [y[i] for i in indices]


def _extremes(y: Sequence[float], piece: range) -> set[int]:
    values = y[piece.start : piece.stop]
    low, high = min(values), max(values)
    if not (all(map(math.isfinite, values)) and drawable(low) and drawable(high)):
        flags = [drawable(value) for value in values]
        gap = piece.start + flags.index(False)
        there = [i for i, flag in zip(piece, flags, strict=True) if flag]
        if not there:
            return {gap}
        return {gap, min(there, key=y.__getitem__), max(there, key=y.__getitem__)}
    return {piece.start + values.index(low), piece.start + values.index(high)}
