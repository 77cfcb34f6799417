"""Tensors that ``torch.save`` has written, seen in a mapped file without reading or copying them.

A distributed checkpoint's file is many of these, one after the other: each is a zip archive whose
records are stored, not compressed. Its pickle is read by an unpickler that knows what describes a
tensor, and nothing else.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from typing import Any, NamedTuple

import torch

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats import tensors
from flagscale.train.checkpoint.window import Window

_LOCAL_HEADER = 30
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str


class _View(NamedTuple):
    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Description(pickle.Unpickler):
    """Reads what describes a tensor; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: _View(storage, offset, size, stride)
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of a tensor")

    def persistent_load(self, found: Any) -> Any:
        _, dtype, key, *_ = found
        return _Storage(dtype, str(key))


def view(raw: torch.Tensor, *, trusted: bool = False) -> torch.Tensor:
    """The tensor that ``raw``, the bytes of what ``torch.save`` wrote, holds, sharing its memory.
    Its checksum is compared, unless it is ``trusted``.

    Raises:
        CheckpointError: it holds no plain tensor, or is damaged.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_Bytes(raw))) as archive:
            records = {item.filename.partition("/")[2]: item for item in archive.infolist()}
        words = _record(raw, records["data.pkl"])
        found = _Description(io.BytesIO(tensors.raw(words))).load()
        record = records[f"data/{found.storage.key}"]
        data = _record(raw, record)
        # flagscale convert wrote no checksum in its first versions.
        if not trusted and record.CRC and zlib.crc32(tensors.raw(data)) != record.CRC:
            raise ValueError("it is not as it was written")
        return _placed(tensors.typed(data, found.storage.dtype), found)
    except (
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise CheckpointError(f"a tensor cannot be read: {error}") from error


def _placed(data: torch.Tensor, found: _View) -> torch.Tensor:
    """The part of a storage that a tensor is."""
    reach = sum((size - 1) * step for size, step in zip(found.size, found.stride, strict=True))
    if 0 in found.size:
        return data.new_empty(found.size)
    if min((found.offset, *found.size, *found.stride)) < 0 or found.offset + reach >= len(data):
        raise ValueError("it reaches beyond its storage")
    first = int(data.storage_offset()) + found.offset
    return data.as_strided(found.size, found.stride, first)


def _record(raw: torch.Tensor, record: zipfile.ZipInfo) -> torch.Tensor:
    """The bytes of a record."""
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    head = bytes(tensors.raw(raw[record.header_offset :][:_LOCAL_HEADER]))
    names = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    begin = record.header_offset + _LOCAL_HEADER + names
    return raw[begin : begin + record.file_size]


class _Bytes(Window):
    """Mapped bytes."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._view = tensors.raw(raw)
        super().__init__(len(self._view))

    def _copy(self, at: int, part: memoryview) -> int:
        part[:] = self._view[at : at + len(part)]
        return len(part)
