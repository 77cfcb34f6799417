"""Views of tensors written by ``torch.save`` into a memory-mapped file, without copying them.

The files of a distributed checkpoint are sequences of such tensors. Each is a zip archive with
uncompressed records. Its pickle is read by an unpickler that resolves only the classes that
describe a tensor.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from typing import Any, NamedTuple

import torch

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.byte_range_file import ByteRangeFile
from flagscale.train.checkpoint.formats import lazy_tensors

_LOCAL_HEADER = 30
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}


class _StorageDescription(NamedTuple):
    dtype: torch.dtype
    key: str


class _TensorDescription(NamedTuple):
    storage: _StorageDescription
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _DescriptionUnpickler(pickle.Unpickler):
    """Unpickler for the description of a tensor; refuses every other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: _TensorDescription(
                storage, offset, size, stride
            )
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of a tensor")

    def persistent_load(self, persistent_id: Any) -> Any:
        _, dtype, key, *_ = persistent_id
        return _StorageDescription(dtype, str(key))


def view_saved_tensor(raw: torch.Tensor, *, trusted: bool = False) -> torch.Tensor:
    """Return the tensor in the bytes of a ``torch.save`` archive, as a view of the same memory.

    Args:
        raw: the archive, a flat uint8 tensor.
        trusted: skip the comparison of the CRC-32.

    Raises:
        CheckpointError: the archive holds no plain tensor, or is damaged.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_TensorFile(raw))) as archive:
            records = {item.filename.partition("/")[2]: item for item in archive.infolist()}
        pickled = _slice_record(raw, records["data.pkl"])
        description = _DescriptionUnpickler(io.BytesIO(lazy_tensors.as_bytes(pickled))).load()
        record = records[f"data/{description.storage.key}"]
        data = _slice_record(raw, record)
        # The first versions of flagscale convert wrote no checksums.
        if not trusted and record.CRC and zlib.crc32(lazy_tensors.as_bytes(data)) != record.CRC:
            raise ValueError("it is not as it was written")
        return _view_storage(
            lazy_tensors.view_as_dtype(data, description.storage.dtype), description
        )
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


def _view_storage(data: torch.Tensor, description: _TensorDescription) -> torch.Tensor:
    """Return the part of a storage that a tensor occupies.

    Raises:
        ValueError: the tensor exceeds the storage.
    """
    last = sum(
        (size - 1) * step for size, step in zip(description.size, description.stride, strict=True)
    )
    if 0 in description.size:
        return data.new_empty(description.size)
    if min(
        (description.offset, *description.size, *description.stride)
    ) < 0 or description.offset + last >= len(data):
        raise ValueError("it reaches beyond its storage")
    first = int(data.storage_offset()) + description.offset
    return data.as_strided(description.size, description.stride, first)


def _slice_record(raw: torch.Tensor, record: zipfile.ZipInfo) -> torch.Tensor:
    """Return the bytes of an uncompressed record."""
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    header = bytes(lazy_tensors.as_bytes(raw[record.header_offset :][:_LOCAL_HEADER]))
    variable_size = int.from_bytes(header[26:28], "little") + int.from_bytes(
        header[28:30], "little"
    )
    begin = record.header_offset + _LOCAL_HEADER + variable_size
    return raw[begin : begin + record.file_size]


class _TensorFile(ByteRangeFile):
    """A flat uint8 tensor as a file."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._view = lazy_tensors.as_bytes(raw)
        super().__init__(len(self._view))

    def _read_at(self, position: int, buffer: memoryview) -> int:
        buffer[:] = self._view[position : position + len(buffer)]
        return len(buffer)
