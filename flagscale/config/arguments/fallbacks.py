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


class Fallback(NamedTuple):
    """``name`` is ``value`` in place of what was given, for this ``reason``."""

    name: str
    value: Any
    reason: str


def fallbacks(values: Values) -> list[Fallback]:
    """What is replaced in arguments by name, aliases folded, defaults filled in, whether that is
    allowed or not."""
    rules = (_implementation, _format, _parallelism)
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
