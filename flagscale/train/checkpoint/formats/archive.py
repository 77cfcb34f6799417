"""A tensor as ``torch.save`` writes it, a piece at a time.

That is a zip archive whose records are stored: a pickle of what the tensor is, and its bytes. Here
they are written as they are read, so that memory never holds all of them, with the CRC-32 that
``verify_checkpoint`` compares; torch's own writer takes several times as long for that.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from flagscale.train.checkpoint.formats.spans import Span
from flagscale.train.checkpoint.formats.tensors import Region, Stored, contents

_ALIGNED = 64
_LOCAL_HEADER, _ZIP64_FIELD, _FIELD_HEAD = 30, 20, 4
_PADDING = b"FB"
"""The field of a header that torch's writer pads with."""
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


def write_tensor(
    file: BinaryIO, tensor: Stored, region: Region, report: Callable[[int], None]
) -> tuple[int, Span]:
    """Write a region of a tensor as an archive of its own, which begins where the file is, at a
    multiple of 64 bytes; how long it is, and the span of the tensor's bytes.

    Raises:
        OSError: of the file.
    """
    begin = file.tell()
    shape = tuple(high - low for low, high in region)
    size = torch.Size(shape).numel() * tensor.dtype.itemsize
    stream: Any = _From(file, begin)
    with zipfile.ZipFile(stream, "w") as archive:
        _put(archive, "data.pkl", _description(tensor.dtype, shape))
        _put(archive, "byteorder", b"little")
        record = zipfile.ZipInfo("archive/data/0")
        large = size >= zipfile.ZIP64_LIMIT
        record.extra = _padding(file.tell() - begin, record, large=large)
        with archive.open(record, "w", force_zip64=large) as content:
            for piece in contents(tensor, region):
                content.write(piece)
                report(len(piece))
        at = file.tell() - size
        _put(archive, "version", b"3\n")
    return file.tell() - begin, Span(at, size, record.CRC)


def _put(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)


def _padding(at: int, record: zipfile.ZipInfo, *, large: bool) -> bytes:
    """A field for a record's header at ``at`` behind which the record itself is aligned."""
    head = _LOCAL_HEADER + len(record.filename) + _FIELD_HEAD + (_ZIP64_FIELD if large else 0)
    size = -(at + head) % _ALIGNED
    return _PADDING + size.to_bytes(2, "little") + b"Z" * size


class _Storage:
    """Stands in a pickle for a tensor's bytes."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.id = ("storage", _STORAGES[dtype], "0", "cpu", count)


class _Tensor:
    """Is pickled as a contiguous tensor is."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        strides = torch.empty(shape, device="meta").stride()
        storage = _Storage(dtype, torch.Size(shape).numel())
        hooks: OrderedDict[str, Any] = OrderedDict()
        self._made_of = (storage, 0, shape, strides, False, hooks)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self._made_of


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.id if isinstance(obj, _Storage) else None


def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Tensor(dtype, shape))
    return buffer.getvalue()


class _From:
    """A file from where something begins in it: zip archives count from their own beginning."""

    def __init__(self, file: BinaryIO, begin: int) -> None:
        self._file, self._begin = file, begin
        self.write, self.flush = file.write, file.flush

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = self._begin if whence == io.SEEK_SET else 0
        return self._file.seek(start + offset, whence) - self._begin
