"""Saving and loading of training state, across changes of layout and failures of disks.

A checkpoint is a directory ``iter_<iteration>`` in megatron.core's distributed format. It is
written under another name and renamed when it is whole, so a directory of that name is either
whole or was damaged later, which its manifest of file sizes tells.
"""

from __future__ import annotations

from flagscale.train.checkpoint.checkpointer import Checkpointer, SavedCheckpoint
from flagscale.train.checkpoint.loading import LoadReport

__all__ = ["Checkpointer", "LoadReport", "SavedCheckpoint"]
