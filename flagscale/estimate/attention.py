"""Sizes of attention: weights and activations, for grouped-query and multi-head latent attention.

``args`` are resolved arguments throughout.
"""

from __future__ import annotations

from typing import Any

from flagscale.config.arguments.rules.context_parallel import a2a_group_size, has_ring

_RING_COPIES = 5
_SOFTCAP_ELEMENTS = 4
"""16-bit elements kept for the backward pass per softcapped score: 1 for the capped score, 2 for
its softmax in fp32, and 1 for the softmax in the precision of the model.
"""


def projection_weights(args: Any) -> int:
    """Return the weights of a layer's projections over all ranks, without biases and norms."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not args.multi_latent_attention:
        width = head_dim(args)
        return int(hidden * 2 * width * (heads + (args.num_query_groups or heads)))
    query_rank, kv_rank = args.q_lora_rank, args.kv_lora_rank
    query_width = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    query_weights = (
        hidden * query_rank + query_rank * query_width if query_rank else hidden * query_width
    )
    kv_down_weights = hidden * (kv_rank + args.qk_pos_emb_head_dim)
    kv_up_weights = kv_rank * heads * (args.qk_head_dim + args.v_head_dim)
    return int(query_weights + kv_down_weights + kv_up_weights + heads * args.v_head_dim * hidden)


def up_projection_weights(args: Any) -> int:
    """Return the weights of the up-projections of latent attention over all ranks."""
    heads, query_rank = args.num_attention_heads, args.q_lora_rank or args.hidden_size
    query_width = args.qk_head_dim + args.qk_pos_emb_head_dim
    kv_width_per_head = args.qk_head_dim + args.v_head_dim
    return int(heads * (query_rank * query_width + args.kv_lora_rank * kv_width_per_head))


def query_and_value_width(args: Any) -> int:
    """Return the elements of a token's queries and values over all heads.

    For a pair of tokens, a score takes one multiply-add per element of a query, and its product
    with the values one per element of a value. The width is therefore the number of multiply-adds
    per pair of tokens.
    """
    heads = args.num_attention_heads
    if not args.multi_latent_attention:
        return int(2 * head_dim(args) * heads)
    return int(heads * (args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim))


def activation_elements(args: Any) -> float:
    """Return the elements per token that a rank keeps for a layer's backward pass.

    These are queries, keys, values, and attention's output in the layouts of its kernel and of
    the projection; with latent attention the latent vectors, with norms of queries and keys
    their inputs, and with softcapping all scores. Tensor parallelism divides all but the latent
    vectors. With context parallelism, a rank keeps as much as it has tokens: either its own keys
    and values, or those of the whole sequence for a part of the heads.
    """
    tp = args.tensor_model_parallel_size
    kv_size = kv_width(args)
    query_size = query_and_value_width(args) - _output_width(args)  # as wide as keys
    elements = query_and_kv_elements(args) + core_elements(args, output_copies=2)
    if args.multi_latent_attention:
        latent = 2 * ((args.q_lora_rank or 0) + args.kv_lora_rank) + args.qk_pos_emb_head_dim
        return float(elements + latent)
    if args.qk_layernorm:
        elements += (query_size + kv_size / 2) / tp
    return float(elements)


def query_and_kv_elements(args: Any) -> float:
    """Return the elements per token of a rank's queries, keys and values."""
    query_size = query_and_value_width(args) - _output_width(args)
    return float((query_size + kv_width(args)) / args.tensor_model_parallel_size)


def core_elements(args: Any, *, output_copies: int) -> float:
    """Return the elements per token that a rank keeps of attention itself, after its queries, keys
    and values: ``output_copies`` of the output, and with softcapping all scores.
    """
    elements = output_copies * _output_width(args)
    if args.attn_logit_softcapping:
        elements += _SOFTCAP_ELEMENTS * args.num_attention_heads * args.seq_length
    return float(elements / args.tensor_model_parallel_size)


def _output_width(args: Any) -> int:
    """Return the elements of a token's output of attention over all heads."""
    width = args.v_head_dim if args.multi_latent_attention else head_dim(args)
    return int(args.num_attention_heads * width)


def kv_width(args: Any) -> int:
    """Return the elements of a token's keys and values over all heads."""
    if args.multi_latent_attention:
        # Each head has keys and values of its own, and keys are as wide as queries.
        return query_and_value_width(args)
    return int(2 * head_dim(args) * (args.num_query_groups or args.num_attention_heads))


def exchanged_kv_elements(args: Any) -> float:
    """Return the elements of other ranks' keys and values and of their gradients on a rank, divided
    by the tokens of the rank.

    They exist within the pass of a layer if context parallelism exchanges keys and values.
    """
    ranks = args.context_parallel_size // a2a_group_size(vars(args))
    if ranks == 1:
        return 0.0
    # Gathered ones are those of all ranks. In a ring there are two ranks' keys and values, and
    # gradients of three parts: received, computed and sent ones.
    copies = min(_RING_COPIES, 2 * ranks) if has_ring(vars(args)) else 2 * ranks
    # Ranks that exchange heads have a part of them, of as many times more tokens.
    return float(copies * kv_width(args) / args.tensor_model_parallel_size)


def head_dim(args: Any) -> int:
    """Return the size of an attention head."""
    return int(args.kv_channels or args.hidden_size // args.num_attention_heads)
