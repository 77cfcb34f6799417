"""Activations that are in host memory between the passes of their layer.

``args`` are a rank's resolved arguments with its own parallel sizes throughout.
"""

from __future__ import annotations

from typing import Any

from flagscale.estimate import attention, module_recompute
from flagscale.estimate.arithmetic import (
    LayerKind,
    expert_ffn_size,
    expert_tp,
    fc1_width_factor,
)


def offloaded_layers(args: Any, layers: int) -> int:
    """Return the number of layers of a chunk, from the first one, whose activations are offloaded.

    The last layer's are not, because its backward pass comes first.
    """
    count = layers if args.fine_grained_activation_offloading else args.cpu_offloading_num_layers
    return max(min(int(count), layers - 1), 0)


def offloaded_elements(args: Any, layer: LayerKind, kept_elements: float) -> float:
    """Return the elements per token of a layer that are offloaded, of those that a rank keeps.

    ``offload_modules`` offload their own activations only.
    """
    if not args.fine_grained_activation_offloading:
        return kept_elements
    modules, tp = args.offload_modules, args.tensor_model_parallel_size
    hidden = args.hidden_size / (tp if args.sequence_parallel else 1)
    outputs = module_recompute.norm_outputs(layer)
    output_copies = ("core_attn" in modules) + ("attn_proj" in modules)
    elements = hidden * (("attn_norm" in modules) + ("mlp_norm" in modules))
    elements += hidden * ("qkv_linear" in modules and outputs == 2)
    if output_copies:
        elements += attention.query_and_kv_elements(args)
        elements += attention.core_elements(args, output_copies=output_copies)
    if layer.is_moe:
        widths = args.hidden_size * ("expert_fc1" in modules)
        widths += fc1_width_factor(args) * expert_ffn_size(args) * ("moe_act" in modules)
        elements += args.moe_router_topk * widths / expert_tp(args)
    return float(min(elements, kept_elements))
