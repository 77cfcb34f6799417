"""A run of bytes, such as a record in a larger file, as a file of its own."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import Any


class Window(io.RawIOBase):
    """Knows its length and where it is read; a subclass reads."""

    def __init__(self, length: int) -> None:
        self._length, self._at = length, 0

    @abstractmethod
    def _copy(self, at: int, part: memoryview) -> int:
        """Fill ``part`` with what begins at byte ``at``, all of it inside; how much came."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(min(len(buffer), self._length - self._at), 0)
        read = self._copy(self._at, memoryview(buffer)[:left])
        self._at += read
        return read
