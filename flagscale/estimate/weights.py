"""Number of weights that a rank holds, by part of the model.

``args`` are a rank's resolved arguments with its own parallel sizes throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.parameters import (
    EXPERT_PATH,
    list_layer_parameters,
)
from flagscale.config.arguments.rules.adapters import (
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
    dense_mlp_weights,
    expert_ffn_size,
    expert_tp,
    fc1_width_factor,
    get_transformer,
    mlp_matrix_count,
    moe_layer_flags,
    mtp_projection_weights,
)
from flagscale.estimate.attention import head_dim, projection_weights


@dataclass(frozen=True)
class WeightCount:
    """Number of weights by the group that reduces their gradients.

    ``shared`` weights are reduced over all data-parallel ranks, ``experts`` over fewer.
    """

    shared: int = 0
    experts: int = 0

    def __add__(self, other: WeightCount) -> WeightCount:
        return WeightCount(self.shared + other.shared, self.experts + other.experts)

    def __mul__(self, count: int) -> WeightCount:
        return WeightCount(self.shared * count, self.experts * count)

    @property
    def all(self) -> int:
        return self.shared + self.experts


def layer_weights(
    args: Any, *, is_moe: bool, is_counted: Callable[[str], bool] | None = None
) -> WeightCount:
    """Return the weights of a transformer layer.

    ``is_counted`` selects parameters by their names in the layer; those of experts have the number
    0 for all. None selects all.
    """
    shared = experts = 0
    for parameter in list_layer_parameters(vars(args), is_moe=is_moe):
        name = f"{EXPERT_PATH}0.{parameter.name}" if parameter.is_expert else parameter.name
        if is_counted is not None and not is_counted(name):
            continue
        if parameter.is_expert:
            local_experts = args.num_moe_experts // args.expert_model_parallel_size
            divisor = expert_tp(args) if parameter.is_split else 1
            experts += local_experts * (parameter.size // divisor)
        else:
            divisor = args.tensor_model_parallel_size if parameter.is_split else 1
            shared += parameter.size // divisor
    return WeightCount(shared, experts)


def linear_weights(args: Any, *, is_moe: bool) -> float:
    """Return a rank's weights of a layer's linear layers without experts."""
    shared_expert = (
        (args.moe_shared_expert_intermediate_size or 0) * mlp_matrix_count(args) * args.hidden_size
    )
    mlp = shared_expert if is_moe else dense_mlp_weights(args)
    return float((projection_weights(args) + mlp) / args.tensor_model_parallel_size)


def grouped_fc1_weights(args: Any) -> float:
    """Return the weights of the first matrix of a rank's experts that are multiplied together: of
    all with grouped GEMM, otherwise of one.
    """
    local_experts = args.num_moe_experts // args.expert_model_parallel_size
    columns = fc1_width_factor(args) * expert_ffn_size(args)
    weights_per_expert = columns * args.hidden_size / expert_tp(args)
    return float(weights_per_expert * (local_experts if args.moe_grouped_gemm else 1))


def adapter_weights(args: Any, targets: Collection[str], *, is_moe: bool) -> WeightCount:
    """Return the weights of a layer's low-rank adapters of the linear layers ``targets``."""
    tp, ffn_size = args.tensor_model_parallel_size, args.ffn_hidden_size or 4 * args.hidden_size
    attention = (
        _latent_dimensions(args) if args.multi_latent_attention else _attention_dimensions(args)
    )
    shared_size = args.moe_shared_expert_intermediate_size or 0 if is_moe else ffn_size
    shared = _adapter_pairs(args, targets, {**attention, **_mlp_dimensions(args, shared_size)}, tp)
    if not is_moe:
        return WeightCount(shared)
    local_experts = args.num_moe_experts // args.expert_model_parallel_size
    expert_dimensions = _mlp_dimensions(args, expert_ffn_size(args))
    return WeightCount(
        shared, local_experts * _adapter_pairs(args, targets, expert_dimensions, expert_tp(args))
    )


