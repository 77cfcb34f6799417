"""Activations that recomputation of single modules (``recompute_modules``) discards.

``args`` are a rank's resolved arguments with its own parallel sizes throughout.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flagscale.estimate import attention
from flagscale.estimate.arithmetic import (
    LayerKind,
    expert_ffn_size,
    expert_tp,
    fc1_width_factor,
)


def mlp_elements(args: Any, layer: LayerKind) -> float:
    """Return the elements per token that a rank keeps of a layer's MLP or mixture of experts.

    These are the outputs of the first linear layer and of the activation function, which tensor
    parallelism divides; in a mixture of experts those of every selected expert with the dispatched
    token, and those of the shared expert.
    """
    if layer.is_moe:
        dispatched = args.moe_router_topk * args.hidden_size / expert_tp(args)
        return float(
            dispatched
            + (fc1_width_factor(args) + 1) * _expert_activations(args)
            + _shared_expert_elements(args)
        )
    ffn_size = args.ffn_hidden_size or 4 * args.hidden_size
    kept_outputs = fc1_width_factor(args) + (not layer.is_fp8)
    return float(kept_outputs * ffn_size / args.tensor_model_parallel_size)


def norm_outputs(layer: LayerKind) -> int:
    """Return how many of the outputs of a layer's two norms are kept.

    Inputs of FP8 GEMMs are recomputed and cast by the compiler, so such outputs are not.
    """
    if not layer.is_fp8:
        return 2
    return 1 if layer.is_moe else 0


def discarded_elements(
    args: Any, layer: LayerKind, modules: Collection[str], *, is_compiled: bool
) -> float:
    """Return the elements per token that a rank does not keep if ``modules`` are recomputed.

    In compiled layers the output of attention is discarded in both layouts, that of the kernel and
    that of the projection. In other layers the projection keeps its own.
    """
    tp = args.tensor_model_parallel_size
    elements = 0.0
    if "layernorm" in modules:
        width = args.hidden_size / (tp if args.sequence_parallel else 1)
        elements += norm_outputs(layer) * width
    if "mla_up_proj" in modules:
        elements += attention.query_and_kv_elements(args)
    # In a compiled graph, queries and keys that are recomputed cannot be the inputs that a
    # recomputed attention keeps.
    if "core_attn" in modules and not (is_compiled and "mla_up_proj" in modules):
        elements += attention.core_elements(args, output_copies=2 if is_compiled else 1)
    if not layer.is_moe:
        return elements + mlp_elements(args, layer) * ("mlp" in modules)
    if "moe" in modules:
        return elements + mlp_elements(args, layer)
    if "moe_act" in modules:
        elements += _expert_activations(args)
    if "shared_experts" in modules:
        elements += _shared_expert_elements(args)
    return elements


def candidate_modules(args: Any, layers: Collection[LayerKind]) -> list[str]:
    """Return the modules of layers that are worth a comparison with whole layers.

    A fused kernel of attention keeps little that its recomputation would save.
    """
    modules = ["layernorm"]
    if args.attn_logit_softcapping:
        modules.append("core_attn")
    if args.multi_latent_attention:
        modules.append("mla_up_proj")
    if any(not layer.is_moe for layer in layers):
        modules.append("mlp")
    if any(layer.is_moe for layer in layers):
        if args.moe_grouped_gemm:
            modules.append("moe_act")
        if args.moe_shared_expert_intermediate_size and not args.moe_shared_expert_overlap:
            modules.append("shared_experts")
    return modules


def _expert_activations(args: Any) -> float:
    """Return the elements per token of the activation functions' outputs of selected experts."""
    return float(args.moe_router_topk * expert_ffn_size(args) / expert_tp(args))


def _shared_expert_elements(args: Any) -> float:
    width = args.moe_shared_expert_intermediate_size or 0
    return float((fc1_width_factor(args) + 1) * width / args.tensor_model_parallel_size)
