"""How many weights a rank holds of each part of the model.

``args`` are a rank's resolved arguments, with its own parallel sizes, throughout.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.adapters import (
    FC1,
    FC2,
    KV_DOWN,
    KV_UP,
    PROJ,
    Q_DOWN,
    Q_UP,
    QKV,
    Q,
)
from flagscale.estimate import arithmetic
from flagscale.estimate.arithmetic import (
    dense_weights,
    further_weights,
    mixtures,
    mlp_matrices,
    transformer,
)
from flagscale.estimate.attention import head_width, norm_widths, projections


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: those whose gradients data-parallel ranks share, and experts', whose
    gradients fewer ranks share."""

    shared: int = 0
    experts: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.shared + other.shared, self.experts + other.experts)

    def __mul__(self, count: int) -> Weights:
        return Weights(self.shared * count, self.experts * count)

    @property
    def all(self) -> int:
        return self.shared + self.experts


def layer(args: Any, *, mixture: bool) -> Weights:
    """Of a transformer layer."""
    norms = 4 if args.sandwich_norm else 2
    shared = _attention(args) + norms * norm(args)
    if not mixture:
        biases = _mlp_biases(args, args.ffn_hidden_size or 4 * args.hidden_size)
        tp = args.tensor_model_parallel_size
        return Weights(shared + dense_weights(args) // tp + biases)
    hidden, experts = args.hidden_size, args.num_moe_experts
    wide = args.moe_ffn_hidden_size or args.ffn_hidden_size or 4 * hidden
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    here = experts // args.expert_model_parallel_size
    one = mlp_matrices(args) * hidden * wide // expert_tp
    if args.add_bias_linear:
        one += (mlp_matrices(args) - 1) * wide // expert_tp + hidden
    beside = args.moe_shared_expert_intermediate_size or 0
    shared += hidden * experts
    shared += mlp_matrices(args) * hidden * beside // args.tensor_model_parallel_size
    return Weights(shared, here * one)


def linear(args: Any, *, mixture: bool) -> float:
    """Of a layer's linear products on a rank, but for experts'."""
    beside = (args.moe_shared_expert_intermediate_size or 0) * mlp_matrices(args) * args.hidden_size
    mlp = beside if mixture else dense_weights(args)
    return float((projections(args) + mlp) / args.tensor_model_parallel_size)


def experts_inward(args: Any) -> float:
    """Of the inward product of all of a rank's experts, of one of them where they are computed one
    after another."""
    wide = args.moe_ffn_hidden_size or args.ffn_hidden_size or 4 * args.hidden_size
    split = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    together = args.num_moe_experts // args.expert_model_parallel_size
    one = (mlp_matrices(args) - 1) * wide * args.hidden_size / split
    return float(one * (together if args.moe_grouped_gemm else 1))


def adapters(args: Any, targets: Collection[str]) -> Weights:
    """Of a layer's low-rank adapters; ``targets`` are the linear layers that have some."""
    hidden, tp = args.hidden_size, args.tensor_model_parallel_size
    wide = args.ffn_hidden_size or 4 * hidden
    # Of each: what is whole on every rank, and what they share.
    sides = {
        **(_latent_sides(args) if args.multi_latent_attention else _sides(args)),
        FC1: (hidden, (mlp_matrices(args) - 1) * wide),
        FC2: (hidden, wide),
    }
    return Weights(
        sum(
            args.lora_dim * (whole + shared // tp)
            for name in targets
            for whole, shared in (sides[name],)
        )
    )


def _sides(args: Any) -> dict[str, tuple[int, int]]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    width = head_width(args) * heads
    keys = head_width(args) * (args.num_query_groups or heads)
    return {QKV: (hidden, width + 2 * keys), PROJ: (hidden, width)}


def _latent_sides(args: Any) -> dict[str, tuple[int, int]]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    queries, keys, turned = args.q_lora_rank or 0, args.kv_lora_rank, args.qk_pos_emb_head_dim
    asked = heads * (args.qk_head_dim + turned)
    return {
        Q: (hidden, asked),
        Q_DOWN: (hidden, queries),
        Q_UP: (queries, asked),
        KV_DOWN: (hidden, keys + turned),
        KV_UP: (keys, heads * (args.qk_head_dim + args.v_head_dim)),
        PROJ: (hidden, heads * args.v_head_dim),
    }


def _attention(args: Any) -> int:
    tp, hidden = args.tensor_model_parallel_size, args.hidden_size
    width = head_width(args) * args.num_attention_heads
    inward = width + 2 * head_width(args) * (args.num_query_groups or args.num_attention_heads)
    count = projections(args) // tp
    if args.add_bias_linear:
        count += inward // tp + hidden
    elif args.add_qkv_bias:
        count += inward // tp
    return int(count + norm_widths(args) * _norm_vectors(args))


def _mlp_biases(args: Any, wide: int) -> int:
    if not args.add_bias_linear:
        return 0
    inward = (mlp_matrices(args) - 1) * wide // args.tensor_model_parallel_size
    return int(inward + args.hidden_size)


def norm(args: Any) -> int:
    """Of a norm over the hidden size."""
    return int(args.hidden_size) * _norm_vectors(args)


def _norm_vectors(args: Any) -> int:
    return 1 if args.normalization == "RMSNorm" else 2


def vocabulary_matrix(args: Any, vocabulary: int) -> Weights:
    """Of the embedding of tokens, or of the output layer."""
    return Weights(vocabulary // args.tensor_model_parallel_size * args.hidden_size)


def head(args: Any, vocabulary: int) -> Weights:
    """Behind the last layer and its norm, but for the matrix of the output layer."""
    shape, hidden = transformer(args), args.hidden_size
    biases = vocabulary // args.tensor_model_parallel_size * shape.output_bias
    return Weights(shape.head_layers * (hidden * hidden + hidden + norm(args)) + biases)


def further(args: Any) -> Weights:
    """Of the layers that predict further tokens, but for the embedding and the head."""
    joins = Weights(further_weights(args) // args.tensor_model_parallel_size + 3 * norm(args))
    return (layer(args, mixture=mixtures(args)[-1]) + joins) * arithmetic.further(args)


def positions(args: Any) -> Weights:
    """Of learned positions, beside the embedding."""
    learned = args.position_embedding_type == "learned_absolute"
    return Weights(args.max_position_embeddings * args.hidden_size * learned)
