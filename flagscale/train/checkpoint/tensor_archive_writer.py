"""Writer of archives as ``torch.save`` writes them, with a single tensor.

Such a file is a zip archive with uncompressed records: a pickle that describes the tensor, and its
bytes. It has the CRC-32 checksums that ``verify_checkpoint`` compares. torch's own writer takes
several times as long to compute them, and lets no other thread of Python run meanwhile.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch

from flagscale.train.checkpoint.stored_archive import StoredArchive, StoredRecord

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


def has_archive(dtype: torch.dtype) -> bool:
    """Return whether :func:`write_archive` takes tensors of a dtype."""
    return dtype in _STORAGES


def write_archive(
    file: BinaryIO,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    content: Iterable[bytes | memoryview],
) -> tuple[int, StoredRecord]:
    """Write a contiguous tensor as an archive at the current position of a file.

    Args:
        file: file that is open for writing. Its position is best a multiple of 64, as the position
            of the tensor's bytes then is, too.
        dtype: dtype of the tensor, see :func:`has_archive`.
        shape: shape of the tensor.
        content: the bytes of the tensor, in parts.

    Returns:
        The length of the archive in bytes, and the record of the tensor's bytes.

    Raises:
        OSError: the file cannot be written.
        ValueError: the content has another size than the tensor.
    """
    archive = StoredArchive(file)
    description = _pickle_description(dtype, shape)
    archive.write("archive/data.pkl", [description], len(description))
    archive.write("archive/byteorder", [b"little"], len(b"little"))
    size = torch.Size(shape).numel() * dtype.itemsize
    record = archive.write("archive/data/0", content, size, is_aligned=True)
    archive.write("archive/version", [b"3\n"], len(b"3\n"))
    return archive.finish(), record


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
