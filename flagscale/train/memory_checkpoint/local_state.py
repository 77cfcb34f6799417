"""Training state that one rank holds, as tensors in place and an object.

A checkpoint on disk describes tensors by their positions in the whole model, so that any layout can
load it. Here the tensors are those of this rank as they are, which needs no communication; only a
rank with the same part of the state can restore them.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from flagscale.config.arguments.hetero.microbatch_split import MeasuredSplit
from flagscale.train.checkpoint.sharded_state import build_rng_state, restore_rng
from flagscale.train.optim.hyperparameters import resume_schedule, save_schedule
from flagscale.train.optim.members import list_members
from flagscale.train.sharding.data_parallel import ShardedDataParallel
from flagscale.train.sharding.deferred import identify_storage
from flagscale.train.state import TrainState, unwrap_model


class LocalState:
    """View of a rank's part of a training state.

    Attributes:
        tensors: weights and states of the optimizer, by name, in place.
    """

    def __init__(self, state: TrainState, part: str) -> None:
        """Collect the tensors. Missing states of the optimizer are allocated.

        ``part`` names the part of the training state that the rank has (:func:`name_part`).
        """
        self._state, self._part = state, part
        self.tensors: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for name, tensor in (*_iter_weights(state), *_iter_optimizer_tensors(state)):
            # Without separate fp32 weights, the optimizer's parameters are views of the model's.
            if tensor.numel() and (
                name.startswith("model") or identify_storage(tensor) not in storages
            ):
                self.tensors[name] = tensor
            if name.startswith("model"):
                storages.add(identify_storage(tensor))

    def fingerprint(self) -> str:
        """Return a text that is equal for ranks with the same part of the state."""
        text = "\n".join(
            f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in self.tensors.items()
        )
        return hashlib.sha256(f"{self._part}\n{text}".encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return everything but the tensors: progress, schedule, random numbers, loss scales."""
        state = self._state
        rng = build_rng_state()
        return {
            "fingerprint": self.fingerprint(),
            "progress": state.progress.state_dict(),
            "schedule": save_schedule(state.scheduler),
            "validation": state.validation.state_dict(),
            "shares": None if state.measured_shares is None else state.measured_shares.state_dict(),
            "rng": {name: sharded.data for name, sharded in rng.items()},
            "steps": [group.get("step") for group in state.optimizer.param_groups],
            "scalers": [scaler.state_dict() for scaler in _iter_loss_scalers(state)],
        }

    def restore(self, description: Mapping[str, Any]) -> None:
        """Restore what :meth:`describe` has returned, after the tensors have been overwritten."""
        state = self._state
        _take_over_shards(state)
        state.progress.load_state_dict(description["progress"])
        resume_schedule(state.scheduler, description["schedule"])
        state.validation.load_state_dict(description["validation"])
        if (shares := description["shares"]) is not None:
            state.measured_shares = MeasuredSplit.from_state(shares)
        restore_rng(description["rng"])
        for group, step in zip(state.optimizer.param_groups, description["steps"], strict=True):
            if step is not None:
                group["step"] = step
        for scaler, scaler_state in zip(
            _iter_loss_scalers(state), description["scalers"], strict=True
        ):
            scaler.load_state_dict(scaler_state)


def name_part(args: argparse.Namespace) -> str:
    """Return a text that is equal for ranks with the same part of the training state.

    Replicas of a model whose ranks have whole tensors, or a tensor-parallel part of them, have the
    same state, also in a job with fewer replicas. In other layouts, the number of ranks decides
    which part a rank has.
    """
    is_replicated = (
        not args.use_distributed_optimizer
        and not args.enable_hetero
        and args.pipeline_model_parallel_size == args.expert_model_parallel_size == 1
    )
    rank, size = dist.get_rank(), args.tensor_model_parallel_size
    return f"{rank % size} of {size}" if is_replicated else f"{rank} of {dist.get_world_size()}"


def _iter_weights(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights and persistent buffers; of weights in shards, the shards."""
    for index, chunk in enumerate(state.chunks):
        sharded: set[int] = set()
        if isinstance(chunk, ShardedDataParallel):
            for number, bucket in enumerate(chunk.iter_buckets()):
                sharded.add(identify_storage(bucket.param_data))
                yield f"model{index}.shard{number}", bucket.weight_shard
        for name, tensor in unwrap_model(chunk).state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and identify_storage(tensor) not in sharded:
                yield f"model{index}.{name}", tensor


def _iter_optimizer_tensors(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    for index, member in enumerate(list_members(state.optimizer)):
        optimizer = member.optimizer
        if optimizer is None:
            continue
        if member.init_state_fn is not None:
            member.init_state_fn(optimizer, member.config)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            name = f"optimizer{index}.{number}"
            yield name, parameter
            yield from _iter_tensors(name, optimizer.state.get(parameter, {}))


def _iter_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dictionaries and tuples."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _iter_tensors(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _iter_tensors(f"{name}.{number}", item)


def _iter_loss_scalers(state: TrainState) -> Iterator[Any]:
    for member in list_members(state.optimizer):
        if (scaler := getattr(member, "grad_scaler", None)) is not None:
            yield scaler


def _take_over_shards(state: TrainState) -> None:
    """Let the next forward pass gather the restored shards of weights."""
    for chunk in state.chunks:
        if isinstance(chunk, ShardedDataParallel):
            chunk.take_over_shards()
