"""Arguments that change the speed and the memory of training but not its result, and their values.

:data:`CHOICES` is the only list of what ``action=auto_tune`` varies. To let it vary another
argument, add a row. A choice proposes values; whether a combination of them is legal is decided by
the rules of :mod:`.check` and :mod:`.layout` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any, NamedTuple

from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.system_arguments import (
    INSTANCES,
    NO_SHARD,
    OPTIM_GRADS_PARAMS,
    SHARDING,
    STAGE_RECOMPUTE,
)

Setting = Mapping[str, Any]
"""Values of the arguments of one choice, by name."""

TP, PP, CP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
EP, EXPERT_TP = "expert_model_parallel_size", "expert_tensor_parallel_size"
SEQUENCE_PARALLEL, MICRO_BATCH = "sequence_parallel", "micro_batch_size"
VIRTUAL_LAYERS = "num_layers_per_virtual_pipeline_stage"
SHARDED, OFFLOADED = "use_distributed_optimizer", "optimizer_cpu_offload"
RECOMPUTED = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
LEAN_STATES = "use_precision_aware_optimizer"
FINE_GRAINED = "fine_grained_activation_offloading"
OFFLOADED_LAYERS = "cpu_offloading_num_layers"

RequestedValues = Mapping[str, tuple[Any, ...]]
"""Values that a user asks for, by the name of an argument. Other arguments take any value."""


class ChoiceContext(NamedTuple):
    """Inputs of a choice: arguments with the settings of all earlier choices, the number of ranks,
    the arguments of the experiment, and the values that are asked for.

    ``module_levels`` are sets of modules that are cheaper to recompute than whole layers, smallest
    first. ``hidden_offloads`` is the fraction of the layers whose activations can be copied to the
    host while the others compute.
    """

    values: Values
    ranks: int
    base: Values
    requested: RequestedValues
    module_levels: tuple[tuple[str, ...], ...] = ()
    hidden_offloads: float = 0.0

    @property
    def replicas(self) -> int:
        """Data-parallel size; 0 if the model takes more ranks than there are."""
        sizes = self.values[TP] * self.values[PP] * self.values[CP]
        return int(self.ranks // sizes)


@dataclass(frozen=True)
class Choice:
    """Some arguments that are set together.

    ``list_settings`` returns the settings to consider. If ``saves_memory``, each setting takes less
    memory and more time than those before it, so it is of use only where they do not fit.
    """

    arguments: tuple[str, ...]
    list_settings: Callable[[ChoiceContext], Iterable[Setting]]
    saves_memory: bool = False

    def settings(self, context: ChoiceContext) -> list[Setting]:
        """Return the settings to consider, with requested values only."""
        settings = list(self.list_settings(context))
        for name in self.arguments:
            if name in context.requested:
                allowed = context.requested[name]
                settings = [s for s in settings if s.get(name, context.values[name]) in allowed]
        return settings


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _sizes(name: str) -> Callable[[ChoiceContext], Iterator[Setting]]:
    """Return the settings of a parallel size: all divisors of the remaining ranks."""

    def list_settings(context: ChoiceContext) -> Iterator[Setting]:
        for size in _divisors(context.ranks):
            if context.ranks % (size * _used_ranks(context)) == 0:
                yield {name: size}

    return list_settings


def _used_ranks(context: ChoiceContext) -> int:
    values = context.values
    return int(values[TP] * values[PP] * values[CP])


def _tensor_parallel(context: ChoiceContext) -> Iterator[Setting]:
    for size in _divisors(context.ranks):
        for is_split in context.requested.get(SEQUENCE_PARALLEL, (size > 1,)):
            if size > 1 or not is_split:
                yield {TP: size, SEQUENCE_PARALLEL: is_split}


def _virtual_stages(context: ChoiceContext) -> Iterator[Setting]:
    others = {"num_virtual_stages_per_pipeline_rank": None}
    yield {VIRTUAL_LAYERS: None, **others}
    stages, layers = context.values[PP], context.values["num_layers"]
    if stages > 1 and layers % stages == 0:
        for count in reversed(_divisors(layers // stages)[:-1]):
            yield {VIRTUAL_LAYERS: count, **others}


def _expert_parallel(context: ChoiceContext) -> Iterator[Setting]:
    experts = context.values["num_moe_experts"]
    for size in _divisors(gcd(experts, context.ranks)) if experts else (1,):
        yield {EP: size}


def _expert_tensor_parallel(context: ChoiceContext) -> Iterator[Setting]:
    yield {EXPERT_TP: None}
    if context.values["num_moe_experts"] and context.values[TP] > 1:
        yield {EXPERT_TP: 1}


def _micro_batches(context: ChoiceContext) -> Iterator[Setting]:
    batch, replicas = context.values["global_batch_size"], context.replicas
    if not replicas or batch % replicas:
        return
    share = batch // replicas
    sizes = {2**power for power in range(share.bit_length())}
    sizes |= {context.base[MICRO_BATCH], *context.requested.get(MICRO_BATCH, ())}
    for size in sorted(sizes):
        if share % size == 0:
            yield {MICRO_BATCH: size}


def _optimizer_sharding(context: ChoiceContext) -> Iterator[Setting]:
    sharing_ranks = context.replicas * context.values[CP]
    default = (True, False) if sharing_ranks > 1 else (context.base[SHARDED],)
    for is_sharded in context.requested.get(SHARDED, default):
        yield {SHARDED: is_sharded}


def _gradient_sharding(context: ChoiceContext) -> Iterator[Setting]:
    """Yield no sharding of gradients, then of gradients and weights; others only if requested.

    In a pipeline, weights would be gathered for each micro-batch again, and a stage has few.
    """
    sharing_ranks = context.replicas * context.values[CP]
    can_shard = context.values[SHARDED] and sharing_ranks > 1 and context.values[PP] == 1
    default = (NO_SHARD, OPTIM_GRADS_PARAMS) if can_shard else (NO_SHARD,)
    for strategy in context.requested.get(SHARDING, default):
        yield {SHARDING: strategy}


def _instances(context: ChoiceContext) -> Iterator[Setting]:
    """Yield the experiment's number of groups of ranks that share state, or 1 if none do."""
    sharing_ranks, own = context.replicas * context.values[CP], context.base[INSTANCES]
    is_possible = context.values[SHARDED] and sharing_ranks % own == 0
    for instances in context.requested.get(INSTANCES, (own if is_possible else 1,)):
        yield {INSTANCES: instances}


