"""Registry of all arguments that a train YAML may give, by name. No torch.

There are three sources: the config dataclasses of megatron.core (a generated list), the training
arguments of this project, which replace those of megatron.core with the same name, and aliases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flagscale.config.arguments.compat.names import ALIASES, Alias, why_unsupported, why_unused
from flagscale.config.arguments.spec.argument import Argument, Section, SettingContext, declared
from flagscale.config.arguments.spec.data_arguments import (
    Conversations,
    Data,
    External,
    Masking,
    Preferences,
    Prompts,
    Tasks,
    Tokenizer,
)
from flagscale.config.arguments.spec.model_arguments import (
    LOAD_BALANCING,
    Adapters,
    Architecture,
    Freezing,
    Latent,
    LearningRate,
    Lion,
    Model,
    Muon,
    OptimizerStates,
    TrainingLength,
)
from flagscale.config.arguments.spec.system_arguments import (
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    Checkpointing,
    ContextParallelism,
    Heterogeneous,
    Logging,
    OptimizerOffload,
    Profiling,
    Recomputation,
    Runtime,
    Sharding,
)
from flagscale.config.arguments.spec.values import (
    expand_number_text,
    is_list_expression,
    nearest_names,
)

TRAINING_GROUPS: tuple[tuple[type, Section], ...] = (
    (Runtime, "system"),
    (Checkpointing, "system"),
    (Logging, "system"),
    (Profiling, "system"),
    (Heterogeneous, "system"),
    (ContextParallelism, "system"),
    (Sharding, "system"),
    (OptimizerOffload, "system"),
    (Recomputation, "system"),
    (Model, "model"),
    (Architecture, "model"),
    (Latent, "model"),
    (TrainingLength, "model"),
    (LearningRate, "model"),
    (OptimizerStates, "model"),
    (Muon, "model"),
    (Lion, "model"),
    (Freezing, "model"),
    (Adapters, "model"),
    (Data, "data"),
    (External, "data"),
    (Masking, "data"),
    (Conversations, "data"),
    (Preferences, "data"),
    (Prompts, "data"),
    (Tasks, "data"),
    (Tokenizer, "data"),
)
"""Each group of arguments with the section of a train YAML that it belongs to."""
_AT_LEAST_ONE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "recompute_num_layers",
    "bucket_size",
    "num_dataset_builder_threads",
    "microbatch_group_size_per_vp_stage",
    "initial_loss_scale",
)
_NOT_NEGATIVE = (
    "moe_router_num_groups",
    "moe_router_group_topk",
    "cpu_offloading_num_layers",
    "min_offloaded_tensor_size",
    "lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "weight_decay",
    "clip_grad",
    "adam_eps",
    "layernorm_epsilon",
    "init_method_std",
    "loss_scale",
    "hysteresis",
)
_FRACTIONS = ("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2", "sgd_momentum")
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(_AT_LEAST_ONE, (1, None)),
    **dict.fromkeys(_NOT_NEGATIVE, (0, None)),
    **dict.fromkeys(_FRACTIONS, (0, 1)),
}
"""Minimum and maximum of megatron.core's arguments by name, inclusive; None: no limit."""
CHOICES: dict[str, tuple[str, ...]] = {
    "moe_router_load_balancing_type": LOAD_BALANCING,
    "recompute_modules": RECOMPUTE_MODULES,
    "offload_modules": OFFLOAD_MODULES,
}
"""Choices of megatron.core's arguments whose types do not list them."""
_CORE_LIST = Path(__file__).with_name("generated") / "megatron_core.json"


@lru_cache(maxsize=1)
def _core_records() -> list[dict[str, Any]]:
    with _CORE_LIST.open("rb") as file:
        records: list[dict[str, Any]] = json.load(file)["arguments"]
    return records


def _core_argument(record: Mapping[str, Any]) -> Argument:
    choices = CHOICES.get(record["name"], record["choices"])
    minimum, maximum = BOUNDS.get(record["name"], (None, None))
    return Argument(
        name=record["name"],
        kind=record["kind"],
        doc=record["doc"],
        default=record["default"],
        section=record["section"],
        many=record["many"],
        choices=None if choices is None else tuple(choices),
        minimum=minimum,
        maximum=maximum,
        origin=f"megatron.core {record['class']}",
    )


