"""Rules of activations in host memory. No torch.

Either whole layers are offloaded (``cpu_offloading_num_layers``), or what single modules of all
layers keep (``fine_grained_activation_offloading``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flagscale.config.arguments.rules.optimizer import CUDA_GRAPH, captures_steps
from flagscale.config.arguments.spec.argument import Values, Violation

FINE_GRAINED = "fine_grained_activation_offloading"
LAYERS, MODULES = "cpu_offloading_num_layers", "offload_modules"
_EXPERT_MODULES = ("expert_fc1", "moe_act")


def offloads_activations(values: Values) -> bool:
    """Return whether activations are in host memory between the passes."""
    return bool(values[LAYERS] or values[FINE_GRAINED])


def check_activation_offload(values: Values) -> Iterator[Violation]:
    """Check the offload of activations."""
    layers = values[LAYERS]
    if values["cpu_offloading"] and not layers:
        yield LAYERS, "is required by cpu_offloading: true; expected a number of layers, 1 or more"
    if values["cpu_offloading_weights"]:
        yield (
            "cpu_offloading_weights",
            "is not supported: weights stay on the device; leave it out",
        )
    if not offloads_activations(values):
        return
    if layers and not values["cpu_offloading_activations"]:
        yield (
            "cpu_offloading_activations",
            f"false leaves nothing to offload; leave it out, or {LAYERS}",
        )
    if layers and not 0 < layers < values["num_layers"]:
        yield (
            LAYERS,
            f"expected fewer than num_layers {values['num_layers']}, because the last layer is "
            f"needed at once; found {layers}",
        )
    if layers and values[FINE_GRAINED]:
        yield FINE_GRAINED, f"cannot be combined with {LAYERS}; leave one out"
    granularity = values["recompute_granularity"]
    name = LAYERS if layers else FINE_GRAINED
    if granularity not in (None, "selective"):
        yield (
            name,
            f"is not supported with recompute_granularity: {granularity}, which keeps the inputs "
            "of layers only; use selective",
        )
    if captures_steps(values):
        yield name, f"is not supported with {CUDA_GRAPH}: {values[CUDA_GRAPH]}; leave one out"
    if values[FINE_GRAINED]:
        yield from _check_modules(values)


def check_offloaded_chunks(values: Values, layers: Sequence[int] | None) -> Iterator[Violation]:
    """Check that each model chunk has a layer that stays on the device.

    Args:
        values: arguments by name.
        layers: number of layers of each model chunk; None if unknown.
    """
    counts = [count for count in layers or () if count]
    if not counts or not offloads_activations(values):
        return
    if values[LAYERS] and values[LAYERS] >= min(counts):
        yield (
            LAYERS,
            f"{values[LAYERS]} layers of each pipeline stage (or virtual stage) must be fewer than "
            f"its {min(counts)} layers, because the last one is needed at once",
        )
    if values[FINE_GRAINED] and max(counts) == 1:
        yield (
            FINE_GRAINED,
            "requires more than one layer in a pipeline stage (or virtual stage), because the last "
            "one is not offloaded",
        )


def _check_modules(values: Values) -> Iterator[Violation]:
    modules = values[MODULES] or ()
    if not modules:
        yield MODULES, f"is required by {FINE_GRAINED}: true; expected names of modules"
    if "attn_proj" in modules and "core_attn" not in modules:
        yield (
            MODULES,
            "attn_proj requires core_attn, which keeps the same tensor; add core_attn",
        )
    for name in _EXPERT_MODULES:
        if name in modules and not values["moe_grouped_gemm"]:
            yield MODULES, f"{name} requires moe_grouped_gemm; leave it out"
    if values["transformer_impl"] == "compiled":
        yield (
            FINE_GRAINED,
            "is not supported with transformer_impl: compiled, whose layers are one graph each; "
            f"use {LAYERS}, or transformer_impl: local",
        )
