"""Training from a pretrained model: each rank reads its own shards of the weights.

Nothing is converted, and no rank holds more than its shards and, if data-parallel ranks share
weights (:mod:`flagscale.train.sharding`), those of one layer. megatron.core's sharded state dicts
give the region of each shard in the global tensor, and only that region is read.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from flagscale.config.arguments.compat.huggingface.models import differing_values, disagreements
from flagscale.config.arguments.rules.resuming import WEIGHTS_ONLY
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint import loading, sharded_state
from flagscale.train.checkpoint.collective_errors import describe_error, raise_on_all_ranks
from flagscale.train.checkpoint.formats.base import (
    NOT_FINITE,
    StoredModel,
    are_finite,
    detect_format,
    raise_if_any,
)
from flagscale.train.checkpoint.sharded_weights import iter_writable_weights
from flagscale.train.models.initialize import initialize_weights
from flagscale.train.state import TrainState, unwrap_model

_READ_ERRORS = (CheckpointError, OSError, RuntimeError)
_PADDED_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight")


def overwrites_all_weights(args: argparse.Namespace) -> bool:
    """Return whether training starts with :func:`load_weights`, which overwrites every weight.

    The model then needs no random initialization.
    """
    if not args.pretrained_checkpoint:
        return False
    try:
        return detect_format(Path(args.pretrained_checkpoint)).name != "torch_dist"
    except (CheckpointError, OSError):
        return False  # load_pretrained reports the error


def load_pretrained(args: argparse.Namespace, state: TrainState) -> str:
    """Load the weights of ``args.pretrained_checkpoint`` into a model. Collective.

    Returns:
        A message for the log.

    Raises:
        CheckpointError: on all ranks, if there is no model, or if it is damaged or another one.
    """
    path = Path(args.pretrained_checkpoint)
    args = copy.copy(args)
    args.peft_type = None  # load the base model's weights, not adapters
    error: str | None = None
    model: StoredModel | None = None
    try:
        checkpoint_format = detect_format(path)
        if checkpoint_format.name != "torch_dist":
            model = _check_model(args, checkpoint_format.read(path))
    except _READ_ERRORS as problem:
        error = _describe_failure(path, problem)
    raise_on_all_ranks(error)
    if model is None:
        return _load_checkpoint(args, state, path)
    notes = ""
    try:
        notes = load_weights(args, state, model)
    except _READ_ERRORS as problem:
        error = _describe_failure(path, problem)
    raise_on_all_ranks(error)
    # The optimizer's fp32 copies still hold the initial weights.
    state.optimizer.reload_model_params()
    return f"weights from {path}{notes}"


def _describe_failure(path: Path, problem: Exception) -> str:
    if isinstance(problem, CheckpointError):
        return problem.message + (f" ({problem.hint})" if problem.hint else "")
    return f"{path} cannot be read: {describe_error(problem)}"


def _load_checkpoint(args: argparse.Namespace, state: TrainState, path: Path) -> str:
    """Load the weights of a checkpoint in this project's format; return a message for the log."""
    load_args = copy.copy(args)
    load_args.load, load_args.finetune = str(path), True
    report = loading.load(load_args, state)
    if report is None:
        return f"weights of iteration 0 from {path}"
    notes = "".join(f"; {note}" for note in report.notes if note != WEIGHTS_ONLY)
    return f"weights of iteration {report.iteration} from {path}{notes}"


def _check_model(args: argparse.Namespace, model: StoredModel) -> StoredModel:
    """Return the parts to load of a model that is not in this project's format.

    Raises:
        CheckpointError: the arguments describe another model.
    """
    if model.config is not None:
        differences = [f"{name}: {text}" for name, text in disagreements(model.config, vars(args))]
    else:
        differences = differing_values(model.values, vars(args))
    raise_if_any(model.path, "is another model", differences)
    return model if args.mtp_num_layers else model.without_mtp()


