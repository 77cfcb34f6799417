"""Loading of a checkpoint into a training state, whatever parallel layout wrote it."""

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
from flagscale.checkpoints import CheckpointDirectory, LatestCheckpoint
from flagscale.config.arguments.hetero.measured_split import MeasuredSplit
from flagscale.config.arguments.rules.resuming import PartsToLoad, parts_to_load, schedule_error
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint import checksums, sharded_state
from flagscale.train.checkpoint.collective_errors import (
    describe_error,
    raise_on_all_ranks,
    run_on_rank_0,
)
from flagscale.train.layers import lora
from flagscale.train.state import TrainState

# Exceptions that torch and megatron.core raise for a damaged or malformed file.
_READ_ERRORS = (
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
    """The checkpoint that was loaded, notes about omitted parts, and skipped checkpoints."""

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
    """Load the newest complete checkpoint below ``args.load``. Collective: all ranks call it.

    With ``overlap_param_gather``, call it only while all parameters are gathered.

    Returns:
        None if there is no checkpoint.

    Raises:
        CheckpointError: on all ranks, see :meth:`Checkpointer.load`.
    """
    checkpoint = run_on_rank_0(CheckpointDirectory(Path(args.load)).find_latest)
    if checkpoint is None:
        return None
    raise_on_all_ranks(
        None if checkpoint.path.is_dir() else f"{checkpoint.path} is not visible on this host"
    )
    run_on_rank_0(lambda: _require_safe_metadata(checkpoint.path))
    if args.verify_checkpoint:
        raise_on_all_ranks(_find_damage(checkpoint.path))
    tokens = sharded_state.vocabulary_range(args, state)
    selected = parts_to_load(checkpoint.content, vars(args), dist.get_world_size(), tokens)
    loaded = _read_shards(args, checkpoint, state, selected)
    error = None
    try:
        _apply_state(loaded, state, selected)
    except (RuntimeError, KeyError, ValueError) as problem:
        error = f"{checkpoint.path} does not fit this run: {describe_error(problem)}"
    raise_on_all_ranks(error)
    return LoadReport(checkpoint.path, checkpoint.iteration, selected.notes, checkpoint.skipped)


def _require_safe_metadata(path: Path) -> None:
    """Refuse a ``.metadata`` that names classes other than a checkpoint's: torch would execute it.

    Raises:
        CheckpointError: see :func:`read_metadata`.
    """
    read_metadata(path)


def _find_damage(path: Path) -> str | None:
    """Return the first checksum error in this rank's share of the checkpoint, or None."""
    storage = read_metadata(path).storage_data.items()
    try:
        checksums.verify_checksums(path, storage, dist.get_rank(), dist.get_world_size())
    except CheckpointError as error:
        return f"{error.message}; {error.hint}"
    return None


def _read_shards(
    args: argparse.Namespace, checkpoint: LatestCheckpoint, state: TrainState, selected: PartsToLoad
) -> dict[str, Any]:
    """Read this rank's shards of the selected parts of a checkpoint."""
    path = str(checkpoint.path)
    error = None
    loaded: dict[str, Any] = {}
    try:
        metadata = (
            dist_checkpointing.load_content_metadata(path) or sharded_state.sharding_metadata()
        )
        metadata = sharded_state.add_data_parallel_group(metadata)
        sharded = sharded_state.build_model_state_dict(args, state, metadata)
        if selected.optimizer:
            model = dict(sharded)
            sharded["optimizer"] = sharded_state.build_optimizer_state_dict(
                state, model, metadata, is_loading=True
            )
        if selected.rng:
            sharded.update(sharded_state.build_rng_state())
        strategy = get_default_load_sharded_strategy(path)
        if args.ckpt_fully_parallel_load:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(strategy, group)
        loaded = dist_checkpointing.load(sharded, path, strategy)
    except _READ_ERRORS as problem:
        error = f"{checkpoint.path} cannot be loaded: {describe_error(problem)}"
    raise_on_all_ranks(error)
    return loaded


def _apply_state(loaded: dict[str, Any], state: TrainState, selected: PartsToLoad) -> None:
    modules = state.modules()
    names = ["model"] if len(modules) == 1 else [f"model{i}" for i in range(len(modules))]
    for name, module in zip(names, modules, strict=True):
        # A model with adapters loads either the adapters alone or everything else.
        has_adapters = any(
            lora.is_adapter(name_of_parameter) for name_of_parameter, _ in module.named_parameters()
        )
        module.load_state_dict(loaded[name], strict=not has_adapters)
    if selected.optimizer:
        with torch.no_grad():
            state.optimizer.load_state_dict(loaded["optimizer"])
        _synchronize_step(state.optimizer)
        _load_schedule(loaded, state)
    else:
        # The optimizer's fp32 copies still hold the initial weights.
        state.optimizer.reload_model_params()
    if selected.progress:
        state.progress.load_state_dict(loaded["progress"])
        if "measured_shares" in loaded:
            state.measured_shares = MeasuredSplit.from_state(loaded["measured_shares"])
    if selected.rng:
        sharded_state.restore_rng(loaded)


def _synchronize_step(optimizer: Any) -> None:
    """Give every parameter group the largest step of all ranks and groups.

    The saved values of parameter groups are rank 0's. If rank 0 has no parameter of a group
    (experts on another mesh), that group has no step there.
    """
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
        # The manifest lacks the schedule: an older version or Megatron-LM wrote the checkpoint.
        raise schedule_error(_describe_schedule_error(error)) from error


def _describe_schedule_error(error: AssertionError) -> str:
    """Rephrase megatron.core's error about a schedule value. Its lengths are in samples."""
    match = _SCHEDULE_VALUES.search(str(error))
    if match is None:
        return str(error)
    ours, saved, name = match.groups()
    unit = " (in samples)" if "iterations" in name else ""
    return f"{name}{unit}: the checkpoint has {saved}, the arguments {ours}"
