"""Values that cannot be had here and for which another does nearly the same.

The launcher and the training program take that one and say so; ``allow_fallbacks: false`` has
them refuse. Pure, as :mod:`flagscale.config.arguments.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from flagscale.config.arguments.meshes import are_on, malformed, meshes_of
from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.values import shown

_SIZES = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}
"""Sizes that meshes have of their own."""


class Fallback(NamedTuple):
    """``name`` is ``value`` in place of what was given, for this ``reason``."""

    name: str
    value: Any
    reason: str


def fallbacks(values: Values) -> list[Fallback]:
    """What is replaced in arguments by name, aliases folded, defaults filled in, whether that is
    allowed or not."""
    rules = (_implementation, _format, _parallelism, _biases, _of_meshes, _latent)
    return [found for rule in rules for found in rule(values)]


def settled(values: Values) -> dict[str, Any]:
    """The arguments with what replaces them."""
    return {**values, **{found.name: found.value for found in fallbacks(values)}}


def notes(values: Values) -> Iterator[Broken]:
    """What is replaced, by name, and why."""
    for name, value, reason in fallbacks(values):
        yield name, f"{shown(value)} is taken in place of {shown(values[name])}: {reason}"


def broken(values: Values) -> Iterator[Broken]:
    """What would have to be replaced, and may not be."""
    if not values["allow_fallbacks"]:
        for name, value, reason in fallbacks(values):
            instead = f"allow_fallbacks: true takes {shown(value)}"
            yield name, f"{shown(values[name])} cannot be had: {reason}; {instead}"


def _implementation(values: Values) -> Iterator[Fallback]:
    if values["transformer_impl"] == "transformer_engine":
        reason = (
            "this trainer has no layers of Transformer Engine, and its own, compiled on CUDA, are "
            "the same functions"
        )
        yield Fallback("transformer_impl", "auto", reason)


def _format(values: Values) -> Iterator[Fallback]:
    if values["ckpt_format"] != "torch_dist":
        reason = "checkpoints are written in this format alone, which any layout can load"
        yield Fallback("ckpt_format", "torch_dist", reason)


def _of_meshes(values: Values) -> Iterator[Fallback]:
    """What FlagScale's YAMLs give beside the meshes, of which theirs is taken there, too."""
    if not are_on(values):
        return
    if values["log_num_zeros_in_grad"]:
        yield Fallback("log_num_zeros_in_grad", False, "they are not counted over unlike meshes")
    meshes = None if any(malformed(values)) else meshes_of(values)
    if meshes is None or meshes.open:
        return
    for name, short in _SIZES.items():
        own = sorted({getattr(mesh, short) for mesh in meshes.meshes})
        if values[name] != 1 and values[name] not in own:
            yield Fallback(name, own[0], "in hetero_process_meshes each mesh has a size of its own")


def _latent(values: Values) -> Iterator[Fallback]:
    if values["multi_latent_attention"] and values["add_qkv_bias"]:
        yield Fallback("add_qkv_bias", False, "latent projections have no biases, there neither")


def _parallelism(values: Values) -> Iterator[Fallback]:
    if not values["sequence_parallel"]:
        return
    sizes = [values["tensor_model_parallel_size"]]
    if are_on(values):
        meshes = None if any(malformed(values)) else meshes_of(values)
        sizes = [] if meshes is None or meshes.open else [mesh.tp for mesh in meshes.meshes]
    if sizes and max(sizes) == 1:
        reason = "with a tensor parallel size of 1 there is nobody to share a sequence with"
        yield Fallback("sequence_parallel", False, reason)


def _biases(values: Values) -> Iterator[Fallback]:
    """Biases by which experts are chosen are moved by no gradient, so freezing them is not
    enough."""
    moved = values["moe_router_enable_expert_bias"] and values["moe_router_bias_update_rate"]
    if values["peft_type"] and values["num_moe_experts"] and moved:
        reason = (
            "a model does not change while its adapters are trained (peft_type: lora), nor do the "
            "biases by which its experts are chosen"
        )
        yield Fallback("moe_router_bias_update_rate", 0.0, reason)
