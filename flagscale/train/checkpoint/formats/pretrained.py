"""Starting training from a model of another program: each rank takes its own parts of it.

Nothing is converted and nobody holds more than its parts: tensors are described by their place in
the whole (megatron.core's sharded state dicts), and that region is what is read.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from flagscale.config.arguments.huggingface.models import disagreements, unlike
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint import content as contents
from flagscale.train.checkpoint import loading
from flagscale.train.checkpoint.agreement import agree, describe
from flagscale.train.checkpoint.formats.base import UNSOUND, Model, are_finite, format_of, refuse
from flagscale.train.models.initialize import initialize
from flagscale.train.state import TrainState

_WITH_ROWS_TO_SPARE = ("embedding.word_embeddings.weight", "output_layer.weight")


def brings_every_weight(args: argparse.Namespace) -> bool:
    """Whether training starts by :func:`fill`, which leaves no weight of the model as it was."""
    if not args.pretrained_checkpoint:
        return False
    try:
        return format_of(Path(args.pretrained_checkpoint)).name != "torch_dist"
    except (CheckpointError, OSError):
        return False  # start_from tells what is wrong


def start_from(args: argparse.Namespace, state: TrainState) -> str:
    """Give a model the weights of ``args.pretrained_checkpoint``; what is to be said of it. All
    ranks call it.

    Raises:
        CheckpointError: on all ranks: there is no model, it is another one, or it is damaged.
    """
    path = Path(args.pretrained_checkpoint)
    args = copy.copy(args)
    args.peft_type = None  # whatever is trained beside it
    error, notes, format_ = None, "", None
    try:
        format_ = format_of(path)
        if format_.name != "torch_dist":
            notes = _take(args, state, format_.read(path))
    except CheckpointError as problem:
        error = problem.message + (f" ({problem.hint})" if problem.hint else "")
    except (OSError, RuntimeError) as problem:
        error = f"{path} cannot be read: {describe(problem)}"
    agree(error)
    if format_ is not None and format_.name == "torch_dist":
        own = copy.copy(args)
        own.load, own.finetune = str(path), True
        report = loading.load(own, state)
        return f"weights of iteration {report.iteration if report else 0} from {path}"
    state.optimizer.reload_model_params()  # its fp32 copies are of the initial weights
    return f"weights from {path}{notes}"


def _take(args: argparse.Namespace, state: TrainState, model: Model) -> str:
    if model.config is not None:
        wrong = [f"{name}: {text}" for name, text in disagreements(model.config, vars(args))]
    else:
        wrong = unlike(model.values, vars(args))
    refuse(model.path, "is another model", wrong)
    return fill(args, state, model if args.mtp_num_layers else model.alone())


@torch.no_grad()
def fill(args: argparse.Namespace, state: TrainState, model: Model) -> str:
    """Copy a model's weights into this rank's modules; a note about rows that it lacks.

    Raises:
        CheckpointError: a weight is missing, has another shape, or is no number.
    """
    described = contents.model_state(args, state, contents.with_group(contents.sharding_metadata()))
    parts = list(_parts(described))
    _draw(args, state, {part.key for part in parts if _is_padded(part, model)})
    problems: list[str] = []
    spare = 0
    for part in parts:
        stored = model.tensors.get(part.key)
        if stored is None:
            problems.append(f"{part.key}: it has none")
            continue
        rows = stored.shape[0]
        wanted = tuple(part.global_shape)
        if _is_padded(part, model):
            spare, wanted = wanted[0] - rows, (rows, *wanted[1:])
        if wanted != stored.shape:
            problems.append(f"{part.key}: it has {list(stored.shape)}, the model {list(wanted)}")
            continue
        problems += _copy(part, stored, rows)
    refuse(model.path, "does not fit the model", list(dict.fromkeys(problems)))
    notes = "".join(f"; {note}" for note in model.notes)
    if not spare:
        return notes
    return (
        f"{notes}; {spare} rows of the vocabulary are not in it and start as they were drawn "
        "(make_vocab_size_divisible_by: 1 pads as little as the layout takes)"
    )


def _is_padded(part: ShardedTensor, model: Model) -> bool:
    """Whether a tensor has more rows than the ``model`` has tokens."""
    stored = model.tensors.get(part.key)
    rows = part.global_shape[0]
    return part.key in _WITH_ROWS_TO_SPARE and stored is not None and rows > stored.shape[0]


def _draw(args: argparse.Namespace, state: TrainState, names: Container[str]) -> None:
    """Draw the tensors of these ``names`` as if training started from nothing."""
    on_host = bool(args.use_cpu_initialization)
    for module in state.modules():
        config: Any = module.config
        initialize(module, config, args.seed, on_host=on_host, wanted=names.__contains__)


def _parts(described: Any) -> Iterator[ShardedTensor]:
    """The parts of tensors that this rank's modules hold."""
    if isinstance(described, dict):
        for item in described.values():
            yield from _parts(item)
    elif isinstance(described, list | tuple):
        for item in described:
            yield from _parts(item)
    elif isinstance(described, ShardedTensorFactory):
        yield from _parts(described.build())
    elif isinstance(described, ShardedTensor):
        yield described


def _copy(part: Any, stored: Any, rows: int) -> Iterator[str]:
    """Copy what a part of a tensor is to be; what is wrong with it."""
    offsets, ahead = part.global_offset, part.prepend_axis_num
    sizes = (*([1] * ahead), *part.local_shape)
    region = [(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
    target = part.data
    if not ahead:
        # Rows of padding are nowhere stored.
        begin, end = region[0]
        region[0] = (min(begin, rows), min(end, rows))
        target = target[: region[0][1] - region[0][0]]
    found = stored.read(tuple(region)).reshape(target.shape)
    if not are_finite(found):
        yield f"{part.key}: {UNSOUND}"
    target.copy_(found)
