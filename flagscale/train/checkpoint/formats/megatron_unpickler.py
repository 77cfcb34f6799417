"""Megatron-LM's ``torch`` checkpoints without Megatron-LM, and without running what they name.

Beside tensors they hold the program's arguments, generators and enumerations of a whole package.
What describes tensors and plain containers is read as it is; everything else becomes an object that
does nothing. Tensors stay in the mapped file.
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

_KNOWN = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch", "Size"): torch.Size,
}
_ZIP = b"PK\x03\x04"
"""What a file of torch.save begins with; those of old versions are bare pickles."""


class Unknown:
    """Stands for what is not read. It may be made of anything and be given any state."""

    def __new__(cls, *_args: Any, **_options: Any) -> Unknown:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Nothing is kept."""

    def __call__(self, *_args: Any, **_options: Any) -> Unknown:
        return self

    def __setstate__(self, _state: Any) -> None:
        """Nothing is kept."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Nothing is kept."""

    def append(self, _item: Any) -> None:
        """Nothing is kept."""

    def extend(self, _items: Any) -> None:
        """Nothing is kept."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return Unknown


_MODULE = ModuleType("flagscale_unpickler")
_MODULE.Unpickler = _Unpickler  # type: ignore[attr-defined]


def load(path: Path) -> dict[str, Any]:
    """What a rank saved, its tensors mapped.

    Raises:
        CheckpointError: the file cannot be read.
    """
    _require_mappable(path)
    try:
        found = torch.load(
            str(path), map_location="cpu", mmap=True, weights_only=False, pickle_module=_MODULE
        )
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no checkpoint of Megatron-LM")
    return found


def _require_mappable(path: Path) -> None:
    """
    Raises:
        CheckpointError: a file is none of those that torch maps, and what it looks like.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_ZIP))
            whole = zipfile.is_zipfile(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if whole:
        return
    if not begin:
        raise CheckpointError(f"{path} is empty")
    if begin == _ZIP:
        raise CheckpointError(f"{path} is cut: the end of what torch.save wrote is missing")
    raise CheckpointError(
        f"{path} is no checkpoint that torch can map",
        hint="one of an old version of torch can be had if torch loads it and saves it again",
    )
