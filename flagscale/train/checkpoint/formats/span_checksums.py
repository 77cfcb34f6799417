"""CRC-32 checksums of byte spans that cover a file, to detect that it changed after it was written.

A writer computes most checksums from the bytes that it writes, so nothing is read back. They detect
damage by a crash or a disk, not intentional modification.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from flagscale.train.checkpoint.checksums import crc32

_BUFFER_BYTES = 1 << 20


class FileSpan(NamedTuple):
    """Byte range of a file.

    Attributes:
        begin: offset of the first byte.
        size: number of bytes.
        crc: CRC-32 of the bytes.
    """

    begin: int
    size: int
    crc: int


def cover_file(path: Path, known_spans: Iterable[FileSpan]) -> list[FileSpan]:
    """Return spans that cover a file; read the gaps between the known spans for their CRC-32."""
    spans: list[FileSpan] = []
    position = 0
    with path.open("rb") as file:
        end = file.seek(0, 2)
        for span in (*sorted(known_spans), FileSpan(end, 0, 0)):
            if span.begin > position:
                spans.append(
                    FileSpan(
                        position,
                        span.begin - position,
                        _compute_crc(file, position, span.begin - position),
                    )
                )
            if span.size:
                spans.append(span)
            position = span.begin + span.size
    return spans


def matches_spans(path: Path, recorded: Any) -> bool:
    """Return whether a file still matches spans, recorded in JSON as lists of three numbers."""
    if not isinstance(recorded, list) or not all(map(_is_span, recorded)):
        return False
    spans = [FileSpan(*item) for item in recorded]
    if sum(span.size for span in spans) != path.stat().st_size:
        return False
    with path.open("rb") as file:
        return all(_compute_crc(file, span.begin, span.size) == span.crc for span in spans)


def _is_span(item: Any) -> bool:
    is_valid = isinstance(item, list) and all(
        type(number) is int and number >= 0 for number in item
    )
    return is_valid and len(item) == len(FileSpan._fields)


def _compute_crc(file: BinaryIO, begin: int, size: int) -> int:
    file.seek(begin)
    crc = 0
    while size > 0 and (block := file.read(min(size, _BUFFER_BYTES))):
        crc = crc32(block, crc)
        size -= len(block)
    return crc
