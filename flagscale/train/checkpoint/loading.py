"""Reading a checkpoint into a training state, whatever layout wrote it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint import content as contents
from flagscale.train.checkpoint.agreement import agree, describe, on_rank_0
from flagscale.train.checkpoint.store import CheckpointStore, Found
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


@dataclass(frozen=True)
class _Wanted:
    """Which parts of a checkpoint to load."""

    optimizer: bool
    progress: bool
    rng: bool
    notes: tuple[str, ...]


def load(args: argparse.Namespace, state: TrainState) -> LoadReport | None:
    """Load the latest whole checkpoint of ``args.load``; None when there is none at all. With
    overlap_param_gather it is called where all parameters are gathered.

    Raises:
        CheckpointError: on all ranks, see :class:`Checkpointer`.
    """
    found = on_rank_0(CheckpointStore(Path(args.load)).find)
    if found is None:
        return None
    agree(None if found.path.is_dir() else f"{found.path} is not visible on this host")
    contents.check_fits(found.content, args, state)
    wanted = _choose(found.content, args)
    loaded = _read(found, state, wanted, fully_parallel=args.ckpt_fully_parallel_load)
    error = None
    try:
        _apply(loaded, state, wanted)
    except (RuntimeError, KeyError, ValueError) as problem:
        error = f"{found.path} does not fit this run: {describe(problem)}"
    agree(error)
    return LoadReport(found.path, found.iteration, wanted.notes, found.skipped)


def _choose(content: Mapping[str, Any], args: argparse.Namespace) -> _Wanted:
    if args.finetune:
        notes = ("finetune: the weights alone; training starts from step 0",)
        return _Wanted(optimizer=False, progress=False, rng=False, notes=notes)
    notes_: list[str] = []
    optimizer = not args.no_load_optim
    if not optimizer:
        notes_.append("without optimizer and schedule (no_load_optim)")
    else:
        _check_optimizer(content, args)
    rng = not args.no_load_rng and bool(content.get("has_rng", False))
    if rng and content.get("layout") != contents.layout(args):
        rng = False
        notes_.append("without random states: the layout changed, generators start from the seed")
    return _Wanted(optimizer=optimizer, progress=True, rng=rng, notes=tuple(notes_))


def _check_optimizer(content: Mapping[str, Any], args: argparse.Namespace) -> None:
    if not content.get("has_optimizer", True):
        raise CheckpointError(
            "the checkpoint holds no optimizer state: it was saved with no_save_optim",
            hint="no_load_optim: true goes on without it, finetune: true starts from step 0",
        )
    kind = bool(args.use_distributed_optimizer)
    saved = content.get("distributed_optimizer", kind)
    if saved != kind:
        raise CheckpointError(
            f"the checkpoint's optimizer was saved with use_distributed_optimizer: {saved}".lower()
            + f", this run has {kind}".lower(),
            hint=f"set use_distributed_optimizer: {saved}".lower()
            + ", or no_load_optim: true to go on with a fresh optimizer",
        )
    _check_experts(content, args)
    ours = contents.precision(args)
    if content.get("precision", ours) != ours:
        raise CheckpointError(
            f"the checkpoint was trained in {content['precision']}, this run in {ours}: the "
            "optimizer's state does not fit",
            hint="no_load_optim: true takes the weights and the progress alone",
        )


def _check_experts(content: Mapping[str, Any], args: argparse.Namespace) -> None:
    """With expert parallelism megatron.core keeps the experts in an optimizer of their own."""
    saved = content.get("layout", contents.layout(args))["expert"]
    ours = args.expert_model_parallel_size
    if args.num_moe_experts and (saved == 1) != (ours == 1):
        raise CheckpointError(
            f"the checkpoint's optimizer was saved with expert_model_parallel_size {saved}, this "
            f"run has {ours}: between 1 and more its parts differ",
            hint="no_load_optim: true takes the weights and the progress alone",
        )


def _read(
    found: Found, state: TrainState, wanted: _Wanted, *, fully_parallel: bool
) -> dict[str, Any]:
    """The checkpoint's parts for this rank."""
    path = str(found.path)
    error = None
    loaded: dict[str, Any] = {}
    try:
        metadata = dist_checkpointing.load_content_metadata(path) or contents.sharding_metadata()
        metadata = contents.with_group(metadata)
        sharded = contents.model_state(state, metadata)
        if wanted.optimizer:
            model = dict(sharded)
            sharded["optimizer"] = contents.optimizer_state(state, model, metadata, is_loading=True)
        if wanted.rng:
            sharded.update(contents.rng_object())
        strategy = get_default_load_sharded_strategy(path)
        if fully_parallel:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(strategy, group)
        loaded = dist_checkpointing.load(sharded, path, strategy)
    except _UNREADABLE as problem:
        error = f"{found.path} cannot be loaded: {describe(problem)}"
    agree(error)
    return loaded


def _apply(loaded: dict[str, Any], state: TrainState, wanted: _Wanted) -> None:
    modules = state.modules()
    names = ["model"] if len(modules) == 1 else [f"model{i}" for i in range(len(modules))]
    for name, module in zip(names, modules, strict=True):
        module.load_state_dict(loaded[name])
    if wanted.optimizer:
        with torch.no_grad():
            state.optimizer.load_state_dict(loaded["optimizer"])
        _load_schedule(loaded, state)
    else:
        state.optimizer.reload_model_params()  # its fp32 copies are of the initial weights
    if wanted.progress:
        state.progress.load_state_dict(loaded["progress"])
    if wanted.rng:
        contents.restore_rng(loaded)


def _load_schedule(loaded: dict[str, Any], state: TrainState) -> None:
    try:
        state.scheduler.load_state_dict(loaded["scheduler"])
    except AssertionError as error:
        raise CheckpointError(
            f"the checkpoint's learning-rate schedule differs from the arguments': {_which(error)}",
            hint="override_opt_param_scheduler: true takes the arguments', "
            "use_checkpoint_opt_param_scheduler: true the checkpoint's",
        ) from error


def _which(error: AssertionError) -> str:
    """Which value of a schedule differs: megatron.core's remark in the words of the other
    messages. Its lengths are in samples."""
    found = _SCHEDULE_VALUES.search(str(error))
    if found is None:
        return str(error)
    ours, saved, name = found.groups()
    unit = " (in samples)" if "iterations" in name else ""
    return f"{name}{unit}: the checkpoint has {saved}, the arguments {ours}"
