"""Restricted reader of Megatron-LM's pickles.

It works without Megatron-LM and runs no code that a file names. In addition to tensors, the files
hold the program's arguments, RNG states and enumerations. Tensors and plain containers are read as
they are. An object of any other class becomes an inert :class:`UnknownObject`. Tensors stay in the
memory-mapped file.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flagscale.errors import CheckpointError

_ALLOWED_CLASSES = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch", "Size"): torch.Size,
}
_ZIP_MAGIC = b"PK\x03\x04"
"""First bytes of a file that torch.save has written. Old versions of torch wrote bare pickles."""


class UnknownObject:
    """Inert replacement of an unpickled object; accepts any construction and any state."""

    def __new__(cls, *_args: Any, **_options: Any) -> UnknownObject:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Ignore the arguments."""

    def __call__(self, *_args: Any, **_options: Any) -> UnknownObject:
        return self

    def __setstate__(self, _state: Any) -> None:
        """Ignore the state."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Ignore the item."""

    def append(self, _item: Any) -> None:
        """Ignore the item."""

    def extend(self, _items: Any) -> None:
        """Ignore the items."""


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_CLASSES:
            return _ALLOWED_CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return UnknownObject


_PICKLE_MODULE = ModuleType("flagscale_unpickler")
_PICKLE_MODULE.Unpickler = _InertUnpickler  # type: ignore[attr-defined]


def load_pickle(path: Path) -> dict[str, Any]:
    """Read a file of ``torch.save`` that holds a dictionary; its tensors are memory-mapped.

    Raises:
        CheckpointError: the file cannot be read.
    """
    _require_mappable(path)
    try:
        content = torch.load(
            str(path),
            map_location="cpu",
            mmap=True,
            weights_only=False,
            pickle_module=_PICKLE_MODULE,
        )
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a checkpoint of Megatron-LM")
    return content


def _require_mappable(path: Path) -> None:
    """Check that torch can memory-map a file.

    Raises:
        CheckpointError: it cannot; the message gives the likely reason.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
            is_complete_zip = zipfile.is_zipfile(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if is_complete_zip:
        return
    if not magic:
        raise CheckpointError(f"{path} is empty")
    if magic == _ZIP_MAGIC:
        raise CheckpointError(f"{path} is truncated: the end of the archive is missing")
    raise CheckpointError(
        f"{path} is not a checkpoint that torch can map",
        hint="load a checkpoint of an old version of torch with torch, and save it again",
    )
