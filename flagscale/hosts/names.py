"""Ranges in host names, such as ``node[01-16]``, in hostfiles and in tables. Pure functions.

A range keeps its leading zeros: ``[08-10]`` is 08, 09, 10. Brackets contain numbers and ranges,
separated by commas. A name may have several brackets; the last one varies fastest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

MAX_NAMES = 16384
_BRACKETED = re.compile(r"\[([^\[\]]*)\]")
_NUMBER_OR_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBER = re.compile(r"\d+")
_COMMA_BETWEEN_PATTERNS = re.compile(r",(?![^\[\]]*\])")


def expand_pattern(pattern: str) -> list[str]:
    """Return the names that a pattern stands for, in order.

    Raises :class:`ValueError` for an unbalanced bracket, a bracket that contains anything but
    ranges, a descending range, or more than :data:`MAX_NAMES` names.
    """
    segments = _BRACKETED.split(pattern)
    texts, ranges = segments[::2], segments[1::2]
    if any("[" in text or "]" in text for text in texts):
        raise ValueError(f"{pattern!r}: a bracket without its other half")
    choices = [list(_iter_numbers(bracket_text)) for bracket_text in ranges]
    total = prod(map(len, choices))
    if total > MAX_NAMES:
        raise ValueError(f"{pattern!r} expands to {total} names; at most {MAX_NAMES} are supported")
    names = []
    for numbers in product(*choices):
        suffix = "".join(number + text for number, text in zip(numbers, texts[1:], strict=True))
        names.append(texts[0] + suffix)
    return names


def expand_list(text: str) -> list[str]:
    """Return the names of a comma-separated list of patterns, as schedulers list nodes:
    ``node[1-3,7],login``. Raises :class:`ValueError` as :func:`expand_pattern`.
    """
    return [
        name for pattern in _COMMA_BETWEEN_PATTERNS.split(text) for name in expand_pattern(pattern)
    ]


def _iter_numbers(bracket_text: str) -> Iterator[str]:
    for part in bracket_text.split(","):
        match = _NUMBER_OR_RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"[{bracket_text}]: expected numbers and ranges such as 01-16")
        first, last = match[1], match[2] or match[1]
        if len(last) > 9 or int(last) < int(first):
            raise ValueError(f"[{bracket_text}]: {first}-{last} is not a range")
        padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
        if padded and len(first) != len(last):
            raise ValueError(f"[{bracket_text}]: {first} and {last} have different widths")
        if int(last) - int(first) >= MAX_NAMES:
            raise ValueError(f"[{bracket_text}]: at most {MAX_NAMES} names are taken")
        width = len(first) if first[0] == "0" else 0
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{width}}"


def compress_consecutive(names: Iterable[str]) -> list[str]:
    """Group consecutive names into ranges, in their order. :func:`expand_pattern` turns each back
    into its names."""
    sequences: list[list[str]] = []
    for name in names:
        if sequences and name == _next_name(sequences[-1]):
            sequences[-1].append(name)
        else:
            sequences.append([name])
    return [compress_names(sequence) for sequence in sequences]


def _next_name(sequence: Sequence[str]) -> str | None:
    """Return the name that would extend a sequence of names by one; None if there is none."""
    matches = list(_NUMBER.finditer(sequence[-1]))
    if not matches or len(sequence) == MAX_NAMES:
        return None
    last_number = matches[-1]
    digits = f"{int(last_number[0]) + 1:0{len(last_number[0])}}"
    # One more digit continues the run only if no number in it has leading zeros.
    is_wider = len(digits) > len(last_number[0])
    if len(digits) > 9 or (is_wider and sequence[0][last_number.start()] == "0"):
        return None
    return sequence[-1][: last_number.start()] + digits + sequence[-1][last_number.end() :]


def compress_names(names: Iterable[str]) -> str:
    """Return names in short form: ``node[1-3,7],login``.

    Names that differ in one number are merged into a range, in the order of their first
    occurrence. :func:`expand_list` turns the text back into the names.
    """
    groups: dict[tuple[str, str, int], list[int]] = {}
    order: dict[tuple[str, str, int] | str, None] = {}
    for name in dict.fromkeys(names):
        matches = list(_NUMBER.finditer(name))
        if not matches or len(matches[-1][0]) > 9:
            order[name] = None
            continue
        last_number = matches[-1]
        prefix, suffix, digits = (
            name[: last_number.start()],
            name[last_number.end() :],
            last_number[0],
        )
        # Leading zeros belong to the number's width. Numbers of any width without them form one
        # group, except for `10`, which belongs to `08` and `09`.
        padded = (prefix, suffix, len(digits))
        key = padded if digits[0] == "0" or padded in groups else (prefix, suffix, 0)
        groups.setdefault(key, []).append(int(digits))
        order[key] = None
    return ",".join(
        item if isinstance(item, str) else _format_group(item, groups[item]) for item in order
    )


def _format_group(key: tuple[str, str, int], numbers: Sequence[int]) -> str:
    prefix, suffix, width = key
    text = format_ranges(numbers, width)
    return f"{prefix}{text}{suffix}" if text.isdigit() else f"{prefix}[{text}]{suffix}"


def format_ranges(numbers: Iterable[int], width: int = 0) -> str:
    """Return numbers as ranges, such as ``0-3,6`` for 0, 1, 2, 3, 6, zero-padded to ``width``
    digits.
    """
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in ranges)


def list_first(items: Sequence[object], max_items: int = 10) -> str:
    """Return items as a comma-separated list, truncated after ``max_items`` items."""
    return ", ".join(map(str, items[:max_items])) + (" …" if items[max_items:] else "")
