"""What a distributed checkpoint's ``.metadata`` says: which tensor lies where.

It is a pickle. The unpickler here knows the classes that describe a checkpoint, and no others, so
that a checkpoint from elsewhere runs no code.
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

METADATA = ".metadata"
_MOST_BYTES = 1 << 30
_KNOWN = {
    "torch.distributed.checkpoint.metadata": metadata,
    "torch.distributed.checkpoint.filesystem": filesystem,
    "torch.distributed.checkpoint.planner": planner,
}
_CLASSES = {
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _KNOWN and name in _CLASSES:
            return getattr(_KNOWN[module], name)
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module.startswith("pathlib") and name in ("PosixPath", "PurePosixPath"):
            return _path
        raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no checkpoint")


def _member(owner: object, name: str) -> Enum:
    """A member of an enumeration, as the first releases of Python 3.11 write it, Debian 12's among
    them; nobody else's attribute."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it asks {owner!r} for {name!r}")


def _layout(_name: str) -> torch.layout:
    return torch.strided


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def read_metadata(path: Path) -> metadata.Metadata:
    """What ``.metadata`` of the checkpoint in a directory says.

    Raises:
        CheckpointError: it is missing, damaged, or holds what has no place there.
    """
    try:
        with (path / METADATA).open("rb") as file:
            found = _Unpickler(io.BytesIO(file.read(_MOST_BYTES))).load()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path / METADATA} cannot be read: {reason}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path / METADATA} cannot be read: {error}") from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path / METADATA} describes no checkpoint")
    return found
