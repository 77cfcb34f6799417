"""A region of host memory that holds one copy of a rank's training state.

It begins with a header: the iteration (-1: the copy is incomplete), and the position and the number
of bytes of the description, which follows the tensors. The header is written last, so a process
that is killed while it writes leaves no copy that looks complete.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

import torch

_HEADER = struct.Struct("<8sqqq")
_MAGIC = b"fscopy01"
_ALIGNMENT = 64
INCOMPLETE = -1
_DESCRIPTION_BYTES = 1 << 20
"""Allowance for the description of a copy."""


class Region:
    """A file in memory, mapped into this process. Only one process writes to it at a time."""

    def __init__(self, path: str) -> None:
        """Map the file.

        Args:
            path: an existing file, which grows as needed.

        Raises:
            OSError: it cannot be opened, or there is no memory.
        """
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR)
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._grow(_HEADER.size)

    def iteration(self) -> int:
        """Return the iteration of the copy; :data:`INCOMPLETE` without one."""
        return self._read_header()[0]

    def size(self) -> int:
        """Return the number of bytes of the copy with its header and description."""
        _, position, length = self._read_header()
        return position + length

    def missing_bytes(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Return by how much the region has to grow for a copy of tensors."""
        size = _assign_places(tensors)[1] + _DESCRIPTION_BYTES
        return max(size - os.fstat(self._descriptor).st_size, 0)

    def write(self, iteration: int, tensors: Mapping[str, torch.Tensor], description: Any) -> None:
        """Store a copy.

        Args:
            iteration: iteration of the training state.
            tensors: tensors by name, on any device.
            description: an object that :func:`torch.save` takes.

        Raises:
            OSError: the host has no memory for it. An earlier copy in the region is lost.
        """
        self.invalidate()
        places, end = _assign_places(tensors)
        content = io.BytesIO()
        torch.save((places, description), content)
        self._grow(end + content.tell())
        for name, tensor in tensors.items():
            self._view(places[name], tensor).copy_(tensor.detach())
        self._view_bytes(end, content.tell()).copy_(
            torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
        )
        for device in {tensor.device for tensor in tensors.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._write_header(iteration, end, content.tell())

    def read_description(self) -> Any:
        """Return the description of the copy."""
        return self._read_places()[1]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of the region to those with the same names, which must be the same."""
        places, _ = self._read_places()
        for name, tensor in tensors.items():
            tensor.detach().copy_(self._view(places[name], tensor))

    def invalidate(self) -> None:
        """Mark the copy as incomplete."""
        self._write_header(INCOMPLETE, _HEADER.size, 0)

    def bytes_to_send(self) -> torch.Tensor:
        """Return all bytes of the copy behind the header as a view [size - header], uint8."""
        return self._view_bytes(_HEADER.size, self.size() - _HEADER.size)

    def bytes_to_receive(self, size: int) -> torch.Tensor:
        """Make room for a copy of ``size`` bytes, and return what follows its header as a view.

        Raises:
            OSError: the host has no memory for it.
        """
        self.invalidate()
        self._grow(size)
        return self._view_bytes(_HEADER.size, size - _HEADER.size)

    def header(self) -> tuple[int, int, int]:
        """Return the header of the copy: iteration, and position and length of the description."""
        return self._read_header()

    def complete(self, header: tuple[int, int, int]) -> None:
        """Mark a copy whose bytes were received as complete."""
        self._write_header(*header)

    def _grow(self, size: int) -> None:
        """Make the file and the mapping at least ``size`` bytes large."""
        if self._map is not None and len(self._map) >= size:
            return
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self._descriptor).st_size < size:
            # Unlike a larger file with holes, this fails here if there is no memory.
            os.posix_fallocate(self._descriptor, 0, size)
        length = os.fstat(self._descriptor).st_size
        # Views of the old mapping keep it alive.
        self._map = mmap.mmap(self._descriptor, length)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def _view_bytes(self, start: int, length: int) -> torch.Tensor:
        return self._bytes[start : start + length]

    def _view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        length = like.numel() * like.element_size()
        return self._view_bytes(start, length).view(like.dtype).view(like.shape)

    def _read_places(self) -> tuple[dict[str, int], Any]:
        _, position, length = self._read_header()
        content = io.BytesIO(self._view_bytes(position, length).numpy().tobytes())
        places, description = torch.load(content, weights_only=True)
        return places, description

    def _read_header(self) -> tuple[int, int, int]:
        assert self._map is not None
        if os.fstat(self._descriptor).st_size > len(self._map):
            self._grow(os.fstat(self._descriptor).st_size)
        magic, iteration, position, length = _HEADER.unpack(self._map[: _HEADER.size])
        return (iteration, position, length) if magic == _MAGIC else (INCOMPLETE, _HEADER.size, 0)

    def _write_header(self, iteration: int, position: int, length: int) -> None:
        assert self._map is not None
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, iteration, position, length)


def _assign_places(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Return the first byte of each tensor, and that behind the last one."""
    places, end = {}, _round_up(_HEADER.size)
    for name, tensor in tensors.items():
        places[name] = end
        end = _round_up(end + tensor.numel() * tensor.element_size())
    return places, end


def _round_up(number: int) -> int:
    return -(-number // _ALIGNMENT) * _ALIGNMENT
