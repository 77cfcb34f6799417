"""Base class of file objects that expose a range of bytes, such as a record of a larger file."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import Any


class ByteRangeFile(io.RawIOBase):
    """Read-only, seekable file of a fixed length. Subclasses implement :meth:`_read_at`."""

    def __init__(self, length: int) -> None:
        self._length, self._position = length, 0

    @abstractmethod
    def _read_at(self, position: int, buffer: memoryview) -> int:
        """Fill ``buffer`` with the bytes from ``position`` on, and return their number.

        All of ``buffer`` is within the range.
        """

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._length - self._position), 0)
        read = self._read_at(self._position, memoryview(buffer)[:count])
        self._position += read
        return read
