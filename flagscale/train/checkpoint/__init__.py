"""Saving and loading of training state, across changes of layout and failures of disks.

A checkpoint is a directory ``iter_<iteration>`` in megatron.core's distributed format. It is
written under another name and renamed when it is whole, so a directory of that name is either
whole or was damaged later, which its manifest of file sizes tells.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flagscale.train.checkpoint.checkpointer import Checkpointer, SavedCheckpoint
    from flagscale.train.checkpoint.loading import LoadReport

__all__ = ["Checkpointer", "LoadReport", "SavedCheckpoint"]

_HOMES = {
    "Checkpointer": "checkpointer",
    "LoadReport": "loading",
    "SavedCheckpoint": "checkpointer",
}


def __getattr__(name: str) -> Any:
    """Import on first use: looking at checkpoint directories (``store``) takes no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
