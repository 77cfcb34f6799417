"""Sizes in bytes: parsing, the sizes of a sweep, and rounding to whole elements."""

from __future__ import annotations

import re

from flagscale.errors import ConfigError
from flagscale.report.scale import format_size

_SIZE_PATTERN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[kmgt]?)(?:i?b)?", re.IGNORECASE
)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_SIZES = 10_000


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``1024``, ``2kb``, ``32M``, ``4GiB``. All units are
    binary.

    Raises:
        ConfigError: the text is no size, or no whole number of bytes.
    """
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; expected such as 1024, 128K, 32MB or 4G")
    size = float(match["number"]) * _UNITS[match["unit"].lower()]
    if not size.is_integer():
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return int(size)


def sweep_sizes(
    minimum: int, maximum: int, *, step: int | None = None, factor: float | None = None
) -> tuple[int, ...]:
    """Return the sizes from ``minimum`` to ``maximum`` in bytes, by steps or by a factor.
    Without either there are ten steps. Equal bounds are one size.

    Raises:
        ConfigError: the bounds are in the wrong order, both ways are given, or the sweep has no
            end.
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
        return _sweep_by_factor(minimum, maximum, factor)
    if step is None:
        step = max(1, (maximum - minimum) // 10)
    if (maximum - minimum) // step > _MAX_SIZES:
        raise ConfigError(
            f"-i/--stepbytes {step} makes {(maximum - minimum) // step + 1} sizes; "
            f"at most {_MAX_SIZES} are run",
            hint="a factor covers a wide range: -f 2",
        )
    return tuple(range(minimum, maximum + 1, step))


def _sweep_by_factor(minimum: int, maximum: int, factor: float) -> tuple[int, ...]:
    if minimum == 0:
        raise ConfigError("-b/--minbytes 0 cannot be multiplied by -f/--stepfactor")
    sizes = [minimum]
    while True:
        # A small size times a small factor may round to itself.
        next_size = max(round(sizes[-1] * factor), sizes[-1] + 1)
        if next_size > maximum:
            return tuple(sizes)
        sizes.append(next_size)


def round_to_parts(size: int, element_bytes: int, parts: int) -> int:
    """Round ``size`` down to whole elements in ``parts`` equal parts, with at least one element
    per part.

    Args:
        size: size in bytes.
        element_bytes: size of an element in bytes.
        parts: number of parts.
    """
    unit = element_bytes * parts
    return max(size // unit, 1) * unit
