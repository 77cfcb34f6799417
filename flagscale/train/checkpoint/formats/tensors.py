"""Tensors that are read when they are asked for, a region at a time.

A tensor of one format is made of tensors of another by joining and cutting *rows* (its first
dimension), stacking, and transposing. Nothing is read until :meth:`Stored.read`, and then only what
the region needs, so memory holds one region and the pages of files that are mapped.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, Protocol

import torch

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.spans import Span

Shape = tuple[int, ...]
Region = tuple[tuple[int, int], ...]
"""Beginning and end in each dimension."""
PIECE = 8 << 20
"""Bytes that are read, rearranged, written or compared at a time. Memory of this size is had again
and again from the allocator, where that of more than 32 MB is mapped anew each time, a fault for
every page, and what has just been read is still in a processor's cache when it is written."""


class Stored(Protocol):
    """A tensor on disk."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, region: Region) -> torch.Tensor:
        """A region. What comes back may be a view of a mapped file, and must not be written to."""


def whole(shape: Shape) -> Region:
    """The region that is all of a tensor."""
    return tuple((0, size) for size in shape)


def read(tensor: Stored) -> torch.Tensor:
    """All of a tensor."""
    return tensor.read(whole(tensor.shape))


def size_of(tensor: Stored) -> int:
    """A tensor's bytes."""
    return int(prod(tensor.shape) * tensor.dtype.itemsize)


@dataclass(frozen=True)
class Mapped:
    """A tensor that ``get`` gives whole at no cost: a view of a mapped file."""

    shape: Shape
    dtype: torch.dtype
    get: Callable[[], torch.Tensor]

    def read(self, region: Region) -> torch.Tensor:
        return self.get()[tuple(slice(begin, end) for begin, end in region)]


@dataclass(frozen=True)
class Run:
    """``count`` rows of a tensor, from row ``begin``."""

    tensor: Stored
    begin: int
    count: int


@dataclass(frozen=True)
class Rows:
    """Runs of rows of tensors that are alike in all other dimensions, one after the other."""

    runs: tuple[Run, ...]

    @property
    def shape(self) -> Shape:
        return (sum(run.count for run in self.runs), *self.runs[0].tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.runs[0].tensor.dtype

    def read(self, region: Region) -> torch.Tensor:
        (begin, end), rest = region[0], region[1:]
        parts, first = [], 0
        for run in self.runs:
            low, high = max(begin - first, 0), min(end - first, run.count)
            if low < high:
                parts.append(run.tensor.read(((run.begin + low, run.begin + high), *rest)))
            first += run.count
        if not parts:
            return torch.empty([0, *(high - low for low, high in rest)], dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Transposed:
    """A matrix with its dimensions exchanged."""

    tensor: Stored

    @property
    def shape(self) -> Shape:
        rows, columns = self.tensor.shape
        return columns, rows

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, region: Region) -> torch.Tensor:
        rows, columns = region
        return self.tensor.read((columns, rows)).t()


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape in a new first dimension."""

    tensors: tuple[Stored, ...]

    @property
    def shape(self) -> Shape:
        return (len(self.tensors), *self.tensors[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def read(self, region: Region) -> torch.Tensor:
        (begin, end), rest = region[0], region[1:]
        parts = [self.tensors[index].read(rest) for index in range(begin, end)]
        if len(parts) == 1:
            return parts[0][None]
        return torch.stack(parts) if parts else torch.empty([0, *(h - lo for lo, h in rest)])


@dataclass(frozen=True)
class Item:
    """One item of a tensor's first dimension."""

    tensor: Stored
    index: int

    @property
    def shape(self) -> Shape:
        return self.tensor.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, region: Region) -> torch.Tensor:
        return self.tensor.read(((self.index, self.index + 1), *region))[0]


@dataclass(frozen=True)
class Alike:
    """One tensor that lies in several places, which are compared as it is read."""

    places: tuple[Stored, ...]

    @property
    def shape(self) -> Shape:
        return self.places[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.places[0].dtype

    def read(self, region: Region) -> torch.Tensor:
        first, same = _compared(self.places, region)
        if not same:
            raise CheckpointError(
                "embedding or output layer of the layers that predict further tokens are not the "
                "model's own, and here they share these",
                hint="without mtp_num_layers a run takes the model without those layers",
            )
        return first


@dataclass(frozen=True)
class Copies:
    """One tensor of which a checkpoint has several copies, which are compared as it is read;
    ``unlike`` tells what it means that they differ."""

    places: tuple[Stored, ...]
    unlike: str

    @property
    def shape(self) -> Shape:
        return self.places[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.places[0].dtype

    def read(self, region: Region) -> torch.Tensor:
        first, same = _compared(self.places, region)
        if not same:
            raise CheckpointError(self.unlike)
        return first


def _compared(places: Sequence[Stored], region: Region) -> tuple[torch.Tensor, bool]:
    """A region of the first of some tensors, and whether the others have the same there."""
    first, *others = (place.read(region).contiguous() for place in places)
    bits = first.reshape(-1).view(torch.uint8)
    return first, all(bits.equal(other.reshape(-1).view(torch.uint8)) for other in others)


@dataclass(frozen=True)
class Outline:
    """A tensor's shape alone, of which nothing can be read."""

    shape: Shape
    dtype: torch.dtype = torch.float32

    def read(self, region: Region) -> torch.Tensor:
        raise AssertionError(f"an outline of {self.shape} has no numbers ({region})")


@dataclass(frozen=True)
class Cast:
    """A tensor in another precision."""

    tensor: Stored
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    def read(self, region: Region) -> torch.Tensor:
        return self.tensor.read(region).to(self.dtype)


def typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers: a view of them, or a copy where they are not aligned for that."""
    if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    found: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(found)


def rows(tensor: Stored, begin: int, count: int) -> Rows:
    """``count`` rows of a tensor, from row ``begin``."""
    return Rows((Run(tensor, begin, count),))


def joined(tensors: Sequence[Stored]) -> Rows:
    """All rows of tensors, one after the other."""
    return Rows(tuple(Run(tensor, 0, tensor.shape[0]) for tensor in tensors))


def pieces(region: Region, itemsize: int, most: int = PIECE) -> Iterator[Region]:
    """The parts of a region in the order in which its elements lie, none of more than ``most``
    bytes."""
    if not region:
        yield ()
        return
    (begin, end), rest = region[0], region[1:]
    row = itemsize * prod(high - low for low, high in rest)
    if row > most:
        for index in range(begin, end):
            for part in pieces(rest, itemsize, most):
                yield ((index, index + 1), *part)
        return
    step = max(most // max(row, 1), 1)
    for first in range(begin, end, step):
        yield ((first, min(first + step, end)), *rest)


def contents(tensor: Stored, region: Region | None = None) -> Iterator[memoryview]:
    """The bytes of a tensor, or of a region of it, a piece at a time."""
    region = whole(tensor.shape) if region is None else region
    for part in pieces(region, tensor.dtype.itemsize):
        yield raw(tensor.read(part).contiguous())


def write(file: BinaryIO, tensor: Stored, report: Callable[[int], None]) -> Span:
    """Write a tensor; ``report`` is called with the bytes that are written.

    Raises:
        OSError: of the file.
    """
    begin, size, crc = file.tell(), 0, 0
    for content in contents(tensor):
        file.write(content)
        crc = zlib.crc32(content, crc)
        size += len(content)
        report(len(content))
    return Span(begin, size, crc)
