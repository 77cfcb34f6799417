"""Consecutive bytes of a file that are in several pieces of memory.

Bytes of a tensor can thus be read to where they belong, and those around it to a buffer, by one
request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from flagscale.train.checkpoint.byte_range_file import ByteRangeFile


class ScatteredBytes:
    """Pieces of memory that together stand for a range of bytes."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        """Join writable pieces of bytes, in order."""
        self._pieces = [piece for piece in pieces if len(piece)]
        self._begins = list(accumulate(map(len, self._pieces), initial=0))

    def __len__(self) -> int:
        return self._begins[-1]

    def pieces(self, begin: int, end: int) -> list[memoryview]:
        """Return the memory of the bytes from ``begin`` to ``end``, which share it."""
        begin, end = max(begin, 0), min(end, len(self))
        result = []
        index = bisect_right(self._begins, begin) - 1
        while begin < end:
            first = self._begins[index]
            piece = self._pieces[index][begin - first : end - first]
            result.append(piece)
            begin += len(piece)
            index += 1
        return result

    def slice(self, begin: int, end: int) -> ScatteredBytes:
        """Return the bytes from ``begin`` to ``end``, which share memory with these."""
        return ScatteredBytes(self.pieces(begin, end))

    def join(self, begin: int, end: int) -> memoryview:
        """Return the bytes from ``begin`` to ``end`` in one piece.

        They share memory with these if they are in one piece already; otherwise they are copied.
        """
        pieces = self.pieces(begin, end)
        return pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces))


class ScatteredFile(ByteRangeFile):
    """Scattered bytes as a file."""

    def __init__(self, content: ScatteredBytes) -> None:
        """Open the bytes."""
        super().__init__(len(content))
        self._content = content

    def _read_at(self, position: int, buffer: memoryview) -> int:
        filled = 0
        for piece in self._content.pieces(position, position + len(buffer)):
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled
