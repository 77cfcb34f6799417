"""Megatron-LM's ``torch_dist`` checkpoints, read.

They are ours but for two things: arguments lie in ``common.pt``, and the tensors of equal layers
are one, ``[layer, …]``. Where layers are unlike, as of some with experts, they lie one by one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from flagscale.config.arguments.huggingface.models import effective
from flagscale.train.checkpoint.formats.base import Model, collect
from flagscale.train.checkpoint.formats.megatron_layout import require_shared, spelled, values_of
from flagscale.train.checkpoint.formats.megatron_unpickler import load
from flagscale.train.checkpoint.formats.tables import Entry
from flagscale.train.checkpoint.formats.tensors import Item, Stored

_COMMON = "common.pt"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


def read_theirs(path: Path, stored: Mapping[str, Stored]) -> Model | None:
    """The model of a checkpoint that says its arguments as Megatron-LM does; None of another.

    Raises:
        CheckpointError: it cannot be read, or lacks tensors.
    """
    if not (path / _COMMON).is_file():
        return None
    given = load(path / _COMMON).get("args")
    if not isinstance(given, argparse.Namespace):
        return None
    values = effective(values_of(vars(given)))
    require_shared(values, path)

    def find(entry: Entry) -> Stored | None:
        return next((one for name in spelled(entry.name) if (one := _find(stored, name))), None)

    return collect(path, values, find)


def _find(stored: Mapping[str, Stored], name: str) -> Stored | None:
    """A tensor by its name, or of all layers' one."""
    layer = _LAYER.fullmatch(name)
    if name in stored or layer is None:
        return stored.get(name)
    whole = stored.get(f"decoder.layers.{layer[2]}")
    number = int(layer[1])
    return Item(whole, number) if whole is not None and number < whole.shape[0] else None
