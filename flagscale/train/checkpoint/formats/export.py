"""Writing a trained model for transformers, from the checkpoint that training ended with."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from flagscale.config.arguments.huggingface.models import is_model
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import Model
from flagscale.train.checkpoint.formats.companions import beside
from flagscale.train.checkpoint.formats.convert import dressed, verify
from flagscale.train.checkpoint.formats.distributed import Distributed
from flagscale.train.checkpoint.formats.huggingface import HuggingFace
from flagscale.train.checkpoint.store import CheckpointStore


def export(args: argparse.Namespace, iteration: int) -> Path:
    """Write the model of an iteration's checkpoint below ``args.export_huggingface``, in a
    directory of the same name; where it is. One that is there already is left as it is. One process
    calls it.

    Raises:
        CheckpointError: the checkpoint cannot be read, or nothing can be written there.
    """
    source = CheckpointStore(Path(args.save)).path(iteration)
    target = Path(args.export_huggingface) / source.name
    if target.exists():
        return target
    try:
        model = _complete(args, Distributed().read(source))
        return HuggingFace().write(model, target, _count, partial(verify, model, report=_count))
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"export_huggingface: {error.filename or target}: {reason}"
        raise CheckpointError(
            message, hint=f"flagscale convert {source} DIR does it again"
        ) from error


def _complete(args: argparse.Namespace, model: Model) -> Model:
    """The model with config.json and tokenizer of the one that it came from, or the tokenizer that
    it was trained with."""
    if args.pretrained_checkpoint and is_model(Path(args.pretrained_checkpoint)):
        return dressed(model, Path(args.pretrained_checkpoint))
    if args.tokenizer_path and Path(args.tokenizer_path).is_dir():
        return replace(model, files=tuple(beside(Path(args.tokenizer_path))))
    return model


def _count(_size: int) -> None:
    """Nobody watches."""
