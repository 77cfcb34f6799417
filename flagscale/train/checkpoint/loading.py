"""Reading a checkpoint into a training state, whatever layout wrote it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

from flagscale.checkpoint_metadata import read_metadata
from flagscale.checkpoints import Checkpoints, Found
from flagscale.config.arguments.measured_shares import MeasuredShares
from flagscale.config.arguments.resuming import Parts, other_schedule, parts_to_load
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint import checksums
from flagscale.train.checkpoint import content as contents
from flagscale.train.checkpoint.agreement import agree, describe, on_rank_0
from flagscale.train.layers import lora
from flagscale.train.state import TrainState

# What reading a damaged or external file raises, through torch and megatron.core.
_UNREADABLE = (
    CheckpointingException,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    UnpicklingError,
    ValueError,
)
_SCHEDULE_VALUES = re.compile(r"class input value (.*) and checkpoint\s*value (.*) for (.*) do not")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded from where, what was left out and why."""

    path: Path
    iteration: int
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"iteration {self.iteration} from {self.path}"]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  skipped {item}" for item in self.skipped]
        return "\n".join(lines)


def load(args: argparse.Namespace, state: TrainState) -> LoadReport | None:
    """Load the latest whole checkpoint of ``args.load``; None when there is none at all. With
    overlap_param_gather it is called where all parameters are gathered.

    Raises:
        CheckpointError: on all ranks, see :class:`Checkpointer`.
    """
    found = on_rank_0(Checkpoints(Path(args.load)).find)
    if found is None:
        return None
    agree(None if found.path.is_dir() else f"{found.path} is not visible on this host")
    on_rank_0(lambda: _look_over(found.path))
    if args.verify_checkpoint:
        agree(_damage(found.path))
    tokens = contents.vocabulary(args, state)
    wanted = parts_to_load(found.content, vars(args), dist.get_world_size(), tokens)
    loaded = _read(args, found, state, wanted)
    error = None
    try:
        _apply(loaded, state, wanted)
    except (RuntimeError, KeyError, ValueError) as problem:
        error = f"{found.path} does not fit this run: {describe(problem)}"
    agree(error)
    return LoadReport(found.path, found.iteration, wanted.notes, found.skipped)


def _look_over(path: Path) -> None:
    """Raise CheckpointError where ``.metadata`` names what describes no checkpoint: torch would
    run it."""
    read_metadata(path)


def _damage(path: Path) -> str | None:
    """What is not as it was written in this rank's part of a checkpoint."""
    storage = read_metadata(path).storage_data.items()
    try:
        checksums.verify(path, storage, dist.get_rank(), dist.get_world_size())
    except CheckpointError as error:
        return f"{error.message}; {error.hint}"
    return None


def _read(
    args: argparse.Namespace, found: Found, state: TrainState, wanted: Parts
) -> dict[str, Any]:
    """The checkpoint's parts for this rank."""
    path = str(found.path)
    error = None
    loaded: dict[str, Any] = {}
    try:
        metadata = dist_checkpointing.load_content_metadata(path) or contents.sharding_metadata()
        metadata = contents.with_group(metadata)
        sharded = contents.model_state(args, state, metadata)
        if wanted.optimizer:
            model = dict(sharded)
            sharded["optimizer"] = contents.optimizer_state(state, model, metadata, is_loading=True)
        if wanted.rng:
            sharded.update(contents.rng_object())
        strategy = get_default_load_sharded_strategy(path)
        if args.ckpt_fully_parallel_load:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(strategy, group)
        loaded = dist_checkpointing.load(sharded, path, strategy)
    except _UNREADABLE as problem:
        error = f"{found.path} cannot be loaded: {describe(problem)}"
    agree(error)
    return loaded


def _apply(loaded: dict[str, Any], state: TrainState, wanted: Parts) -> None:
    modules = state.modules()
    names = ["model"] if len(modules) == 1 else [f"model{i}" for i in range(len(modules))]
    for name, module in zip(names, modules, strict=True):
        # Of a model with adapters it is these alone, or all else.
        parts = any(lora.is_adapter(own) for own, _ in module.named_parameters())
        module.load_state_dict(loaded[name], strict=not parts)
    if wanted.optimizer:
        with torch.no_grad():
            state.optimizer.load_state_dict(loaded["optimizer"])
        _agree_on_step(state.optimizer)
        _load_schedule(loaded, state)
    else:
        state.optimizer.reload_model_params()  # its fp32 copies are of the initial weights
    if wanted.progress:
        state.progress.load_state_dict(loaded["progress"])
        if "measured_shares" in loaded:
            state.measured_shares = MeasuredShares.from_state(loaded["measured_shares"])
    if wanted.rng:
        contents.restore_rng(loaded)


def _agree_on_step(optimizer: Any) -> None:
    """Give every group of parameters the step of all. What is saved of groups is rank 0's, and
    where that has none of a group's parameters (experts, on another mesh) it has no step either."""
    groups = [group for group in optimizer.param_groups if group["params"] or "step" in group]
    device = next((p.device for group in groups for p in group["params"]), torch.device("cpu"))
    step = torch.tensor([max((int(group.get("step") or 0) for group in groups), default=0)])
    step = step.to(device)
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    for group in groups:
        if int(step):
            group["step"] = int(step)


def _load_schedule(loaded: dict[str, Any], state: TrainState) -> None:
    try:
        state.scheduler.load_state_dict(loaded["scheduler"])
    except AssertionError as error:
        # Its manifest does not tell the schedule: it is an older one, or Megatron-LM's.
        raise other_schedule(_which(error)) from error


def _which(error: AssertionError) -> str:
    """Which value of a schedule differs: megatron.core's remark in the words of the other
    messages. Its lengths are in samples."""
    found = _SCHEDULE_VALUES.search(str(error))
    if found is None:
        return str(error)
    ours, saved, name = found.groups()
    unit = " (in samples)" if "iterations" in name else ""
    return f"{name}{unit}: the checkpoint has {saved}, the arguments {ours}"