@lru_cache(maxsize=1)
def arguments() -> Mapping[str, Argument]:
    """Return the arguments of the training program by name, without aliases."""
    registered = {record["name"]: _core_argument(record) for record in _core_records()}
    for group, section in TRAINING_GROUPS:
        registered.update((argument.name, argument) for argument in declared(group, section))
    return MappingProxyType(registered)


@lru_cache(maxsize=1)
def aliases() -> Mapping[str, Alias]:
    """Return the aliases by name, except those that are names of arguments."""
    return MappingProxyType({a.name: a for a in ALIASES if a.name not in arguments()})


def _alias_argument(alias: Alias) -> Argument:
    if alias.rule == "same":
        target = arguments()[alias.target]
        return Argument(**{**vars(target), "name": alias.name, "origin": f"alias of {target.name}"})
    doc = alias.doc or {
        "opposite": f"Opposite of `{alias.target}`",
        "value": f"`{alias.target}: {alias.value}`",
    }.get(alias.rule, "")
    section = arguments()[alias.target].section if alias.target else "model"
    return Argument(
        alias.name,
        kind="bool",
        doc=doc,
        default=False,
        section=section,
        origin=f"alias of {alias.target}",
    )


@lru_cache(maxsize=1)
def registry() -> Mapping[str, Argument]:
    """Return arguments and aliases by name in snake case. The ``origin`` of an alias names the
    argument that it stands for."""
    registered = dict(arguments())
    registered.update((alias.name, _alias_argument(alias)) for alias in aliases().values())
    return MappingProxyType(registered)


@lru_cache(maxsize=1)
def one_or_many() -> frozenset[str]:
    """Return the names of arguments for which a single value and a list of one item have different
    meanings."""
    return frozenset(record["name"] for record in _core_records() if record["single"])


def lookup(name: str) -> tuple[Argument, Alias | None] | None:
    """Return the argument of a name in snake case and, if the name is an alias, the alias.

    ``no_x`` of a boolean ``x`` is its opposite.
    """
    if name in registry():
        return registry()[name], aliases().get(name)
    positive = registry().get(name[3:]) if name.startswith("no_") else None
    if positive is None or positive.kind != "bool" or positive.name in aliases():
        return None
    alias = Alias(name, positive.name, "opposite")
    return _alias_argument(alias), alias


def canonical_name(name: str) -> str | None:
    """Return the argument that a name in snake case gives with an unchanged value.

    None for unknown names and for aliases that mean another value, such as ``no_x``.
    """
    match = lookup(name)
    if match is None:
        return None
    argument, alias = match
    if alias is None:
        return argument.name
    return alias.target if alias.rule == "same" else None


def closest_names(name: str) -> list[str]:
    """Return the names that are most similar to ``name``, best first; empty if none is similar."""
    return nearest_names(name.strip("-").replace("-", "_"), registry())


def unknown_message(name: str, value: Any = None, context: SettingContext | None = None) -> str:
    """Return the message about a name that is not an argument.

    Args:
        name: Name in snake case.
        value: Its value, from which the value of the key to write is computed.
        context: Other settings, likewise.
    """
    from flagscale.config.arguments.compat.trainer_names import replacement_of

    if answer := replacement_of(name, value, context):
        return answer
    reason = why_unsupported(name) or why_unused(name)
    if reason:
        return f"is not supported: {reason}"
    near = closest_names(name)
    return "unknown argument" + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")


def unwrap_single(argument: Argument, given: Any, converted: Any) -> Any:
    """Return the value of an argument that takes one value or several (``many``).

    Most such arguments are always lists. For those of :func:`one_or_many` a single value has
    another meaning than a list of one item.

    Args:
        argument: the argument.
        given: the value of the configuration or command line: a single value or a list.
        converted: the items of ``given``, converted to the argument's type.

    Returns:
        ``converted``, or its only item.
    """
    is_expression = argument.kind == "int" and is_list_expression(str(given))
    is_expression = is_expression or len(expand_number_text(argument, given)) > 1
    is_list = is_expression or isinstance(given, (list, tuple))
    return converted if is_list or argument.name not in one_or_many() else converted[0]


def fold_alias(alias: Alias | None, name: str, value: Any) -> tuple[str, Any] | None:
    """Return the argument that a name stands for, and its value there.

    Args:
        alias: the alias, if ``name`` was found by one.
        name: canonical name of the argument, used without an alias.
        value: value under the name that was used.

    Returns:
        None for an alias without effect.
    """
    if alias is None:
        return name, value
    translated = alias.translate(value)
    return None if alias.rule == "none" or translated is None else (alias.target, translated)
