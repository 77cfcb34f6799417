"""Views of tensors written by ``torch.save`` into a memory-mapped file, without copying them.

The files of a distributed checkpoint are sequences of such tensors. Each is a zip archive with
uncompressed records. Its pickle is read by an unpickler that resolves only the classes that
describe a tensor.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any, NamedTuple

import torch

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.byte_range_file import ByteRangeFile
from flagscale.train.checkpoint.checksums import crc32
from flagscale.train.checkpoint.formats import lazy_tensors

_LOCAL_HEADER_BYTES = 30
"""Bytes of a zip archive's local file header without its variable fields."""
_DTYPES_BY_STORAGE = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}


class _StorageDescription(NamedTuple):
    """Dtype and record name of a storage, as a tensor's pickle describes them."""

    dtype: torch.dtype
    key: str


class _TensorDescription(NamedTuple):
    """Position of a tensor in its storage, in elements, as its pickle describes it."""

    storage: _StorageDescription
    storage_offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _DescriptionUnpickler(pickle.Unpickler):
    """Unpickler for the description of a tensor; refuses every other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: _TensorDescription(
                storage, offset, size, stride
            )
        if module == "torch" and name in _DTYPES_BY_STORAGE:
            return _DTYPES_BY_STORAGE[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"names {module}.{name}, which does not describe a tensor")

    def persistent_load(self, persistent_id: Any) -> Any:
        _, dtype, key, *_ = persistent_id
        return _StorageDescription(dtype, str(key))


def view_saved_tensor(archive_bytes: torch.Tensor, *, is_trusted: bool = False) -> torch.Tensor:
    """Return the tensor in the bytes of a ``torch.save`` archive, as a view of the same memory.

    Args:
        archive_bytes: the archive, a flat uint8 tensor.
        is_trusted: skip the comparison of the CRC-32.

    Raises:
        CheckpointError: the archive does not hold a plain tensor, or is damaged.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_TensorFile(archive_bytes))) as archive:
            records = {item.filename.partition("/")[2]: item for item in archive.infolist()}
        pickle_bytes = _slice_record(archive_bytes, records["data.pkl"])
        description = _DescriptionUnpickler(io.BytesIO(lazy_tensors.as_bytes(pickle_bytes))).load()
        record = records[f"data/{description.storage.key}"]
        data = _slice_record(archive_bytes, record)
        # The first versions of flagscale convert wrote no checksums.
        if not is_trusted and record.CRC and crc32(lazy_tensors.as_bytes(data)) != record.CRC:
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
    last_element = sum(
        (size - 1) * step for size, step in zip(description.size, description.stride, strict=True)
    )
    if 0 in description.size:
        return data.new_empty(description.size)
    if min(
        (description.storage_offset, *description.size, *description.stride)
    ) < 0 or description.storage_offset + last_element >= len(data):
        raise ValueError("it reaches beyond its storage")
    first_element = int(data.storage_offset()) + description.storage_offset
    return data.as_strided(description.size, description.stride, first_element)


def _slice_record(archive_bytes: torch.Tensor, record: zipfile.ZipInfo) -> torch.Tensor:
    """Return the bytes of an uncompressed record."""
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    header = bytes(
        lazy_tensors.as_bytes(archive_bytes[record.header_offset :][:_LOCAL_HEADER_BYTES])
    )
    variable_size = int.from_bytes(header[26:28], "little") + int.from_bytes(
        header[28:30], "little"
    )
    begin = record.header_offset + _LOCAL_HEADER_BYTES + variable_size
    return archive_bytes[begin : begin + record.file_size]


class _TensorFile(ByteRangeFile):
    """A flat uint8 tensor as a file."""

    def __init__(self, content: torch.Tensor) -> None:
        self._view = lazy_tensors.as_bytes(content)
        super().__init__(len(self._view))

    def _read_at(self, position: int, buffer: memoryview) -> int:
        buffer[:] = self._view[position : position + len(buffer)]
        return len(buffer)
