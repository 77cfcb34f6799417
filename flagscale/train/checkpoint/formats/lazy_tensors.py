"""Lazy tensors: views of tensors on disk that are read on demand, a region at a time.

A tensor of one format is composed from tensors of another by concatenating and slicing *rows* (the
first dimension), stacking, and transposing. Nothing is read before :meth:`LazyTensor.read`, which
reads only the requested region. Memory holds one region and the pages of memory-mapped files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, Protocol

import torch

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.checksums import crc32
from flagscale.train.checkpoint.formats.span_checksums import FileSpan

Shape = tuple[int, ...]
Region = tuple[tuple[int, int], ...]
"""Half-open range ``(begin, end)`` in each dimension."""
CHUNK_BYTES = 8 << 20
"""Bytes that are read, rearranged, written or compared at a time.

The allocator reuses blocks of this size, whereas blocks of more than 32 MB are mapped anew each
time with a page fault per page. Data that was just read is still in the CPU cache when it is
written.
"""


class LazyTensor(Protocol):
    """A tensor that is read on demand."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, region: Region) -> torch.Tensor:
        """Read a region. The result may be a view of a mapped file and must not be written to."""


def full_region(shape: Shape) -> Region:
    """Return the region that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def read_tensor(tensor: LazyTensor) -> torch.Tensor:
    """Read a whole tensor."""
    return tensor.read(full_region(tensor.shape))


def count_bytes(tensor: LazyTensor) -> int:
    """Return the size of a tensor in bytes."""
    return int(prod(tensor.shape) * tensor.dtype.itemsize)


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in a memory-mapped file, or in memory.

    ``load`` returns the whole tensor, as a view that takes no time and no memory.
    """

    shape: Shape
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    def read(self, region: Region) -> torch.Tensor:
        return self.load()[tuple(slice(begin, end) for begin, end in region)]


@dataclass(frozen=True)
class RowSlice:
    """``count`` rows of a tensor from row ``begin`` on."""

    tensor: LazyTensor
    begin: int
    count: int


