"""Sizes in bytes: how they are written, which ones a sweep visits, how they fit their elements."""

from __future__ import annotations

import re

from flagscale.errors import ConfigError
from flagscale.report.scale import format_size

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_SIZES = 10_000


def parse_size(text: str) -> int:
    """Bytes of a size such as ``1024``, ``2kb``, ``32M``, ``4GiB``; every unit is binary.

    Raises:
        ConfigError: it is no size, or not a whole number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is not a size; expected such as 1024, 128K, 32MB or 4G")
    size = float(found["number"]) * _UNITS[found["unit"].lower()]
    if not size.is_integer():
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return int(size)


def sweep(
    minimum: int, maximum: int, *, step: int | None = None, factor: float | None = None
) -> tuple[int, ...]:
    """The sizes from ``minimum`` to ``maximum``, both in bytes, by steps or by a factor.

    Without either, ten steps. Equal bounds are one size.

    Raises:
        ConfigError: the bounds are in the wrong order, both ways are given, or no end is reached.
    """
    if minimum > maximum:
        raise ConfigError(
            f"-b/--minbytes {format_size(minimum)} is above -e/--maxbytes {format_size(maximum)}"
        )
    if step is not None and factor is not None:
        raise ConfigError("-i/--stepbytes and -f/--stepfactor exclude each other: give one")
    if factor is not None and factor <= 1:
        raise ConfigError(f"-f/--stepfactor {factor:g} would never reach the end; expected above 1")
    if step is not None and step <= 0:
        raise ConfigError(f"-i/--stepbytes {step} would never reach the end; expected above 0")
    if minimum == maximum:
        return (minimum,)
    if factor is not None:
        return _by_factor(minimum, maximum, factor)
    if step is None:
        step = max(1, (maximum - minimum) // 10)
    if (maximum - minimum) // step > _MOST_SIZES:
        raise ConfigError(
            f"-i/--stepbytes {step} makes {(maximum - minimum) // step + 1} sizes; "
            f"at most {_MOST_SIZES} are run",
            hint="a factor covers a wide range: -f 2",
        )
    return tuple(range(minimum, maximum + 1, step))


def _by_factor(minimum: int, maximum: int, factor: float) -> tuple[int, ...]:
    if minimum == 0:
        raise ConfigError("-b/--minbytes 0 cannot be multiplied by -f/--stepfactor")
    sizes = [minimum]
    while True:
        # A small size times a small factor may round to itself.
        following = max(round(sizes[-1] * factor), sizes[-1] + 1)
        if following > maximum:
            return tuple(sizes)
        sizes.append(following)


def fit(size: int, element: int, parts: int) -> int:
    """``size`` cut to whole elements (of ``element`` bytes) in ``parts`` equal parts; at least
    one element a part."""
    whole = element * parts
    return max(size // whole, 1) * whole
