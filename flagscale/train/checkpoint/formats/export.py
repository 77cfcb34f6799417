"""Export of a trained model to Hugging Face's and peft's formats.

    python -m flagscale.train.checkpoint.formats.export JSON

exports a checkpoint; JSON has the :data:`EXPORT_ARGUMENTS` and the ``iteration``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from flagscale.config.arguments.compat.huggingface.models import is_huggingface_model
from flagscale.errors import CheckpointError, FlagscaleError
from flagscale.train.checkpoint.formats.adapters import (
    merge_adapters,
    open_base_model,
    read_adapters,
    write_peft,
)
from flagscale.train.checkpoint.formats.base import StoredModel
from flagscale.train.checkpoint.formats.convert import copy_config, verify
from flagscale.train.checkpoint.formats.huggingface import HuggingFace
from flagscale.train.checkpoint.formats.sidecar_files import list_sidecar_files
from flagscale.train.checkpoint.formats.torch_dist import TorchDist
from flagscale.train.checkpoint.store import CheckpointStore
from flagscale.train.restart import enable_supervision

EXPORT_ARGUMENTS = (
    "save",
    "export_huggingface",
    "export_peft",
    "pretrained_checkpoint",
    "tokenizer_path",
)
"""Arguments that :func:`export` reads."""
_NICENESS = 10
"""Niceness of a process that exports while training runs on the same host."""


def main(argv: list[str]) -> int:
    """Export a checkpoint, with low priority; print an error on one line."""
    enable_supervision()
    os.nice(_NICENESS)
    values = json.loads(argv[0])
    try:
        export(argparse.Namespace(**values), values["iteration"])
    except FlagscaleError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def export(args: argparse.Namespace, iteration: int) -> list[Path]:
    """Export an iteration's checkpoint for transformers and peft. Only one process calls it.

    The model, with adapters merged, is written below ``args.export_huggingface``, and adapters
    alone below ``args.export_peft``, in directories with the checkpoint's name. Existing ones are
    not written again.

    Args:
        args: resolved training arguments.
        iteration: iteration of a checkpoint in ``args.save``.

    Returns:
        The directories that were written.

    Raises:
        CheckpointError: the checkpoint cannot be read, or a directory cannot be written.
    """
    source = CheckpointStore(Path(args.save)).path(iteration)
    writers = {args.export_huggingface: _export_model, args.export_peft: _export_adapters}
    targets = {Path(root) / source.name: write for root, write in writers.items() if root}
    missing = {target: write for target, write in targets.items() if not target.exists()}
    for target, write in missing.items():
        _write_with_hint(partial(write, args, source, target), source, target)
    return list(missing)


def _export_model(args: argparse.Namespace, source: Path, target: Path) -> None:
    adapters = read_adapters(source)
    if adapters is None:
        model = _add_sidecar_files(args, TorchDist().read(source))
    else:
        model = merge_adapters(adapters, open_base_model(adapters))
    HuggingFace().write(
        model, target, _ignore_progress, partial(verify, model, report=_ignore_progress)
    )


def _export_adapters(_args: argparse.Namespace, source: Path, target: Path) -> None:
    if adapters := read_adapters(source):
        write_peft(adapters, open_base_model(adapters), target, _ignore_progress)


def _write_with_hint(write: Callable[[], None], source: Path, target: Path) -> None:
    """Call ``write``; convert an OSError into an error with a hint for the user."""
    try:
        write()
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"export: {error.filename or target}: {reason}"
        raise CheckpointError(
            message, hint=f"flagscale convert {source} DIR does it again"
        ) from error


def _add_sidecar_files(args: argparse.Namespace, model: StoredModel) -> StoredModel:
    """Add ``config.json`` and tokenizer of the pretrained model, or the tokenizer of the run."""
    if args.pretrained_checkpoint and is_huggingface_model(Path(args.pretrained_checkpoint)):
        return copy_config(model, Path(args.pretrained_checkpoint))
    if args.tokenizer_path and Path(args.tokenizer_path).is_dir():
        return replace(model, files=tuple(list_sidecar_files(Path(args.tokenizer_path))))
    return model


def _ignore_progress(_size: int) -> None:
    """Progress callback that does nothing."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
