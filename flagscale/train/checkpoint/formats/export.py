"""Writing a trained model for transformers, from the checkpoint that training ended with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from flagscale.config.arguments.huggingface.models import is_model
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.adapters import (
    base_of,
    merged,
    read_adapters,
    write_peft,
)
from flagscale.train.checkpoint.formats.base import Model
from flagscale.train.checkpoint.formats.convert import dressed, verify
from flagscale.train.checkpoint.formats.distributed import Distributed
from flagscale.train.checkpoint.formats.huggingface import HuggingFace
from flagscale.train.checkpoint.formats.sidecar_files import beside
from flagscale.train.checkpoint.store import CheckpointStore


def export(args: argparse.Namespace, iteration: int) -> list[Path]:
    """Write what an iteration's checkpoint holds below ``args.export_huggingface``, adapters merged
    into their model, and below ``args.export_peft`` adapters alone, in directories of the same
    name; where they are. What is there already is left as it is. One process calls it.

    Raises:
        CheckpointError: the checkpoint cannot be read, or nothing can be written there.
    """
    source = CheckpointStore(Path(args.save)).path(iteration)
    writers = {args.export_huggingface: _write_model, args.export_peft: _write_adapters}
    targets = {Path(root) / source.name: write for root, write in writers.items() if root}
    for target, write in targets.items():
        if not target.exists():
            _reported(partial(write, args, source, target), source, target)
    return list(targets)


def _write_model(args: argparse.Namespace, source: Path, target: Path) -> None:
    adapters = read_adapters(source)
    if adapters is None:
        model = _complete(args, Distributed().read(source))
    else:
        model = merged(adapters, base_of(adapters))
    HuggingFace().write(model, target, _count, partial(verify, model, report=_count))


def _write_adapters(_args: argparse.Namespace, source: Path, target: Path) -> None:
    if adapters := read_adapters(source):
        write_peft(adapters, base_of(adapters), target, _count)


def _reported(write: Callable[[], None], source: Path, target: Path) -> None:
    """Write, with an operating system's error as one that tells what to do."""
    try:
        write()
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"export: {error.filename or target}: {reason}"
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
