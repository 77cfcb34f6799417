"""What tells whether a file is as it was written: the CRC-32 of spans that cover it.

Whoever writes a file knows most of them from the very bytes it wrote, so that nothing is read back.
They are for what a crash or a disk does to a file, not against somebody who changes it on purpose.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_PIECE = 1 << 20


class Span(NamedTuple):
    """Bytes of a file: where they begin, how many they are, and their CRC-32."""

    begin: int
    size: int
    crc: int


def covering(path: Path, known: Iterable[Span]) -> list[Span]:
    """Spans that cover a file: those that are known, and between them what is read now."""
    found: list[Span] = []
    at = 0
    with path.open("rb") as file:
        end = file.seek(0, 2)
        for span in (*sorted(known), Span(end, 0, 0)):
            if span.begin > at:
                found.append(Span(at, span.begin - at, _crc(file, at, span.begin - at)))
            if span.size:
                found.append(span)
            at = span.begin + span.size
    return found


def as_written(path: Path, said: Any) -> bool:
    """Whether a file is what spans, as a record has them, say that it was."""
    if not isinstance(said, list) or not all(map(_is_span, said)):
        return False
    spans = [Span(*item) for item in said]
    if sum(span.size for span in spans) != path.stat().st_size:
        return False
    with path.open("rb") as file:
        return all(_crc(file, span.begin, span.size) == span.crc for span in spans)


def _is_span(item: Any) -> bool:
    whole = isinstance(item, list) and all(type(n) is int and n >= 0 for n in item)
    return whole and len(item) == len(Span._fields)


def _crc(file: BinaryIO, begin: int, size: int) -> int:
    file.seek(begin)
    crc = 0
    while size > 0 and (piece := file.read(min(size, _PIECE))):
        crc = zlib.crc32(piece, crc)
        size -= len(piece)
    return crc
