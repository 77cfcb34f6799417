"""Content of a checkpoint: sharded model, optimizer and RNG states, schedule, progress, manifest.

Tensors are described by their position in the global tensor (megatron.core's sharded state dicts).
A checkpoint can therefore be loaded by any tensor-, pipeline- and data-parallel layout.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from flagscale.accelerators.device import current_device
from flagscale.config.arguments.layout import vocabulary_parts
from flagscale.config.arguments.rules.muon import optimizer_kind
from flagscale.config.arguments.rules.resuming import describe_arguments
from flagscale.train.checkpoint.content_metadata import METADATA_KEY, sharding_metadata
from flagscale.train.checkpoint.embedding_sharding import shard_embedding_rows
from flagscale.train.checkpoint.optimizer_state import split_by_owner
from flagscale.train.layers import lora
from flagscale.train.optim.hyperparameters import describe_schedule
from flagscale.train.optim.members import list_members
from flagscale.train.state import TrainState

__all__ = [
    "METADATA_KEY",
    "add_data_parallel_group",
    "build_model_state_dict",
    "build_optimizer_state_dict",
    "build_rng_state",
    "describe_run",
    "restore_rng",
    "sharding_metadata",
    "vocabulary_range",
]

_RNG_KEY = "rng_state"


def add_data_parallel_group(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with the data-parallel group, as ``sharded_state_dict`` takes it.

    The group is never saved.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**metadata, "dp_cp_group": group}


def build_model_state_dict(
    args: argparse.Namespace, state: TrainState, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sharded weights, one entry per model chunk (``model``, or ``model0``, …).

    With ``args.peft_type``, only the adapters are included; otherwise everything but the adapters.
    """
    modules = state.modules()
    names = ["model"] if len(modules) == 1 else [f"model{i}" for i in range(len(modules))]
    sharded_state_dict: dict[str, Any] = {}
    for name, module in zip(names, modules, strict=True):
        state_dict = module.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        sharded_state_dict[name] = {
            key: tensor
            for key, tensor in state_dict.items()
            if lora.is_adapter(key) == bool(args.peft_type)
        }
        if args.meshes is not None:
            shard_embedding_rows(sharded_state_dict[name], vocabulary_parts(vars(args)))
    return sharded_state_dict


def build_optimizer_state_dict(
    state: TrainState,
    model_state_dict: dict[str, Any],
    metadata: Mapping[str, Any],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Return the sharded optimizer state that belongs to a model's sharded weights.

    Args:
        state: the training state.
        model_state_dict: result of :func:`build_model_state_dict`.
        metadata: result of :func:`add_data_parallel_group`.
        is_loading: the result is to be filled from a checkpoint instead of being saved. Tensors of
            a distributed optimizer then have no memory: see
            :func:`.optimizer_state.remove_parameter_states`.
    """
    model_weights = model_state_dict["model"] if len(model_state_dict) == 1 else model_state_dict
    if not is_loading:
        _initialize_moments(state.optimizer)
    with split_by_owner(state.optimizer):
        sharded_state_dict: dict[str, Any] = state.optimizer.sharded_state_dict(
            model_weights, is_loading=is_loading, metadata=metadata
        )
    return sharded_state_dict


def _initialize_moments(optimizer: Any) -> None:
    """Create zero moments for parameters without a step yet; megatron.core saves all moments."""
    for member in list_members(optimizer):
        if member.optimizer is not None and member.init_state_fn is not None:
            member.init_state_fn(member.optimizer, member.config)


def build_rng_state() -> dict[str, Any]:
    """Return this rank's RNG states as an object sharded by rank, to save or to load into."""
    rng_state = ShardedObject(
        _RNG_KEY,
        _get_rng_state(),
        global_shape=(dist.get_world_size(),),
        global_offset=(dist.get_rank(),),
        replica_id=0,
    )
    return {_RNG_KEY: rng_state}


def _get_rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    trackers = tensor_parallel.get_cuda_rng_tracker().get_states()
    accelerator = current_device().accelerator
    return {
        "python": random.getstate(),
        # Lists, because checkpoints are unpickled without permission to load other classes.
        "numpy": (kind, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        # The key is torch's name of the device type, as in older checkpoints.
        accelerator.torch_type: accelerator.get_rng_state(),
        "trackers": {name: value.clone() for name, value in trackers.items()},
    }


def restore_rng(loaded_state: Mapping[str, Any]) -> None:
    """Set this rank's random number generators to the states saved by :func:`build_rng_state`."""
    rng_state = loaded_state[_RNG_KEY]
    version, internal, gauss = rng_state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *position = rng_state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))
    torch.set_rng_state(rng_state["torch"])
    accelerator = current_device().accelerator
    if (accelerator_state := rng_state.get(accelerator.torch_type)) is not None:
        accelerator.set_rng_state(accelerator_state)
    tensor_parallel.get_cuda_rng_tracker().set_states(rng_state["trackers"])


def describe_run(args: argparse.Namespace, state: TrainState) -> dict[str, Any]:
    """Return the manifest's entries about the run: model, layout, vocabulary and schedule."""
    return {
        **describe_arguments(vars(args), dist.get_world_size()),
        "vocabulary": vocabulary_range(args, state),
        "optimizer": optimizer_kind(vars(args)),
        "schedule": describe_schedule(state.scheduler, state.optimizer),
    }


def vocabulary_range(args: argparse.Namespace, state: TrainState) -> list[int]:
    """Return the smallest and the largest vocabulary size that is padded to the model's."""
    padded_size = int(state.modules()[0].vocab_size)  # type: ignore[arg-type]
    multiple = args.make_vocab_size_divisible_by * vocabulary_parts(vars(args))
    return [padded_size - multiple + 1, padded_size]
