"""A few numbers of a model's weights, by which it is known again."""

from __future__ import annotations

import argparse
from pathlib import Path

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.agreement import on_rank_0
from flagscale.train.checkpoint.formats.base import Model, format_of

_WEIGHTS, _NUMBERS = 8, 8


def sample_of(model: Model) -> dict[str, list[float]]:
    """Numbers of some of the layers' weights, by name: the same in every format, and nearly the
    same in every precision (:func:`flagscale.config.arguments.adapters.other_weight`)."""
    names = sorted(
        name
        for name, tensor in model.tensors.items()
        if name.startswith("decoder.layers.")
        and name.endswith(".weight")
        and len(tensor.shape) == 2
        and "expert" not in name
    )
    found = {}
    for name in names[:: max(1, len(names) // _WEIGHTS)][:_WEIGHTS]:
        rows, columns = model.tensors[name].shape
        region = ((rows // 2, rows // 2 + 1), (0, min(columns, _NUMBERS)))
        found[name] = [round(number, 6) for number in model.tensors[name].read(region)[0].tolist()]
    return found


def base_sample(args: argparse.Namespace) -> dict[str, list[float]] | None:
    """Of the model that this run's adapters are of; None where there is none, or where it cannot be
    read, which whoever starts from it tells. All ranks call it."""
    if not (args.peft_type and args.pretrained_checkpoint):
        return None

    def look() -> dict[str, list[float]] | None:
        path = Path(args.pretrained_checkpoint)
        try:
            return sample_of(format_of(path).read(path))
        except (CheckpointError, OSError, RuntimeError):
            return None

    return on_rank_0(look)
