"""Attention's matrices and what they make, by heads or from latent numbers.

``args`` are resolved arguments throughout.
"""

from __future__ import annotations

from typing import Any

_BOUNDED = 4
"""Numbers that stay for the backward pass of each score that is bounded: the bounded one, its share
in fp32 and in the model's precision."""


def projections(args: Any) -> int:
    """Weights of a layer's projections, without biases and norms, over all ranks."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not args.multi_latent_attention:
        width = head_width(args)
        return int(hidden * 2 * width * (heads + (args.num_query_groups or heads)))
    queries, latent = args.q_lora_rank, args.kv_lora_rank
    wide = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    asked = hidden * queries + queries * wide if queries else hidden * wide
    keys = hidden * (latent + args.qk_pos_emb_head_dim)
    both = latent * heads * (args.qk_head_dim + args.v_head_dim)
    return int(asked + keys + both + heads * args.v_head_dim * hidden)


def norm_widths(args: Any) -> int:
    """Numbers that a layer's norms of queries and keys are over, which every rank has."""
    if not args.qk_layernorm:
        return 0
    if not args.multi_latent_attention:
        return 2 * head_width(args)
    return int((args.q_lora_rank or 0) + args.kv_lora_rank)


def scored(args: Any) -> int:
    """Width of all heads' queries and of all heads' values together: products a score takes."""
    heads = args.num_attention_heads
    if not args.multi_latent_attention:
        return int(2 * head_width(args) * heads)
    return int(heads * (args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim))


def kept(args: Any) -> float:
    """Numbers a token that stay for the backward pass: queries, keys, values, attention's output as
    its kernel and as the projection want it, latent numbers, where norms are over queries and keys
    what they are of, and where they are in memory all scores. Tensor parallelism divides them, but
    for latent numbers, on a rank. With context parallelism it is the whole sequence's keys and
    values."""
    tp = args.tensor_model_parallel_size
    heads = args.num_attention_heads
    own = keys_and_values(args)
    made = heads * (args.v_head_dim if args.multi_latent_attention else head_width(args))
    asked = scored(args) - made  # as wide as keys
    found = asked + own * args.context_parallel_size + 2 * made
    if args.multi_latent_attention:
        latent = 2 * ((args.q_lora_rank or 0) + args.kv_lora_rank) + args.qk_pos_emb_head_dim
        return float(found / tp + latent)
    if args.qk_layernorm:
        found += asked + own / 2
    if args.attn_logit_softcapping:
        found += _BOUNDED * heads * args.seq_length
    return float(found / tp)


def keys_and_values(args: Any) -> int:
    """Numbers of a token's keys and values, of all heads."""
    if args.multi_latent_attention:
        return scored(args)
    return int(2 * head_width(args) * (args.num_query_groups or args.num_attention_heads))


def gathered(args: Any) -> float:
    """Keys and values of the whole sequence on a rank, in numbers for each token of its own."""
    found = keys_and_values(args) * args.context_parallel_size
    return float(found / args.tensor_model_parallel_size)


def head_width(args: Any) -> int:
    """Numbers of an attention head."""
    return int(args.kv_channels or args.hidden_size // args.num_attention_heads)