def _adapter_pairs(
    args: Any, targets: Collection[str], dimensions: Mapping[str, tuple[int, int]], ranks: int
) -> int:
    """Return the weights of the adapters of those ``targets`` that are in ``dimensions``.

    ``dimensions`` of a pair of matrices are the one that every rank has, and the one that is
    divided over ``ranks``.
    """
    return sum(
        int(args.lora_dim) * (replicated_size + divided_size // ranks)
        for name, (replicated_size, divided_size) in dimensions.items()
        if name in targets
    )


def _mlp_dimensions(args: Any, ffn_size: int) -> dict[str, tuple[int, int]]:
    """Return the dimensions of an MLP's adapters; none for an MLP that does not exist."""
    if not ffn_size:
        return {}
    hidden = args.hidden_size
    return {FC1: (hidden, fc1_width_factor(args) * ffn_size), FC2: (hidden, ffn_size)}


def _attention_dimensions(args: Any) -> dict[str, tuple[int, int]]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    width = head_dim(args) * heads
    keys = head_dim(args) * (args.num_query_groups or heads)
    return {QKV: (hidden, width + 2 * keys), PROJ: (hidden, width)}


def _latent_dimensions(args: Any) -> dict[str, tuple[int, int]]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    queries, keys, rope_dim = args.q_lora_rank or 0, args.kv_lora_rank, args.qk_pos_emb_head_dim
    query_width = heads * (args.qk_head_dim + rope_dim)
    return {
        Q: (hidden, query_width),
        Q_DOWN: (hidden, queries),
        Q_UP: (queries, query_width),
        KV_DOWN: (hidden, keys + rope_dim),
        KV_UP: (keys, heads * (args.qk_head_dim + args.v_head_dim)),
        PROJ: (hidden, heads * args.v_head_dim),
    }


def norm_weights(args: Any) -> int:
    """Return the weights of a norm over the hidden size."""
    return int(args.hidden_size) * _norm_vectors(args)


def _norm_vectors(args: Any) -> int:
    return 1 if args.normalization == "RMSNorm" else 2


def embedding_weights(args: Any, vocabulary_size: int) -> WeightCount:
    """Return the weights of the token embedding, or of the output layer."""
    return WeightCount(vocabulary_size // args.tensor_model_parallel_size * args.hidden_size)


def head_weights(args: Any, vocabulary_size: int) -> WeightCount:
    """Return the weights behind the last layer and its norm, without the output layer's matrix."""
    transformer_spec, hidden = get_transformer(args), args.hidden_size
    biases = vocabulary_size // args.tensor_model_parallel_size * transformer_spec.output_bias
    return WeightCount(
        transformer_spec.head_layers * (hidden * hidden + hidden + norm_weights(args)) + biases
    )


def mtp_weights(args: Any, is_counted: Callable[[str], bool] | None = None) -> WeightCount:
    """Return the weights of the multi-token prediction layers, without embedding and head.

    ``is_counted`` selects parameters by their global names; the name of the projection stands for
    it and the norms next to it. None selects all.
    """
    projections = WeightCount(
        mtp_projection_weights(args) // args.tensor_model_parallel_size + 3 * norm_weights(args)
    )
    total = WeightCount()
    for number in range(arithmetic.mtp_depth(args)):
        path = f"mtp.layers.{number}."
        total += layer_weights(
            args,
            is_moe=moe_layer_flags(args)[-1],
            is_counted=below(f"{path}transformer_layer.", is_counted),
        )
        if is_counted is None or is_counted(f"{path}eh_proj.weight"):
            total += projections
    return total


def below(prefix: str, is_counted: Callable[[str], bool] | None) -> Callable[[str], bool] | None:
    """Return the selection of parameters by their names after a prefix."""
    return None if is_counted is None else lambda name: is_counted(prefix + name)


def position_weights(args: Any) -> WeightCount:
    """Return the weights of learned position embeddings."""
    learned = args.position_embedding_type == "learned_absolute"
    return WeightCount(args.max_position_embeddings * args.hidden_size * learned)
