"""What a checkpoint holds: sharded model, optimizer and random states, schedule, progress.

Tensors are described by their global place (megatron.core's sharded state dicts), so a
checkpoint can be read by any tensor-, pipeline- and data-parallel layout.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from flagscale.accelerators.device import current
from flagscale.config.arguments import resuming
from flagscale.config.arguments.vocabulary import vocabulary_parts
from flagscale.train.checkpoint.describing import METADATA_KEY, sharding_metadata
from flagscale.train.checkpoint.padding import padded_buckets
from flagscale.train.checkpoint.vocabulary import in_pieces
from flagscale.train.layers import lora
from flagscale.train.state import TrainState

__all__ = [
    "METADATA_KEY",
    "describe_run",
    "model_state",
    "optimizer_state",
    "restore_rng",
    "rng_object",
    "sharding_metadata",
    "vocabulary",
    "with_group",
]

_RNG = "rng_state"


def with_group(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as the sharded state dicts take it; the group itself is never saved."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**metadata, "dp_cp_group": group}


def model_state(
    args: argparse.Namespace, state: TrainState, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The sharded weights, one entry a model chunk. Of a model with adapters these alone; without
    ``peft_type`` all else."""
    modules = state.modules()
    names = ["model"] if len(modules) == 1 else [f"model{i}" for i in range(len(modules))]
    found: dict[str, Any] = {}
    for name, module in zip(names, modules, strict=True):
        every = module.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        found[name] = {
            key: _halved(key, tensor, module)
            for key, tensor in every.items()
            if lora.is_adapter(key) == bool(args.peft_type)
        }
        if args.meshes is not None:
            in_pieces(found[name], vocabulary_parts(vars(args)))
    return found


def _halved(name: str, tensor: Any, module: Any) -> Any:
    """What is split over ranks as gate and up projection, each by itself. megatron.core knows of
    the layer's own weights that they are."""
    if name.endswith(f"linear_fc1.{lora.B}") and module.config.gated_linear_unit:
        return apply_swiglu_sharded_factory(tensor, ())
    return tensor


def optimizer_state(
    state: TrainState, model: dict[str, Any], metadata: Mapping[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """The sharded optimizer state of a model's sharded weights."""
    own = model["model"] if len(model) == 1 else model
    if not is_loading:
        _fill_moments(state.optimizer)
    with nullcontext() if is_loading else padded_buckets(state.optimizer):
        sharded: dict[str, Any] = state.optimizer.sharded_state_dict(
            own, is_loading=is_loading, metadata=metadata
        )
    return sharded


def _fill_moments(optimizer: Any) -> None:
    """Give parameters that have seen no step their zero moments: saving expects all to be there."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None and part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


# --- random numbers -----------------------------------------------------------------------


def rng_object() -> dict[str, Any]:
    """This rank's generators, sharded by rank: to save, or to name what to load."""
    place, ranks = (dist.get_rank(),), (dist.get_world_size(),)
    return {_RNG: ShardedObject(_RNG, _rng_state(), ranks, place, replica_id=0)}


def _rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    trackers = tensor_parallel.get_cuda_rng_tracker().get_states()
    chip = current().accelerator
    return {
        "python": random.getstate(),
        # Lists, since files are read without leave to unpickle anything else.
        "numpy": (kind, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        # By torch's name of the device, as older checkpoints have it.
        chip.torch_type: chip.random_state(),
        "trackers": {name: value.clone() for name, value in trackers.items()},
    }


def restore_rng(loaded: Mapping[str, Any]) -> None:
    """Set this rank's generators to what :func:`rng_object` saved."""
    saved = loaded[_RNG]
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    chip = current().accelerator
    if (state := saved.get(chip.torch_type)) is not None:
        chip.set_random_state(state)
    tensor_parallel.get_cuda_rng_tracker().set_states(saved["trackers"])


# --- what the manifest says -----------------------------------------------------------------


def describe_run(args: argparse.Namespace, state: TrainState) -> dict[str, Any]:
    """The manifest's words on the run that saves: its model, its layout, what is inside."""
    schedule = state.scheduler.state_dict()
    return {
        **resuming.describe(vars(args), dist.get_world_size()),
        "vocabulary": vocabulary(args, state),
        "schedule": {name: schedule[name] for name in resuming.SCHEDULE},
    }


def vocabulary(args: argparse.Namespace, state: TrainState) -> list[int]:
    """The least and the most tokens that the padded vocabulary can stand for."""
    rows = int(state.modules()[0].vocab_size)  # type: ignore[arg-type]
    multiple = args.make_vocab_size_divisible_by * vocabulary_parts(vars(args))
    return [rows - multiple + 1, rows]
