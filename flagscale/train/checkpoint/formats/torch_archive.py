"""Streaming writer of ``torch.save`` archives with a single tensor.

Such a file is a zip archive with uncompressed records: a pickle that describes the tensor, and its
bytes. The bytes are written as they are read, so memory never holds a whole tensor. The archive has
the CRC-32 checksums that ``verify_checkpoint`` compares; torch's writer takes several times as long
to compute them.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from flagscale.train.checkpoint.formats.lazy_tensors import LazyTensor, Region, iter_bytes
from flagscale.train.checkpoint.formats.span_checksums import FileSpan

_ALIGNMENT_BYTES = 64
_LOCAL_HEADER_BYTES = 30
_ZIP64_FIELD_BYTES = 20
_FIELD_HEADER_BYTES = 4
_PADDING_FIELD_ID = b"FB"
"""ID of the extra header field that torch's writer uses for alignment."""
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


def write_tensor(
    file: BinaryIO, tensor: LazyTensor, region: Region, report: Callable[[int], None]
) -> tuple[int, FileSpan]:
    """Write a region of a tensor as an archive at the current position of a file.

    The position must be a multiple of 64 bytes.

    Args:
        file: file that is open for writing.
        tensor: the tensor.
        region: region of the tensor to write.
        report: called with the number of bytes after each chunk.

    Returns:
        The length of the archive in bytes, and the span of the tensor's bytes in the file.

    Raises:
        OSError: the file cannot be written.
    """
    begin = file.tell()
    shape = tuple(high - low for low, high in region)
    data_bytes = torch.Size(shape).numel() * tensor.dtype.itemsize
    stream: Any = _OffsetFile(file, begin)
    with zipfile.ZipFile(stream, "w") as archive:
        _write_record(archive, "data.pkl", _pickle_description(tensor.dtype, shape))
        _write_record(archive, "byteorder", b"little")
        record = zipfile.ZipInfo("archive/data/0")
        is_zip64 = data_bytes >= zipfile.ZIP64_LIMIT
        record.extra = _build_alignment_field(file.tell() - begin, record, is_zip64=is_zip64)
        with archive.open(record, "w", force_zip64=is_zip64) as content:
            for chunk in iter_bytes(tensor, region):
                content.write(chunk)
                report(len(chunk))
        data_begin = file.tell() - data_bytes
        _write_record(archive, "version", b"3\n")
    return file.tell() - begin, FileSpan(data_begin, data_bytes, record.CRC)


def _write_record(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)


def _build_alignment_field(offset: int, record: zipfile.ZipInfo, *, is_zip64: bool) -> bytes:
    """Return an extra header field that aligns a record's data to 64 bytes.

    Args:
        offset: offset of the record's header in the archive.
        record: the record.
        is_zip64: the header also has a field for sizes above 4 GiB (zip64).
    """
    header_size = (
        _LOCAL_HEADER_BYTES
        + len(record.filename)
        + _FIELD_HEADER_BYTES
        + (_ZIP64_FIELD_BYTES if is_zip64 else 0)
    )
    padding = -(offset + header_size) % _ALIGNMENT_BYTES
    return _PADDING_FIELD_ID + padding.to_bytes(2, "little") + b"Z" * padding


class _StoragePlaceholder:
    """Placeholder for a tensor's storage in the pickle."""

    def __init__(self, dtype: torch.dtype, element_count: int) -> None:
        self.persistent_id = ("storage", _STORAGES[dtype], "0", "cpu", element_count)


class _TensorPlaceholder:
    """Placeholder that is pickled like a contiguous tensor."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        strides = torch.empty(shape, device="meta").stride()
        storage = _StoragePlaceholder(dtype, torch.Size(shape).numel())
        hooks: OrderedDict[str, Any] = OrderedDict()
        self._arguments = (storage, 0, shape, strides, False, hooks)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self._arguments


class _DescriptionPickler(pickle.Pickler):
    """Pickler that writes a placeholder as a reference to a storage, as torch does."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _StoragePlaceholder) else None


def _pickle_description(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    _DescriptionPickler(buffer, protocol=2).dump(_TensorPlaceholder(dtype, shape))
    return buffer.getvalue()


class _OffsetFile:
    """View of a file from a given position on, because zip archives count from their start."""

    def __init__(self, file: BinaryIO, begin: int) -> None:
        self._file, self._begin = file, begin
        self.write, self.flush = file.write, file.flush

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = self._begin if whence == io.SEEK_SET else 0
        return self._file.seek(start + offset, whence) - self._begin
