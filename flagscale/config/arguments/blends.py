"""Which words of a blend belong together: weights and the data sets that they stand before.

Pure, so that the YAML's check and the training program judge alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def paired(words: Iterable[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
    """Data sets with their weights, None for all where none has one. ``words`` come with the
    number that each is, None for a data set.

    Raises ValueError: nothing is given, a weight is no positive number, stands before no data set,
    or only some data sets have one.
    """
    found: list[tuple[str, float | None]] = []
    pending: str | None = None
    weight: float | None = None
    for word, number in words:
        if number is None:
            found.append((word, weight))
            pending = weight = None
        elif pending is not None:
            raise ValueError(f"two weights in a row before {word!r}; expected a prefix")
        elif not (math.isfinite(number) and number > 0):
            raise ValueError(f"the weight {word} is not a positive number")
        else:
            pending, weight = word, number
    if pending is not None:
        raise ValueError(f"the weight {pending} at the end stands before no prefix")
    if not found:
        raise ValueError("is empty; expected a data set's prefix")
    bare = [word for word, number in found if number is None]
    if bare and len(bare) < len(found):
        raise ValueError(f"{bare[0]} has no weight, but others have; give all or none")
    return found