@dataclass(frozen=True)
class ConcatenatedRows:
    """Concatenation of row slices of tensors that have the same shape in all other dimensions."""

    slices: tuple[RowSlice, ...]

    @property
    def shape(self) -> Shape:
        return (sum(part.count for part in self.slices), *self.slices[0].tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.slices[0].tensor.dtype

    def read(self, region: Region) -> torch.Tensor:
        (begin, end), other_dimensions = region[0], region[1:]
        parts = []
        slice_begin = 0  # row of this tensor at which the current slice begins
        for row_slice in self.slices:
            low, high = max(begin - slice_begin, 0), min(end - slice_begin, row_slice.count)
            if low < high:
                rows = (row_slice.begin + low, row_slice.begin + high)
                parts.append(row_slice.tensor.read((rows, *other_dimensions)))
            slice_begin += row_slice.count
        if not parts:
            return torch.empty(
                [0, *(high - low for low, high in other_dimensions)], dtype=self.dtype
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class TransposedTensor:
    """Transpose of a matrix."""

    tensor: LazyTensor

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
class StackedTensor:
    """Tensors of one shape, stacked in a new first dimension."""

    tensors: tuple[LazyTensor, ...]

    @property
    def shape(self) -> Shape:
        return (len(self.tensors), *self.tensors[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def read(self, region: Region) -> torch.Tensor:
        (begin, end), item_region = region[0], region[1:]
        items = [self.tensors[index].read(item_region) for index in range(begin, end)]
        if len(items) == 1:
            return items[0][None]
        if items:
            return torch.stack(items)
        return torch.empty([0, *(high - low for low, high in item_region)], dtype=self.dtype)


@dataclass(frozen=True)
class TensorItem:
    """One index of a tensor's first dimension."""

    tensor: LazyTensor
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
class ReplicatedTensor:
    """A tensor that is stored several times. The replicas are compared as a region is read.

    Attributes:
        replicas: the stored tensors.
        mismatch: message of the error that is raised if they differ.
        hint: hint of that error.
    """

    replicas: tuple[LazyTensor, ...]
    mismatch: str
    hint: str | None = None

    @property
    def shape(self) -> Shape:
        return self.replicas[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.replicas[0].dtype

    def read(self, region: Region) -> torch.Tensor:
        """Read a region.

        Raises:
            CheckpointError: the replicas differ in it.
        """
        first, *copies = (replica.read(region).contiguous() for replica in self.replicas)
        first_bytes = first.reshape(-1).view(torch.uint8)
        if not all(first_bytes.equal(copy.reshape(-1).view(torch.uint8)) for copy in copies):
            raise CheckpointError(self.mismatch, hint=self.hint)
        return first


@dataclass(frozen=True)
class MtpSharedTensor(ReplicatedTensor):
    """Embedding or output layer that multi-token prediction layers share with the model.

    The first replica is the model's; the others are those of the multi-token prediction layers.
    """

    mismatch: str = (
        "the multi-token prediction layers have an embedding or output layer that differs from the "
        "model's, which is not supported: they are shared"
    )
    hint: str | None = "unset mtp_num_layers to use the model without those layers"


@dataclass(frozen=True)
class MetaTensor:
    """A shape and dtype without data, to compute the shapes of composed tensors."""

    shape: Shape
    dtype: torch.dtype = torch.float32

    def read(self, region: Region) -> torch.Tensor:
        raise AssertionError(f"a meta tensor of shape {self.shape} has no data ({region})")


@dataclass(frozen=True)
class CastTensor:
    """A tensor converted to another dtype."""

    tensor: LazyTensor
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    def read(self, region: Region) -> torch.Tensor:
        return self.tensor.read(region).to(self.dtype)


def view_as_dtype(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a flat uint8 tensor as another dtype; copy it if it is not aligned for that dtype."""
    if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without copying them."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def slice_rows(tensor: LazyTensor, begin: int, count: int) -> ConcatenatedRows:
    """Slice ``count`` rows of a tensor, starting at row ``begin``."""
    return ConcatenatedRows((RowSlice(tensor, begin, count),))


def concatenate_rows(tensors: Sequence[LazyTensor]) -> ConcatenatedRows:
    """Concatenate all rows of some tensors."""
    return ConcatenatedRows(tuple(RowSlice(tensor, 0, tensor.shape[0]) for tensor in tensors))


def split_region(region: Region, itemsize: int, max_bytes: int = CHUNK_BYTES) -> Iterator[Region]:
    """Split a region, in memory order, into regions of at most ``max_bytes`` bytes."""
    if not region:
        yield ()
        return
    (begin, end), inner_region = region[0], region[1:]
    row_bytes = itemsize * prod(high - low for low, high in inner_region)
    if row_bytes > max_bytes:
        for index in range(begin, end):
            for part in split_region(inner_region, itemsize, max_bytes):
                yield ((index, index + 1), *part)
        return
    rows_per_part = max(max_bytes // max(row_bytes, 1), 1)
    for first in range(begin, end, rows_per_part):
        yield ((first, min(first + rows_per_part, end)), *inner_region)


def iter_bytes(tensor: LazyTensor, region: Region | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a tensor or of a region, in chunks of at most :data:`CHUNK_BYTES`."""
    region = full_region(tensor.shape) if region is None else region
    for part in split_region(region, tensor.dtype.itemsize):
        yield as_bytes(tensor.read(part).contiguous())


def write_bytes(file: BinaryIO, tensor: LazyTensor, report: Callable[[int], None]) -> FileSpan:
    """Write a tensor's bytes to a file.

    Args:
        file: file that is open for writing.
        tensor: the tensor.
        report: called after each chunk with its number of bytes.

    Returns:
        The span of the file that holds the tensor, with its CRC-32.

    Raises:
        OSError: the file cannot be written.
    """
    begin, size, crc = file.tell(), 0, 0
    for content in iter_bytes(tensor):
        file.write(content)
        crc = crc32(content, crc)
        size += len(content)
        report(len(content))
    return FileSpan(begin, size, crc)
