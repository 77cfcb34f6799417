"""Writing of lazily read tensors as archives of ``torch.save``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

from flagscale.train.checkpoint.formats.lazy_tensors import LazyTensor, Region, iter_bytes
from flagscale.train.checkpoint.formats.span_checksums import FileSpan
from flagscale.train.checkpoint.tensor_archive_writer import write_archive


def write_tensor(
    file: BinaryIO, tensor: LazyTensor, region: Region, report: Callable[[int], None]
) -> tuple[int, FileSpan]:
    """Write a region of a tensor as an archive at the current position of a file.

    The bytes are written as they are read, so memory never holds a whole tensor.

    Args:
        file: file that is open for writing, at a position that is a multiple of 64 bytes.
        tensor: the tensor.
        region: region of the tensor to write.
        report: called with the number of bytes after each chunk.

    Returns:
        The length of the archive in bytes, and the span of the tensor's bytes in the file.

    Raises:
        OSError: the file cannot be written.
    """

    def read() -> Iterator[memoryview]:
        for chunk in iter_bytes(tensor, region):
            yield chunk
            report(len(chunk))

    shape = tuple(high - low for low, high in region)
    length, record = write_archive(file, tensor.dtype, shape, read())
    return length, FileSpan(record.begin, record.size, record.crc)