def _recomputation(context: ChoiceContext) -> Iterator[Setting]:
    """Yield no recomputation, the experiment's own, more and more modules, and then layers."""
    base = context.base
    if any(base[name] is not None for name in STAGE_RECOMPUTE):
        yield {name: hashable(base[name]) for name in RECOMPUTED}
        return
    granularity, method, number, _ = RECOMPUTED
    own = {name: hashable(base[name]) for name in RECOMPUTED}
    settings = [dict.fromkeys(RECOMPUTED)]
    if base[granularity] not in (None, "full", "auto"):
        settings.append(own)
    settings += [_recompute_setting("selective", modules=m) for m in context.module_levels if m]
    layers = _layers_per_chunk(context.values)
    counts = {-(-layers // 2)} - {layers}
    counts |= set(context.requested.get(number, ()))
    if base[method] == "block" and base[number]:
        counts.add(base[number])
    settings += [
        _recompute_setting("full", "block", count)
        for count in sorted(count for count in counts if count and 0 < count <= layers)
    ]
    uniform_counts = {1, *context.requested.get(number, ())}
    settings += [
        _recompute_setting("full", "uniform", count)
        for count in sorted(count for count in uniform_counts if count and 0 < count <= layers)
    ]
    for index, setting in enumerate(settings):
        if setting not in settings[:index]:
            yield setting


def _recompute_setting(
    granularity: str,
    method: str | None = None,
    layers: int | None = None,
    modules: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    return dict(zip(RECOMPUTED, (granularity, method, layers, modules), strict=True))


def hashable(value: Any) -> Any:
    """Return a value of an argument as settings have it: a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _layers_per_chunk(values: Values) -> int:
    return int(values[VIRTUAL_LAYERS] or -(-values["num_layers"] // values[PP]))


def _lean_states(context: ChoiceContext) -> Iterator[Setting]:
    """Yield the experiment's formats of the optimizer's states, then the ones that take two bytes
    less per weight with the same results. Others change the results.
    """
    yield {LEAN_STATES: context.base[LEAN_STATES]}
    values = context.values
    can_split = values["optimizer"] == "adam" and values[SHARDED] and values["bf16"]
    if can_split and not context.base[LEAN_STATES]:
        yield {LEAN_STATES: True}


def _activation_offload(context: ChoiceContext) -> Iterator[Setting]:
    """Yield the experiment's own number of layers, then as many as can be copied in time."""
    own, layers = context.base[OFFLOADED_LAYERS], _layers_per_chunk(context.values)
    hidden = min(int(layers * context.hidden_offloads), layers - 1)
    default = (own, hidden) if hidden > own and not context.base[FINE_GRAINED] else (own,)
    for count in context.requested.get(OFFLOADED_LAYERS, default):
        yield {OFFLOADED_LAYERS: count}


def _optimizer_offload(context: ChoiceContext) -> Iterator[Setting]:
    can_offload = context.values["optimizer"] == "adam" and context.values[SHARDED]
    default = (False, True) if can_offload else (context.base[OFFLOADED],)
    for is_offloaded in context.requested.get(OFFLOADED, default):
        yield {OFFLOADED: is_offloaded}


CHOICES: tuple[Choice, ...] = (
    Choice((TP, SEQUENCE_PARALLEL), _tensor_parallel),
    Choice((PP,), _sizes(PP)),
    Choice((CP,), _sizes(CP)),
    Choice((VIRTUAL_LAYERS, "num_virtual_stages_per_pipeline_rank"), _virtual_stages),
    Choice((EP,), _expert_parallel),
    Choice((EXPERT_TP,), _expert_tensor_parallel),
    Choice((MICRO_BATCH,), _micro_batches),
    Choice((SHARDED,), _optimizer_sharding),
    Choice((SHARDING,), _gradient_sharding, saves_memory=True),
    Choice((INSTANCES,), _instances),
    Choice(RECOMPUTED, _recomputation, saves_memory=True),
    Choice((LEAN_STATES,), _lean_states, saves_memory=True),
    Choice((OFFLOADED_LAYERS,), _activation_offload, saves_memory=True),
    Choice((OFFLOADED,), _optimizer_offload, saves_memory=True),
)
"""All choices, in the order in which they are made."""

CHOSEN_ARGUMENTS = tuple(name for choice in CHOICES for name in choice.arguments)
"""Arguments that the choices set."""

SAVING_ARGUMENTS = frozenset(
    name for choice in CHOICES if choice.saves_memory for name in choice.arguments
)
"""Those that save memory."""

ARGUMENTS_OF_GROUPS = tuple(
    name for name in CHOSEN_ARGUMENTS if name not in (MICRO_BATCH, *RECOMPUTED)
)
"""Those for which a run needs processes of its own. Runs that differ only in others have the same
process groups and the same optimizer.
"""

DERIVED_KEYS: Mapping[str, Callable[[ChoiceContext], Any]] = {
    "data_parallel_size": lambda context: context.replicas,
    "use_recompute": lambda context: context.values[RECOMPUTED[0]] is not None,
}
"""Other names for which a user may ask for values, with the value of a layout."""


def neutral_settings() -> dict[str, Any]:
    """Return the values with which every choice begins: one rank holds the whole model."""
    return {
        **dict.fromkeys((TP, PP, CP, EP, MICRO_BATCH), 1),
        **dict.fromkeys((SEQUENCE_PARALLEL, OFFLOADED), False),
        **dict.fromkeys((EXPERT_TP, VIRTUAL_LAYERS, "num_virtual_stages_per_pipeline_rank")),
        **dict.fromkeys(RECOMPUTED),
        OFFLOADED_LAYERS: 0,
        SHARDING: NO_SHARD,
        INSTANCES: 1,
    }


def enumerate_settings(
    choices: Iterable[Choice], context: ChoiceContext
) -> Iterator[dict[str, Any]]:
    """Yield every combination of the settings of choices."""
    remaining = list(choices)
    if not remaining:
        yield {}
        return
    first, *others = remaining
    for setting in first.settings(context):
        inner = context._replace(values={**context.values, **setting})
        for rest in enumerate_settings(others, inner):
            yield {**setting, **rest}


def enumerate_savings(context: ChoiceContext) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """Return the combinations of all settings that save memory, with the index of each setting in
    its choice. A combination follows all that save less in every choice.
    """
    saving = [choice for choice in CHOICES if choice.saves_memory]
    settings = [list(enumerate(choice.settings(context))) for choice in saving]
    combinations = [
        (
            tuple(index for index, _ in combination),
            {name: value for _, setting in combination for name, value in setting.items()},
        )
        for combination in product(*settings)
    ]
    return sorted(combinations, key=lambda combination: (sum(combination[0]), combination[0]))
