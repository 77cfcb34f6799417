"""How much arithmetic a training step is.

The count is of the model's own floating-point operations: two for each multiply-add, the backward
pass as twice the forward pass, recomputation not counted, and of causal attention only the half
that is needed. So model FLOPs utilisation (MFU; Chowdhery et al., "PaLM", 2022, appendix B) says
how much of the hardware does work that the model asks for.
"""

from __future__ import annotations

from typing import Any


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
