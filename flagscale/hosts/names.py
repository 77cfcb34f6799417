"""Ranges in host names: ``node[01-16]`` in a hostfile, and the same in tables. Pure.

A range keeps its leading zeros: ``[08-10]`` is 08, 09, 10. Brackets hold numbers and ranges with
commas between them; a name may have several, the last of which counts fastest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

MOST_NAMES = 16384
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBER = re.compile(r"\d+")
_COMMA = re.compile(r",(?![^\[\]]*\])")


def expand(pattern: str) -> list[str]:
    """The names that a pattern stands for, in order.

    Raises :class:`ValueError` for a bracket that isn't closed or holds anything but ranges, for
    a range that runs backwards and for more than :data:`MOST_NAMES` names.
    """
    pieces = _BRACKET.split(pattern)
    texts, ranges = pieces[::2], pieces[1::2]
    if any("[" in text or "]" in text for text in texts):
        raise ValueError(f"{pattern!r}: a bracket without its other half")
    choices = [list(_numbers(inner)) for inner in ranges]
    total = prod(map(len, choices))
    if total > MOST_NAMES:
        raise ValueError(f"{pattern!r} stands for {total} names; at most {MOST_NAMES} are taken")
    names = []
    for chosen in product(*choices):
        tail = "".join(number + text for number, text in zip(chosen, texts[1:], strict=True))
        names.append(texts[0] + tail)
    return names


def expand_list(text: str) -> list[str]:
    """The names of several patterns with commas between them, as schedulers list nodes:
    ``node[1-3,7],login``. Raises :class:`ValueError` as :func:`expand`."""
    return [name for pattern in _COMMA.split(text) for name in expand(pattern)]


def _numbers(inner: str) -> Iterator[str]:
    for part in inner.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"[{inner}]: expected numbers and ranges such as 01-16")
        first, last = found[1], found[2] or found[1]
        if len(last) > 9 or int(last) < int(first):
            raise ValueError(f"[{inner}]: {first}-{last} is no range")
        padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
        if padded and len(first) != len(last):
            raise ValueError(f"[{inner}]: {first} and {last} have different widths")
        if int(last) - int(first) >= MOST_NAMES:
            raise ValueError(f"[{inner}]: at most {MOST_NAMES} names are taken")
        width = len(first) if first[0] == "0" else 0
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{width}}"


def ranges(names: Iterable[str]) -> list[str]:
    """Names in short and in their order, those that count up as one range: what :func:`expand`
    makes of each is the names again."""
    runs: list[list[str]] = []
    for name in names:
        if runs and name == _after(runs[-1]):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [compress(run) for run in runs]


def _after(run: Sequence[str]) -> str | None:
    """The name that makes a run longer by one, if any could."""
    found = list(_NUMBER.finditer(run[-1]))
    if not found or len(run) == MOST_NAMES:
        return None
    last = found[-1]
    digits = f"{int(last[0]) + 1:0{len(last[0])}}"
    # One more digit is one more number only where none of them has zeros in front.
    wider = len(digits) > len(last[0])
    if len(digits) > 9 or (wider and run[0][last.start()] == "0"):
        return None
    return run[-1][: last.start()] + digits + run[-1][last.end() :]


def compress(names: Iterable[str]) -> str:
    """Names in short: ``node[1-3,7],login``. Names that differ in one number are folded, in the
    order in which they first come; :func:`expand` turns each back."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    order: dict[tuple[str, str, int] | str, None] = {}
    for name in dict.fromkeys(names):
        found = list(_NUMBER.finditer(name))
        if not found or len(found[-1][0]) > 9:
            order[name] = None
            continue
        last = found[-1]
        before, after, digits = name[: last.start()], name[last.end() :], last[0]
        # Zeros in front belong to the number's width; without them every width is one group, but
        # for `10`, which goes with `08` and `09`.
        padded = (before, after, len(digits))
        key = padded if digits[0] == "0" or padded in groups else (before, after, 0)
        groups.setdefault(key, []).append(int(digits))
        order[key] = None
    return ",".join(
        item if isinstance(item, str) else _folded(item, groups[item]) for item in order
    )


def _folded(key: tuple[str, str, int], numbers: Sequence[int]) -> str:
    before, after, width = key
    text = folded(numbers, width)
    return f"{before}{text}{after}" if text.isdigit() else f"{before}[{text}]{after}"


def folded(numbers: Iterable[int], width: int = 0) -> str:
    """``0-3,6`` of 0, 1, 2, 3, 6; with zeros in front up to ``width`` digits."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in runs)


def some(items: Sequence[object], most: int = 10) -> str:
    """Items in a sentence, the first of many."""
    return ", ".join(map(str, items[:most])) + (" …" if items[most:] else "")
