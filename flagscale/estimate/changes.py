"""Changes of arguments that reduce a rank's memory, and how much each saves."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

from flagscale.config.arguments.rules.activation_offload import offloads_activations
from flagscale.config.arguments.rules.optimizer import captures_steps
from flagscale.config.arguments.rules.recompute import NO_MODULES, ModuleChoice
from flagscale.config.arguments.spec.system_arguments import (
    INSTANCES,
    NO_SHARD,
    OPTIM,
    OPTIM_GRADS,
    OPTIM_GRADS_PARAMS,
    RECOMPUTE_AUTO,
    SHARDING,
)
from flagscale.estimate.forecast import (
    count_hidden_offloads,
    forecast_step,
    list_module_levels,
)

_GIB = 2**30
_IMPLIED_ARGUMENTS = {
    "recompute_method",
    "recompute_num_layers",
    "recomputed_modules",
    "sequence_parallel",
}
"""Arguments that follow from other arguments and are not listed, see the configuration reference.
"""
_DETAILS = {"recompute_modules"}
"""Arguments that are listed with another one of the same change."""
_LEAST_SAVING = 0.02
"""Smallest saving that is worth a suggestion, as a fraction of a rank's memory."""
_MAX_SAVINGS = 5


def possible_changes(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield possible changes of arguments, cheap ones first; the first one is empty. Sizes of
    heterogeneous meshes are not changed.
    """
    tp, is_homogeneous = args.tensor_model_parallel_size, args.meshes is None
    heads = args.num_query_groups or args.num_attention_heads
    is_captured = captures_steps(vars(args))
    microbatch_changes: list[dict[str, Any]] = [{}, {"micro_batch_size": 1}]
    offload_changes = _state_changes(args)
    if args.optimizer == "adam" and not args.optimizer_cpu_offload and not is_captured:
        sharding = {} if args.use_distributed_optimizer else {"use_distributed_optimizer": True}
        offload_changes.append({**sharding, "optimizer_cpu_offload": True})
    recompute_changes = list(_recompute_changes(args))
    tensor_parallel_changes = [
        {"tensor_model_parallel_size": tp * factor, "sequence_parallel": True}
        for factor in (2, 4, 8)
        if args.data_parallel_size % factor == 0 and heads % (tp * factor) == 0
    ]
    for combination in product(
        _sharding_changes(args),
        microbatch_changes if is_homogeneous and args.micro_batch_size > 1 else [{}],
        recompute_changes,
        [{}, *(tensor_parallel_changes if is_homogeneous else ())],
        offload_changes,
    ):
        yield {name: value for changes in combination for name, value in changes.items()}
    yield from _offload_changes(args)


def _offload_changes(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the offload of as many layers as can be copied without taking time."""
    is_possible = args.recompute_granularity in (None, "selective") and not (
        captures_steps(vars(args)) or offloads_activations(vars(args))
    )
    if is_possible and (count := count_hidden_offloads(args)):
        yield {"cpu_offloading_num_layers": count}


def _sharding_changes(args: Namespace) -> list[dict[str, Any]]:
    """Return changes that shard more over the data-parallel ranks; the first one is empty."""
    changes: list[dict[str, Any]] = [{}]
    if args.num_distributed_optimizer_instances > 1:
        changes.append({INSTANCES: 1})
    if not args.use_distributed_optimizer:
        changes.append({"use_distributed_optimizer": True})
    is_homogeneous = args.meshes is None and args.shares is None
    shares_weights = args.data_parallel_size * args.context_parallel_size > 1
    if is_homogeneous and shares_weights and not captures_steps(vars(args)):
        strategies = (NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS)
        for strategy in (OPTIM_GRADS, OPTIM_GRADS_PARAMS):
            if strategies.index(strategy) > strategies.index(args.data_parallel_sharding_strategy):
                changes.append({"use_distributed_optimizer": True, SHARDING: strategy})
    return changes


def _state_changes(args: Namespace) -> list[dict[str, Any]]:
    """Return possible changes of the number formats of Adam's states: none, those with the same
    results, and 8-bit moments.
    """
    is_possible = args.optimizer == "adam" and args.use_distributed_optimizer and args.bf16
    if not is_possible or args.optimizer_cpu_offload or args.use_precision_aware_optimizer:
        return [{}]
    remainders = {"use_precision_aware_optimizer": True}
    if args.meshes is not None:
        return [{}, remainders]
    return [{}, remainders, {**remainders, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}]


def _recompute_changes(args: Namespace) -> Iterator[dict[str, Any]]:
    yield {}
    if args.recompute_granularity in ("full", RECOMPUTE_AUTO) or args.moe_layer_recompute:
        return
    modules = list_module_levels(args)[-1]
    if modules and args.recompute_granularity is None and not captures_steps(vars(args)):
        yield {
            "recompute_granularity": "selective",
            "recompute_modules": list(modules),
            "recomputed_modules": ModuleChoice(modules),
        }
    if offloads_activations(vars(args)):
        return  # it requires layers that are not recomputed whole
    yield {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recomputed_modules": NO_MODULES,
    }


def explicit_arguments(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a change without the arguments that follow from others or are details of others."""
    left_out = _implied_arguments(changes) | _DETAILS
    return {name: value for name, value in changes.items() if name not in left_out}


def _implied_arguments(changes: Mapping[str, Any]) -> set[str]:
    return _IMPLIED_ARGUMENTS | ({"use_distributed_optimizer"} if SHARDING in changes else set())


def change_arguments(args: Namespace, changes: Mapping[str, Any]) -> Namespace:
    """Return resolved arguments with a change, for the same number of ranks."""
    changed = copy(args)
    vars(changed).update(changes)
    ranks = args.data_parallel_size * args.tensor_model_parallel_size
    changed.data_parallel_size = ranks // changed.tensor_model_parallel_size
    return changed


def format_change(changes: Mapping[str, Any]) -> str:
    """Format a change as a YAML has it."""
    return " and ".join(
        f"{name}: {_format_yaml(value)}"
        for name, value in changes.items()
        if name not in _implied_arguments(changes)
    )


def _format_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Saving:
    """A change of one argument as a YAML has it, and the bytes that it saves on a rank."""

    change: str
    bytes_saved: float

    def __str__(self) -> str:
        is_small = self.bytes_saved < _GIB
        size = f"{self.bytes_saved / 2**20:,.0f} MiB" if is_small else f"{_gib(self.bytes_saved)}"
        return f"{self.change} saves about {size}"


def _gib(size: float) -> str:
    return f"{size / _GIB:,.{0 if size >= 10 * _GIB else 1}f} GiB"


def list_savings(args: Namespace, vocabulary_size: int, stage_index: int | None) -> list[Saving]:
    """Return what changes of single arguments save on a rank of a stage, the largest saving first.

    Args:
        args: resolved arguments.
        vocabulary_size: the padded vocabulary size.
        stage_index: the pipeline stage of the rank; None selects the one with the most memory.
    """

    def memory_of(changed: Namespace) -> float:
        totals = [s.memory.total for s in forecast_step(changed, vocabulary_size).stages]
        return max(totals) if stage_index is None else totals[stage_index]

    current = memory_of(args)
    savings: dict[str, Saving] = {}
    for all_changes in possible_changes(args):
        changes = {n: value for n, value in all_changes.items() if getattr(args, n) != value}
        (name, *others) = explicit_arguments(changes) or [""]
        key = format_change(changes) if name == "recompute_granularity" else name
        if not name or others or key in savings:
            continue  # of several tensor-parallel sizes, the smallest one
        bytes_saved = current - memory_of(change_arguments(args, changes))
        if bytes_saved >= _LEAST_SAVING * current:
            savings[key] = Saving(format_change(changes), bytes_saved)
    ordered = sorted(savings.values(), key=lambda saving: -saving.bytes_saved)
    return ordered[:_MAX_SAVINGS]
