"""How much arithmetic a training step is, and how much a device can do.

The count is of the model's own floating-point operations: two for each multiply-add, the backward
pass as twice the forward pass, recomputation not counted, and of causal attention only the half
that is needed. So model FLOPs utilisation (MFU; Chowdhery et al., "PaLM", 2022, appendix B) says
how much of the hardware does work that the model asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Peak dense 16-bit TFLOP/s with fp32 accumulation, from the makers' data sheets, by a part of the
# device's name. The first that matches counts.
PEAK_TFLOPS: Mapping[str, float] = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
}


def peak_tflops(device_name: str, *, sixteen_bit: bool) -> float | None:
    """Peak TFLOP/s of a device, None where it is not known or training is not in 16 bits."""
    if not sixteen_bit:
        return None
    for part, peak in PEAK_TFLOPS.items():
        if part in device_name:
            return peak
    return None


def flops_per_token(args: Any, vocabulary: int) -> float:
    """Floating-point operations of training one token, forward and backward, over all ranks.

    6 operations a weight of each matrix that a token meets (the output layer included, the
    embedding's lookup not), and 6 x sequence x attention width a layer for causal attention:
    QK^T and AV are 2 x 2 x sequence x width forward, halved by the mask, tripled by the backward.

    ``args`` are the resolved training arguments; ``vocabulary`` is the padded vocabulary.
    """
    hidden: int = args.hidden_size
    head: int = args.kv_channels or hidden // args.num_attention_heads
    width: int = head * args.num_attention_heads
    groups: int = args.num_query_groups or args.num_attention_heads
    attention = hidden * (width + 2 * head * groups) + width * hidden
    weights: float = args.num_layers * attention + _mlp_weights(args) + hidden * vocabulary
    return 6.0 * weights + 6.0 * int(args.num_layers) * int(args.seq_length) * width


def _mlp_weights(args: Any) -> float:
    """Weights of all MLPs that one token meets: of a mixture, the chosen experts and the router."""
    hidden = args.hidden_size
    matrices = 3 if args.swiglu or args.gated_linear_unit else 2
    dense = matrices * hidden * (args.ffn_hidden_size or 4 * hidden)
    mixtures = mixture_layers(args)
    if not mixtures:
        return float(args.num_layers * dense)
    experts = args.moe_router_topk * (args.moe_ffn_hidden_size or args.ffn_hidden_size)
    shared = args.moe_shared_expert_intermediate_size or 0
    mixture = matrices * hidden * (experts + shared) + hidden * args.num_moe_experts
    return float(mixtures * mixture + (args.num_layers - mixtures) * dense)


def mixture_layers(args: Any) -> int:
    """How many layers are mixtures: every ``moe_layer_freq``-th, or a list of ones and zeros."""
    if not args.num_moe_experts:
        return 0
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return len(range(0, args.num_layers, frequency))
    return sum(int(layer) for layer in frequency)
