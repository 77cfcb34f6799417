"""Saving and loading of training state, independent of the layout and safe against crashes.

A checkpoint is a directory ``iter_<iteration>`` in megatron.core's distributed format. It is
written under a temporary name and renamed once it is complete. A directory with the final name is
therefore complete unless it was damaged later, which the file sizes in its manifest reveal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flagscale.train.checkpoint.checkpointer import (
        BestCheckpoint,
        Checkpointer,
        SavedCheckpoint,
    )
    from flagscale.train.checkpoint.loading import LoadReport

__all__ = ["BestCheckpoint", "Checkpointer", "LoadReport", "SavedCheckpoint"]

_LAZY_ATTRIBUTES = {
    "BestCheckpoint": "checkpointer",
    "Checkpointer": "checkpointer",
    "LoadReport": "loading",
    "SavedCheckpoint": "checkpointer",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that :mod:`.store` can be imported without torch."""
    if name not in _LAZY_ATTRIBUTES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY_ATTRIBUTES[name]}"), name)
