"""Unsupported values that are replaced by another one that does nearly the same.

The launcher and the training program take the other value and print a note;
``allow_fallbacks: false`` refuses them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

from flagscale.config.arguments.hetero.meshes import check_mesh_syntax, meshes_of, uses_meshes
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.values import format_value

_MESH_SIZE_NAMES = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}
"""Sizes that meshes have of their own."""


class Substitution(NamedTuple):
    """Replacement of the value of argument ``name`` by ``value``, with its reason."""

    name: str
    value: Any
    reason: str


def substitutions_for(values: Values) -> list[Substitution]:
    """Return the substitutions that apply to arguments, whether they are allowed or not."""
    rules = (
        _substitute_implementation,
        _substitute_format,
        _substitute_sequence_parallel,
        _substitute_bias_rate,
        _substitute_mesh_sizes,
        _substitute_qkv_bias,
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
            f"{format_value(value)} is taken in place of {format_value(values[name])}: {reason}",
        )


def check_substitutions(values: Values) -> Iterator[Violation]:
    """Yield a violation for each substitution if substitutions are not allowed."""
    if not values["allow_fallbacks"]:
        for name, value, reason in substitutions_for(values):
            instead = f"allow_fallbacks: true takes {format_value(value)}"
            yield name, f"{format_value(values[name])} cannot be had: {reason}; {instead}"


def _substitute_implementation(values: Values) -> Iterator[Substitution]:
    if values["transformer_impl"] == "transformer_engine":
        reason = (
            "this trainer has no layers of Transformer Engine, and its own, compiled on CUDA, are "
            "the same functions"
        )
        yield Substitution("transformer_impl", "auto", reason)


def _substitute_format(values: Values) -> Iterator[Substitution]:
    if values["ckpt_format"] != "torch_dist":
        reason = "checkpoints are written in this format alone, which any layout can load"
        yield Substitution("ckpt_format", "torch_dist", reason)


def _substitute_mesh_sizes(values: Values) -> Iterator[Substitution]:
    """Substitute parallel sizes that FlagScale's YAML files set in addition to those of the
    meshes."""
    if not uses_meshes(values):
        return
    if values["log_num_zeros_in_grad"]:
        yield Substitution(
            "log_num_zeros_in_grad", False, "they are not counted over unlike meshes"
        )
    meshes = None if any(check_mesh_syntax(values)) else meshes_of(values)
    if meshes is None or meshes.open:
        return
    for name, short in _MESH_SIZE_NAMES.items():
        sizes = sorted({getattr(mesh, short) for mesh in meshes.meshes})
        if values[name] != 1 and values[name] not in sizes:
            yield Substitution(
                name, sizes[0], "in hetero_process_meshes each mesh has a size of its own"
            )


def _substitute_qkv_bias(values: Values) -> Iterator[Substitution]:
    if values["multi_latent_attention"] and values["add_qkv_bias"]:
        yield Substitution(
            "add_qkv_bias", False, "latent projections have no biases, there neither"
        )


def _substitute_sequence_parallel(values: Values) -> Iterator[Substitution]:
    if not values["sequence_parallel"]:
        return
    sizes = [values["tensor_model_parallel_size"]]
    if uses_meshes(values):
        meshes = None if any(check_mesh_syntax(values)) else meshes_of(values)
        sizes = [] if meshes is None or meshes.open else [mesh.tp for mesh in meshes.meshes]
    if sizes and max(sizes) == 1:
        reason = "with a tensor parallel size of 1 there is nobody to share a sequence with"
        yield Substitution("sequence_parallel", False, reason)


def _substitute_bias_rate(values: Values) -> Iterator[Substitution]:
    """Substitute a zero rate for the expert biases of a model with adapters. Gradients do not move
    these biases, so freezing them is not enough."""
    moved = values["moe_router_enable_expert_bias"] and values["moe_router_bias_update_rate"]
    if values["peft_type"] and values["num_moe_experts"] and moved:
        reason = (
            "a model does not change while its adapters are trained (peft_type: lora), nor do the "
            "biases by which its experts are chosen"
        )
        yield Substitution("moe_router_bias_update_rate", 0.0, reason)
