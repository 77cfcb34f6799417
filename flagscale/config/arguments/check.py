"""All rules between arguments of this project's training program: :func:`check_values`.

No torch: the launcher applies the rules before anything starts, and the training program applies
them again, because it can be started by hand. Values that megatron.core does not support without
Transformer Engine or Apex, or silently computes wrongly, are rejected with the reason. A few
unsupported values are *substituted* by another one that does nearly the same, with a note, unless
``allow_fallbacks: false`` forbids it.

``values`` are arguments by name, aliases resolved, defaults filled in. A violation is the name of
the argument to change and a description of the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flagscale.config.arguments.compat.huggingface.models import config_of
from flagscale.config.arguments.compat.unused import SPEED_ONLY_ARGUMENTS, check_refused
from flagscale.config.arguments.hetero.meshes import check_mesh_syntax, meshes_of, uses_meshes
from flagscale.config.arguments.hetero.microbatch_split import uses_microbatch_split
from flagscale.config.arguments.layout import check_layout, check_world_size
from flagscale.config.arguments.rules.activation_offload import check_activation_offload
from flagscale.config.arguments.rules.adapters import UNSUPPORTED_BY_PEFT, check_adapters
from flagscale.config.arguments.rules.context_parallel import is_ring_requested, why_no_ring
from flagscale.config.arguments.rules.data import (
    check_conversations,
    check_data_phases,
    check_external_data,
    check_preferences,
    check_split_text,
    check_tokenizer,
    check_validation,
)
from flagscale.config.arguments.rules.freezing import check_freezing
from flagscale.config.arguments.rules.layers import (
    check_attention,
    check_documents,
    check_latent_attention,
    check_layer_options,
    check_local_attention,
    check_moe,
    check_mtp,
)
from flagscale.config.arguments.rules.memory_checkpoints import check_memory_checkpoints
from flagscale.config.arguments.rules.model_family import check_family
from flagscale.config.arguments.rules.muon import check_other_optimizers
from flagscale.config.arguments.rules.optimizer import (
    check_batch_size_rampup,
    check_bounded_all_reduce,
    check_cuda_graphs,
    check_optimizer,
    check_overlap,
    check_schedule,
    drop_unused_schedule,
)
from flagscale.config.arguments.rules.optimizer_states import check_optimizer_states
from flagscale.config.arguments.rules.precision import (
    check_compiled_only,
    check_device,
    check_fp8,
    check_precision,
)
from flagscale.config.arguments.rules.sharding import check_sharding, shards_gradients
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.system_arguments import INSTANCES, NO_SHARD, SHARDING
from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import CheckpointError
from flagscale.object_storage import is_address
from flagscale.sinks.registry import check_sink_names


def check_values(values: Values) -> list[Violation]:
    """Return the violations that do not depend on the number of ranks.

    If required arguments are missing, only those are reported, because the other rules need them.
    """
    values = drop_unused_schedule(values)
    missing = list(_check_required(values))
    if missing:
        return missing
    forbidden_substitutions = list(check_substitutions(values))
    values = apply_substitutions(values)
    return forbidden_substitutions + [violation for rule in _RULES for violation in rule(values)]


def _check_required(values: Values) -> Iterator[Violation]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr"):
        if values[name] is None:
            yield name, "is required"


def _check_unsupported_values(values: Values) -> Iterator[Violation]:
    if values["cross_entropy_fusion_impl"] == "te":
        yield "cross_entropy_fusion_impl", "te requires Transformer Engine; use native"
    is_heterogeneous = uses_meshes(values) or uses_microbatch_split(values)
    if values[INSTANCES] > 1 and is_heterogeneous:
        yield (
            INSTANCES,
            f"{values[INSTANCES]} is not supported in heterogeneous training; leave it out",
        )
    if shards_gradients(values) and is_heterogeneous:
        yield (
            SHARDING,
            f"{values[SHARDING]} is not supported in heterogeneous training, in which replicas "
            "reduce gradients once a step; optim shards the optimizer state alone",
        )


def _check_export_directories(values: Values) -> Iterator[Violation]:
    """Check that checkpoints and exports, whose directories have equal names, are kept apart."""
    names_by_path: dict[Path, str] = {}
    for name in ("save", "export_huggingface", "export_peft"):
        if path := values[name]:
            other = names_by_path.setdefault(Path(path).absolute(), name)
            if other != name:
                yield name, f"{path} is the directory of {other}; give another one"


def _check_export_source(values: Values) -> Iterator[Violation]:
    """Check that checkpoints to export are on a disk."""
    if not is_address(values["save"] or ""):
        return
    for name in ("export_huggingface", "export_peft"):
        if values[name]:
            yield (
                name,
                (
                    f"is not supported with save: {values['save']}, because exports are made from "
                    "checkpoints on a disk; leave it out"
                ),
            )


def _check_export(values: Values) -> Iterator[Violation]:
    """Check that a config.json of Hugging Face can describe the model, and that peft can load its
    adapters, if an export is requested."""
    yield from _check_export_directories(values)
    yield from _check_export_source(values)
    for_peft = values["peft_type"] and values["export_peft"]
    if not values["export_huggingface"] and not for_peft:
        return
    complete = {
        **values,
        "vocab_size": values["vocab_size"] or 1,
        "max_position_embeddings": values["max_position_embeddings"] or values["seq_length"],
    }
    requested = [name for name in ("export_huggingface", "export_peft") if values[name]]
    try:
        kind = config_of(complete)["model_type"]
    except CheckpointError as error:
        yield requested[0], error.message
        return
    if for_peft and (reason := UNSUPPORTED_BY_PEFT.get(kind)):
        yield (
            "export_peft",
            f"is not supported for {kind} models: {reason}; use export_huggingface, which merges "
            "the adapters into the model",
        )


def _check_length(values: Values) -> Iterator[Violation]:
    iters, samples = values["train_iters"], values["train_samples"]
    if (iters is None) == (samples is None):
        stated = "neither" if iters is None else "both"
        name = "train_iters" if iters is None else "train_samples"
        yield name, f"expected either train_iters or train_samples, found {stated}"
    max_length = values["max_position_embeddings"]
    if max_length is not None and max_length < values["seq_length"]:
        yield (
            "max_position_embeddings",
            f"{max_length} is less than seq_length {values['seq_length']}",
        )


def _check_profiling(values: Values) -> Iterator[Violation]:
    first, end = values["profile_step_start"], values["profile_step_end"]
    if values["profile"] and end <= first:
        yield "profile_step_end", f"must be greater than profile_step_start {first}, found {end}"


_MESH_SIZE_NAMES = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}
"""Parallel sizes that each mesh has separately, with their names in a mesh."""


_RULES: tuple[Callable[[Values], Iterable[Violation]], ...] = (
    check_device,
    check_bounded_all_reduce,
    check_family,
    check_optimizer,
    check_optimizer_states,
    check_other_optimizers,
    check_refused,
    _check_unsupported_values,
    check_cuda_graphs,
    check_activation_offload,
    check_memory_checkpoints,
    check_local_attention,
    check_layer_options,
    check_attention,
    check_moe,
    check_mtp,
    check_latent_attention,
    check_documents,
    check_conversations,
    check_preferences,
    check_external_data,
    check_validation,
    check_adapters,
    check_precision,
    check_compiled_only,
    check_fp8,
    check_layout,
    check_freezing,
    _check_export,
    _check_length,
    check_batch_size_rampup,
    check_data_phases,
    check_overlap,
    check_sharding,
    _check_profiling,
    check_schedule,
    check_split_text,
    check_tokenizer,
    check_sink_names,
)
"""Rules that do not depend on the number of ranks, for arguments with substitutions made."""


class RepeatedCheck:
    """The rules, applied to many layouts of one experiment.

    A rule is evaluated again only if an argument that it has read has another value.

    Args:
        values: arguments by name, without violations and with substitutions made.
        varied: names of the arguments that differ between layouts.
        world_size: number of ranks.
    """

    def __init__(self, values: Values, varied: Collection[str], world_size: int) -> None:
        self._values = dict(values)
        self._varied = frozenset(varied)
        self._size_results = _RuleResults(lambda values: check_world_size(values, world_size))
        self._results = [_RuleResults(rule) for rule in _RULES]

    def accepts(self, changes: Mapping[str, Any]) -> bool:
        """Return whether a layout violates no rule."""
        return self.find_cause(changes) is None

    def find_cause(self, changes: Mapping[str, Any]) -> frozenset[str] | None:
        """Return the varied arguments that the first violated rule has read; None if a layout
        violates no rule. All layouts with the same values of these arguments violate it.
        """
        values = {**self._values, **changes}
        for results in (self._size_results, *self._results):
            if (names := results.find_cause(values, self._varied)) is not None:
                return names
        # Most rules read none of the varied arguments, so they hold for every layout.
        self._results = [results for results in self._results if not results.are_constant]
        return None


class _RuleResults:
    """Results of a rule, by the values of the arguments that it reads.

    They form a tree. An inner node is the name of an argument and a node for each of its values; a
    leaf is the result. A rule that has read the same values before reads the same argument next.
    """

    def __init__(self, rule: Callable[[Values], Iterable[Violation]]) -> None:
        self._rule = rule
        self._root: dict[Any, Any] = {}

    @property
    def are_constant(self) -> bool:
        """True if the rule reads no argument that differs between layouts."""
        return None in self._root

    def find_cause(self, values: dict[str, Any], varied: frozenset[str]) -> frozenset[str] | None:
        """Return the varied arguments that the rule reads, if it is violated."""
        node, names = self._root, list[str]()
        while node:
            ((name, children),) = node.items()
            if name is None:
                return frozenset(names) if children else None
            if (value := values[name]) not in children:
                break
            names.append(name)
            node = children[value]
        recorded = _RecordedValues(values, varied)
        result = any(self._rule(recorded))
        node = self._root
        for name in recorded.names:
            node = node.setdefault(name, {}).setdefault(values[name], {})
        node[None] = result
        return frozenset(recorded.names) if result else None


class _RecordedValues(Mapping[str, Any]):
    """Arguments that record the names of those that are read, of some."""

    def __init__(self, values: dict[str, Any], recorded: frozenset[str]) -> None:
        self._values, self._recorded = values, recorded
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Any:
        if name in self._recorded and name not in self.names:
            self.names.append(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Substitution(NamedTuple):
    """Replacement of an unsupported value of argument ``name`` by ``value``, with the reason."""

    name: str
    value: Any
    reason: str


def substitutions_for(values: Values) -> list[Substitution]:
    """Return the substitutions that apply to arguments, whether they are allowed or not."""
    rules = (
        _substitute_implementation,
        _substitute_speed_switches,
        _substitute_format,
        _substitute_sequence_parallel,
        _substitute_bias_rate,
        _substitute_mesh_sizes,
        _substitute_qkv_bias,
        _substitute_ring,
        _substitute_optimizer_sharding,
    )
    return [substitution for rule in rules for substitution in rule(values)]


def apply_substitutions(values: Values) -> Values:
    """Return the arguments with every substitution made, as a read-only mapping."""
    replaced = {substitution.name: substitution.value for substitution in substitutions_for(values)}
    return MappingProxyType({**values, **replaced})


def note_substitutions(values: Values) -> Iterator[Violation]:
    """Yield each substituted argument with a note."""
    for name, value, reason in substitutions_for(values):
        yield (
            name,
            f"{format_value(value)} is used instead of {format_value(values[name])}: {reason}",
        )


def check_substitutions(values: Values) -> Iterator[Violation]:
    """Yield a violation for each substitution if substitutions are not allowed."""
    if not values["allow_fallbacks"]:
        for name, value, reason in substitutions_for(values):
            yield (
                name,
                f"{format_value(values[name])} is not supported: {reason}; set "
                f"{format_value(value)}, or allow_fallbacks: true",
            )


def _substitute_implementation(values: Values) -> Iterator[Substitution]:
    if values["transformer_impl"] == "transformer_engine":
        reason = (
            "this trainer has its own layers, compiled on CUDA, which compute the same functions "
            "as Transformer Engine's"
        )
        yield Substitution("transformer_impl", "auto", reason)


def _substitute_speed_switches(values: Values) -> Iterator[Substitution]:
    for name, reason in SPEED_ONLY_ARGUMENTS.items():
        default = arguments()[name].default
        if values[name] and values[name] != default:
            yield Substitution(name, default, reason)


def _substitute_format(values: Values) -> Iterator[Substitution]:
    if values["ckpt_format"] != "torch_dist":
        reason = "checkpoints are saved in this format only, which any parallel layout can load"
        yield Substitution("ckpt_format", "torch_dist", reason)


def _substitute_mesh_sizes(values: Values) -> Iterator[Substitution]:
    """Substitute parallel sizes that FlagScale's YAML files set in addition to those of the
    meshes."""
    if not uses_meshes(values):
        return
    if values["log_num_zeros_in_grad"]:
        yield Substitution(
            "log_num_zeros_in_grad", False, "zeros are not counted over heterogeneous meshes"
        )
    meshes = None if any(check_mesh_syntax(values)) else meshes_of(values)
    if meshes is None or meshes.open:
        return
    for name, short in _MESH_SIZE_NAMES.items():
        sizes = sorted({getattr(mesh, short) for mesh in meshes.meshes})
        if values[name] != 1 and values[name] not in sizes:
            yield Substitution(name, sizes[0], "hetero_process_meshes sets the size of each mesh")


def _substitute_qkv_bias(values: Values) -> Iterator[Substitution]:
    if values["multi_latent_attention"] and values["add_qkv_bias"]:
        yield Substitution("add_qkv_bias", False, "latent projections have no biases")


def _substitute_sequence_parallel(values: Values) -> Iterator[Substitution]:
    if not values["sequence_parallel"]:
        return
    sizes = [values["tensor_model_parallel_size"]]
    if uses_meshes(values):
        meshes = None if any(check_mesh_syntax(values)) else meshes_of(values)
        sizes = [] if meshes is None or meshes.open else [mesh.tp for mesh in meshes.meshes]
    if sizes and max(sizes) == 1:
        reason = "sequence parallelism requires a tensor-parallel size above 1"
        yield Substitution("sequence_parallel", False, reason)


def _substitute_bias_rate(values: Values) -> Iterator[Substitution]:
    """Substitute a zero update rate for the expert biases of a model with adapters. They are not
    updated by gradients, so freezing the weights is not enough."""
    is_updated = values["moe_router_enable_expert_bias"] and values["moe_router_bias_update_rate"]
    if values["peft_type"] and values["num_moe_experts"] and is_updated:
        reason = "expert biases are frozen like the other weights with peft_type: lora"
        yield Substitution("moe_router_bias_update_rate", 0.0, reason)


def _substitute_ring(values: Values) -> Iterator[Substitution]:
    reason = why_no_ring(values)
    if is_ring_requested(values) and reason is not None:
        reason = f"{reason}, for which keys and values are gathered; the result is the same"
        yield Substitution("cp_comm_type", "all_gather", reason)


def _substitute_optimizer_sharding(values: Values) -> Iterator[Substitution]:
    strategy = values[SHARDING]
    if strategy != NO_SHARD and not values["use_distributed_optimizer"]:
        reason = f"{SHARDING}: {strategy} shards the optimizer state"
        yield Substitution("use_distributed_optimizer", True, reason)
