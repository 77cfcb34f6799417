"""Samples of a model's weights, which identify the base model of LoRA adapters."""

from __future__ import annotations

import argparse
from pathlib import Path

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.collective_errors import run_on_rank_0
from flagscale.train.checkpoint.formats.base import StoredModel, detect_format

_MAX_SAMPLED_WEIGHTS, _VALUES_PER_WEIGHT = 8, 8


def sample_weights(model: StoredModel) -> dict[str, list[float]]:
    """Sample some values of some layers' weights.

    Samples are equal in every format and nearly equal in every precision; they are compared by
    :func:`flagscale.config.arguments.rules.adapters.first_differing_weight`.

    Returns:
        Up to 8 values of up to 8 weights, by the weight's name.
    """
    names = sorted(
        name
        for name, tensor in model.tensors.items()
        if name.startswith("decoder.layers.")
        and name.endswith(".weight")
        and len(tensor.shape) == 2
        and "expert" not in name
    )
    sample = {}
    for name in names[:: max(1, len(names) // _MAX_SAMPLED_WEIGHTS)][:_MAX_SAMPLED_WEIGHTS]:
        rows, columns = model.tensors[name].shape
        region = ((rows // 2, rows // 2 + 1), (0, min(columns, _VALUES_PER_WEIGHT)))
        sample[name] = [round(number, 6) for number in model.tensors[name].read(region)[0].tolist()]
    return sample


def sample_base_model(args: argparse.Namespace) -> dict[str, list[float]] | None:
    """Sample the base model of this run's adapters. Collective: all ranks call it.

    Returns:
        None if the run has no adapters or no base model, or if the base model cannot be read. In
        the last case, loading it reports the error.
    """
    if not (args.peft_type and args.pretrained_checkpoint):
        return None

    def read_sample() -> dict[str, list[float]] | None:
        path = Path(args.pretrained_checkpoint)
        try:
            return sample_weights(detect_format(path).read(path))
        except (CheckpointError, OSError, RuntimeError):
            return None

    return run_on_rank_0(read_sample)
