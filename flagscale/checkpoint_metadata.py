"""Restricted reader of ``.metadata``, the index of a PyTorch distributed checkpoint.

``.metadata`` is a pickle that lists each tensor's chunks and their byte ranges in files. The
unpickler here resolves only the classes that describe a checkpoint, so a checkpoint from an
untrusted source runs no code.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from flagscale.errors import CheckpointError

METADATA_FILE = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_ALLOWED_MODULES = {
    "torch.distributed.checkpoint.metadata": metadata,
    "torch.distributed.checkpoint.filesystem": filesystem,
    "torch.distributed.checkpoint.planner": planner,
}
_ALLOWED_CLASSES = {
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
    "SavePlan",
    "WriteItem",
    "WriteItemType",
    "TensorWriteData",
    "BytesIOWriteData",
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that resolves only the classes and functions that ``.metadata`` may contain."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _ALLOWED_MODULES and name in _ALLOWED_CLASSES:
            return getattr(_ALLOWED_MODULES[module], name)
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _get_strided_layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("builtins", "getattr"):
            return _get_enum_member
        if module.startswith("pathlib") and name in ("PosixPath", "PurePosixPath"):
            return _join_path
        raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no checkpoint")


def _get_enum_member(owner: object, name: str) -> Enum:
    """Look up a member of an enumeration; refuse every other ``getattr``.

    Early releases of Python 3.11, such as Debian 12's, pickle an enumeration's member as a
    ``getattr``.
    """
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it asks {owner!r} for {name!r}")


def _get_strided_layout(_name: str) -> torch.layout:
    return torch.strided


def _join_path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def read_metadata(path: Path) -> metadata.Metadata:
    """Read ``.metadata`` of the checkpoint in a directory.

    Raises:
        CheckpointError: the file is missing, damaged, or names a class that describes no
            checkpoint.
    """
    try:
        with (path / METADATA_FILE).open("rb") as file:
            content = _MetadataUnpickler(io.BytesIO(file.read(_MAX_METADATA_BYTES))).load()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path / METADATA_FILE} cannot be read: {reason}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path / METADATA_FILE} cannot be read: {error}") from error
    if not isinstance(content, metadata.Metadata) or not isinstance(content.storage_data, dict):
        raise CheckpointError(f"{path / METADATA_FILE} describes no checkpoint")
    return content