@torch.no_grad()
def load_weights(args: argparse.Namespace, state: TrainState, model: StoredModel) -> str:
    """Copy a model's weights into this rank's modules. Collective.

    Weights that are sharded over data-parallel ranks are gathered, written and released one layer
    at a time, so that the model may be larger than a device.

    Returns:
        Notes about omitted layers and about vocabulary rows that the model lacks.

    Raises:
        CheckpointError: a weight is missing, has another shape, or holds infinities or NaN.
        OSError, RuntimeError: a file cannot be read.
    """
    state_dict = sharded_state.build_model_state_dict(
        args, state, sharded_state.add_data_parallel_group(sharded_state.sharding_metadata())
    )
    problems: list[str] = []
    padding_rows: list[int] = []
    failure: Exception | None = None
    for chunk, chunk_weights in zip(state.chunks, state_dict.values(), strict=True):
        for weights in iter_writable_weights(chunk, chunk_weights):
            if failure is not None:
                continue  # the other ranks wait for this one with each layer
            try:
                problems += _copy_weights(args, unwrap_model(chunk), model, weights, padding_rows)
            except _READ_ERRORS as problem:
                failure = problem
    if failure is not None:
        raise failure
    raise_if_any(model.path, "does not fit the model", list(dict.fromkeys(problems)))
    notes = "".join(f"; {note}" for note in model.notes)
    if not padding_rows:
        return notes
    return (
        f"{notes}; {padding_rows[-1]} rows of the vocabulary are not in it and start as they were "
        "drawn (make_vocab_size_divisible_by: 1 pads as little as the layout takes)"
    )


def _copy_weights(
    args: argparse.Namespace,
    module: Any,
    model: StoredModel,
    weights: Mapping[str, Any],
    padding_rows: list[int],
) -> Iterator[str]:
    """Copy some of a model's weights into a module; yield problems.

    ``padding_rows`` receives the number of vocabulary rows that a tensor of the model lacks.
    """
    shards = list(_iter_shards(weights))
    if padded_names := {shard.key for shard in shards if _is_padded(shard, model)}:
        _initialize_tensors(args, module, padded_names)
    for shard in shards:
        stored_tensor = model.tensors.get(shard.key)
        if stored_tensor is None:
            yield f"{shard.key}: it has none"
            continue
        stored_rows = stored_tensor.shape[0]
        expected_shape = tuple(shard.global_shape)
        if _is_padded(shard, model):
            padding_rows.append(expected_shape[0] - stored_rows)
            expected_shape = (stored_rows, *expected_shape[1:])
        if expected_shape != stored_tensor.shape:
            yield (
                f"{shard.key}: it has {list(stored_tensor.shape)}, the model {list(expected_shape)}"
            )
            continue
        yield from _copy_region(shard, stored_tensor, stored_rows)


def _is_padded(shard: ShardedTensor, model: StoredModel) -> bool:
    """Return whether a tensor has more vocabulary rows than the stored model."""
    stored = model.tensors.get(shard.key)
    rows = shard.global_shape[0]
    return shard.key in _PADDED_TENSORS and stored is not None and rows > stored.shape[0]


def _initialize_tensors(args: argparse.Namespace, module: Any, names: Container[str]) -> None:
    """Initialize the tensors with these names randomly, as for training from scratch."""
    on_host = bool(args.use_cpu_initialization)
    initialize_weights(
        module, module.config, args.seed, on_host=on_host, selected=names.__contains__
    )


def _iter_shards(state: Any) -> Iterator[ShardedTensor]:
    """Yield the shards of tensors that this rank's modules hold."""
    if isinstance(state, Mapping):
        for item in state.values():
            yield from _iter_shards(item)
    elif isinstance(state, list | tuple):
        for item in state:
            yield from _iter_shards(item)
    elif isinstance(state, ShardedTensorFactory):
        yield from _iter_shards(state.build())
    elif isinstance(state, ShardedTensor):
        yield state


def _copy_region(shard: Any, stored_tensor: Any, stored_rows: int) -> Iterator[str]:
    """Copy a region of a stored tensor into a shard; yield problems with its values.

    Args:
        shard: megatron.core's ``ShardedTensor``.
        stored_tensor: the whole stored tensor.
        stored_rows: number of rows of the stored tensor; the shard may have padding rows beyond.
    """
    offsets, prepended_axes = shard.global_offset, shard.prepend_axis_num
    sizes = (*([1] * prepended_axes), *shard.local_shape)
    region = [(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
    target = shard.data
    if not prepended_axes:
        # Padding rows are not stored.
        begin, end = region[0]
        region[0] = (min(begin, stored_rows), min(end, stored_rows))
        target = target[: region[0][1] - region[0][0]]
    values = stored_tensor.read(tuple(region)).reshape(target.shape)
    if not are_finite(values):
        yield f"{shard.key}: {NOT_FINITE}"
    target.copy_(values)
