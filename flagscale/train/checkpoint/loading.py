"""Loading of a checkpoint, written with any parallel layout, into a training state.

:class:`flagscale.train.checkpoint.checkpointer.Checkpointer` calls :func:`load`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
from torch.distributed.checkpoint.api import CheckpointException

from flagscale.checkpoint_metadata import read_metadata
from flagscale.checkpoints import open_checkpoints
from flagscale.config.arguments.hetero.microbatch_split import MeasuredSplit
from flagscale.config.arguments.rules.resuming import (
    PartsToLoad,
    loads_optimizer,
    parts_to_load,
)
from flagscale.config.arguments.spec.paths import staging_directory
from flagscale.errors import CheckpointError
from flagscale.object_storage import Location, is_address
from flagscale.train.checkpoint import sharded_state
from flagscale.train.checkpoint.collective_errors import (
    describe_error,
    raise_on_all_ranks,
    run_on_rank_0,
)
from flagscale.train.checkpoint.optimizer_state import (
    ParameterStates,
    remove_empty_states,
    remove_parameter_states,
)
from flagscale.train.checkpoint.range_reader import AnyCheckpoint, open_checkpoint
from flagscale.train.checkpoint.sharded_weights import DeferredWeights
from flagscale.train.layers import lora
from flagscale.train.optim.hyperparameters import (
    insert_groups,
    read_saved_schedule,
    remove_groups,
    resume_schedule,
    saved_optimizer_name,
    set_hyperparameters,
)
from flagscale.train.state import TrainState

# Exceptions that torch and megatron.core raise for a damaged or malformed file.
_READ_ERRORS = (
    CheckpointError,
    CheckpointException,
    CheckpointingException,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    UnpicklingError,
    ValueError,
)

_TENSORS_KEY = "tensors"


@dataclass(frozen=True)
class LoadReport:
    """Result of loading, for the log.

    Attributes:
        path: directory or address of the checkpoint that was loaded.
        iteration: iteration of the checkpoint.
        notes: messages about parts that were not loaded, such as the optimizer.
        skipped_checkpoints: newer checkpoints that were skipped because they are damaged, each
            with the reason.
    """

    path: Location
    iteration: int
    notes: tuple[str, ...] = ()
    skipped_checkpoints: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"iteration {self.iteration} from {self.path}"]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  skipped {item}" for item in self.skipped_checkpoints]
        return "\n".join(lines)


def load(args: argparse.Namespace, state: TrainState) -> LoadReport | None:
    """Load the newest complete checkpoint below ``args.load``. Collective: all ranks call it.

    Call it only while parameters are up to date
    (:func:`flagscale.train.step.gathered_parameters`). Weights in shards need not be whole.

    Returns:
        None if there is no checkpoint.

    Raises:
        CheckpointError: on all ranks, see :meth:`Checkpointer.load`.
    """
    checkpoint = run_on_rank_0(lambda: open_checkpoints(args.load).find_latest())
    if checkpoint is None:
        return None
    with ExitStack() as stack:
        directory, error = Path(), None
        try:
            directory = stack.enter_context(_open(args, checkpoint))
            if not directory.is_dir():
                error = f"{checkpoint.path} is not visible on this host"
        except (CheckpointError, OSError) as problem:
            error = f"{checkpoint.path} cannot be loaded: {describe_error(problem)}"
        raise_on_all_ranks(error)
        return _load_from(args, state, checkpoint, directory)


def _open(args: argparse.Namespace, checkpoint: AnyCheckpoint) -> AbstractContextManager[Path]:
    """Return the local directory of a checkpoint, or one that stands for it."""
    staging = None
    if args.save and is_address(args.save) and str(checkpoint.path.parent) == args.save.rstrip("/"):
        staging = staging_directory(vars(args))
    return open_checkpoint(checkpoint, staging, verify=args.verify_checkpoint)


def _load_from(
    args: argparse.Namespace, state: TrainState, checkpoint: AnyCheckpoint, directory: Path
) -> LoadReport:
    """Load a checkpoint. ``directory`` is its local directory, or one that stands for it."""
    run_on_rank_0(lambda: _require_safe_metadata(directory))
    vocabulary_range = sharded_state.vocabulary_range(args, state)
    manifest = dict(checkpoint.content)
    if loads_optimizer(vars(args)) and manifest.get("has_optimizer", True):
        manifest |= run_on_rank_0(lambda: _describe_saved_optimizer(directory))
    selected_parts = parts_to_load(manifest, vars(args), dist.get_world_size(), vocabulary_range)
    if selected_parts.kept_schedule:
        set_hyperparameters(state.scheduler, state.optimizer, selected_parts.kept_schedule)
    loaded_state, weights, parameter_states = _read_shards(
        args, (checkpoint, directory), state, selected_parts, manifest
    )
    read_tensors = partial(_read_tensors, args, str(directory))
    # Weights come before the optimizer, which copies them.
    with _errors_on_all_ranks(f"{checkpoint.path} cannot be loaded", _READ_ERRORS):
        weights.load(read_tensors)
    with _errors_on_all_ranks(
        f"{checkpoint.path} does not fit this run", (RuntimeError, KeyError, ValueError)
    ):
        _apply_state(loaded_state, weights, state, selected_parts)
    if selected_parts.optimizer:
        _synchronize_optimizer_step(state)
    with _errors_on_all_ranks(f"{checkpoint.path} cannot be loaded", _READ_ERRORS):
        parameter_states.load(read_tensors)
    return LoadReport(
        checkpoint.path, checkpoint.iteration, selected_parts.notes, checkpoint.skipped
    )


@contextmanager
def _errors_on_all_ranks(
    message: str, exceptions: tuple[type[BaseException], ...]
) -> Iterator[None]:
    """Return a context manager that raises the exceptions of any rank on all ranks. Collective.

    The block must not communicate after an exception that only some ranks may have.
    """
    error = None
    try:
        yield
    except exceptions as problem:
        error = f"{message}: {describe_error(problem)}"
    raise_on_all_ranks(error)


def _require_safe_metadata(path: Path) -> None:
    """Refuse a ``.metadata`` that names classes other than those of a checkpoint.

    torch unpickles the file, which would run the code of any class.

    Raises:
        CheckpointError: see :func:`read_metadata`.
    """
    read_metadata(path)


def _describe_saved_optimizer(path: Path) -> dict[str, Any]:
    """Return the optimizer of a checkpoint and its hyperparameters, in the form of the manifest.

    They are read from the saved state, because older manifests lack some of them, and a checkpoint
    of another program has no manifest.

    Raises:
        CheckpointError: they cannot be read, or the checkpoint is of another program.
    """
    try:
        common_state = dist_checkpointing.load_common_state_dict(str(path))
    except _READ_ERRORS as problem:
        raise CheckpointError(f"{path} cannot be loaded: {describe_error(problem)}") from problem
    if "optimizer" not in common_state or "scheduler" not in common_state:
        raise CheckpointError(
            f"{path} contains no optimizer and schedule of this program",
            hint="finetune: true loads its weights only",
        )
    name = saved_optimizer_name(common_state)
    description: dict[str, Any] = {} if name is None else {"optimizer": name}
    return {**description, "schedule": read_saved_schedule(common_state)}


def _read_shards(
    args: argparse.Namespace,
    source: tuple[AnyCheckpoint, Path],
    state: TrainState,
    selected_parts: PartsToLoad,
    manifest: Mapping[str, Any],
) -> tuple[dict[str, Any], DeferredWeights, ParameterStates]:
    """Read this rank's shards of the selected parts of a checkpoint.

    Args:
        args: the resolved training arguments.
        source: the checkpoint, and the local directory to read.
        state: the training state.
        selected_parts: the parts to read.
        manifest: the manifest of the checkpoint.

    Returns:
        What was read, and the weights in shards and the states of a distributed optimizer, which
        remain to be read.
    """
    checkpoint, directory = source
    path = str(directory)
    with _errors_on_all_ranks(f"{checkpoint.path} cannot be loaded", _READ_ERRORS):
        metadata = (
            dist_checkpointing.load_content_metadata(path) or sharded_state.sharding_metadata()
        )
        metadata = sharded_state.add_data_parallel_group(metadata)
        model_state_dict = sharded_state.build_model_state_dict(args, state, metadata)
        sharded_state_dict = dict(model_state_dict)
        parameter_states = ParameterStates()
        if selected_parts.optimizer:
            sharded_state_dict["optimizer"] = sharded_state.build_optimizer_state_dict(
                state, model_state_dict, metadata, is_loading=True
            )
            remove_groups(sharded_state_dict["optimizer"], manifest["schedule"])
            parameter_states = remove_parameter_states(
                state.optimizer, sharded_state_dict["optimizer"]
            )
        # Removes the weights in shards from the model's state, which the load below shares.
        weights = DeferredWeights(state.chunks, model_state_dict)
        if selected_parts.rng:
            sharded_state_dict.update(sharded_state.build_rng_state())
        loaded = dist_checkpointing.load(sharded_state_dict, path, _load_strategy(args, path))
    return loaded, weights, parameter_states


def _load_strategy(args: argparse.Namespace, path: str) -> Any:
    """Return megatron.core's load strategy: if requested, data-parallel ranks read a part each and
    exchange the parts.
    """
    strategy = get_default_load_sharded_strategy(path)
    if args.ckpt_fully_parallel_load:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    return strategy


def _read_tensors(args: argparse.Namespace, path: str, sharded_tensors: dict[Any, Any]) -> Any:
    """Read some tensors of a checkpoint; return them by the same keys."""
    # Without megatron.core's validation, which requires that the ranks together read every tensor
    # whole: these are only some of them.
    loaded = dist_checkpointing.load(
        {_TENSORS_KEY: sharded_tensors},
        path,
        _load_strategy(args, path),
        validate_access_integrity=False,
    )
    return loaded.get(_TENSORS_KEY, {})


def _apply_state(
    loaded_state: dict[str, Any],
    weights: DeferredWeights,
    state: TrainState,
    selected_parts: PartsToLoad,
) -> None:
    """Load the state into the modules, the optimizer, the schedule and the random number
    generators.
    """
    modules = state.modules()
    names = ["model"] if len(modules) == 1 else [f"model{i}" for i in range(len(modules))]
    for name, module in zip(names, modules, strict=True):
        module_state = loaded_state.get(name, {})
        keys = module.load_state_dict(module_state, strict=False)
        missing = set(keys.missing_keys) - weights.names
        differences = _find_differences(missing, set(keys.unexpected_keys), set(module_state))
        if differences:
            raise RuntimeError(
                f"only the model or only the checkpoint has weights {', '.join(differences)}"
            )
    if selected_parts.optimizer:
        remove_empty_states(state.optimizer, loaded_state["optimizer"])
        insert_groups(loaded_state["optimizer"], state.optimizer)
        with torch.no_grad():
            state.optimizer.load_state_dict(loaded_state["optimizer"])
        resume_schedule(state.scheduler, loaded_state["scheduler"])
    else:
        # The optimizer's fp32 copies still hold the initial weights.
        state.optimizer.reload_model_params()
    if selected_parts.progress:
        state.progress.load_state_dict(loaded_state["progress"])
        if "measured_shares" in loaded_state:
            state.measured_shares = MeasuredSplit.from_state(loaded_state["measured_shares"])
        if "validation" in loaded_state:
            state.validation.load_state_dict(loaded_state["validation"])
    if selected_parts.rng:
        sharded_state.restore_rng(loaded_state)


def _find_differences(missing: set[str], unexpected: set[str], loaded: set[str]) -> list[str]:
    """Return the names of weights that only the model or only the checkpoint has.

    For a model with adapters, a checkpoint may have the adapters alone, or everything else.
    """
    differences = set(unexpected)
    missing_adapters = {name for name in missing if lora.is_adapter(name)}
    for missing_of_kind, loads_kind in (
        (missing_adapters, any(map(lora.is_adapter, loaded))),
        (missing - missing_adapters, not all(map(lora.is_adapter, loaded))),
    ):
        if loads_kind or not loaded:
            differences |= missing_of_kind
    return sorted(differences)


def _synchronize_optimizer_step(state: TrainState) -> None:
    """Set the optimizer step of every parameter group to the maximum over all ranks and groups.
    Collective.

    The checkpoint has rank 0's values of all parameter groups. A group without parameters on rank
    0, such as experts on another mesh, was saved without a step, and gets that of the others.
    """
    groups = [group for group in state.optimizer.param_groups if group["params"] or "step" in group]
    steps = [int(group.get("step") or 0) for group in groups]
    device = next(state.modules()[0].parameters()).device
    highest = torch.tensor([max(steps, default=0)], device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    step = int(highest)
    for group in groups if step else ():
        group["step"] = step
