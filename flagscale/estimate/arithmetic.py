"""Floating-point operations (FLOP) of a training step.

Only the model's own operations are counted: two per multiply-add, the backward pass as twice the
forward pass, without recomputation, and for causal attention only the half that the mask leaves.
Therefore model FLOPs utilization (MFU; Chowdhery et al., "PaLM", 2022, appendix B) is the
fraction of the hardware's peak that is spent on operations of the model.

``args`` are resolved training arguments throughout. Their family must be described as a stack of
transformer layers, see :func:`get_transformer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from flagscale.config.arguments import parameters
from flagscale.config.arguments.rules.freezing import freezing_argument, frozen_predicate
from flagscale.config.arguments.rules.model_family import Transformer, get_model_family
from flagscale.errors import ConfigError
from flagscale.estimate.attention import projection_weights, query_and_value_width

_FORWARD_COST, _INPUT_GRADIENT_COST, _WEIGHT_GRADIENT_COST = 1.0, 1.0, 1.0
"""Relative cost of the forward pass, and in the backward pass of the gradients of inputs and of
weights.
"""


def get_transformer(args: Any) -> Transformer:
    """Return the description of the family of ``args`` as a transformer.

    Raises:
        ConfigError: the family is not described as a transformer.
    """
    family_spec = get_model_family(args.family)
    if family_spec.transformer is None:
        raise ConfigError(
            f"family: {args.family}: its layers are not described, so neither its "
            "arithmetic nor its memory can be estimated"
        )
    return family_spec.transformer


def flops_per_token(args: Any, vocabulary_size: int) -> float:
    """Return the FLOP of training one token, forward and backward, summed over all ranks.

    Each weight of a matrix that a token passes costs 6 FLOP; this includes the output layer, but
    not the embedding's lookup. Causal attention costs 6 x sequence x attention width per layer:
    QK^T and AV are 2 x 2 x sequence x width in the forward pass, halved by the mask and tripled
    by the backward pass. (Narayanan et al., "Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM", 2021, appendix; PaLM, appendix B.) Bidirectional attention
    costs twice as much. In a layer with a window of w preceding tokens, a token attends to
    w + 1 - w (w + 1) / (2 sequence) tokens on average, where causal attention has sequence / 2.
    Masks between documents are ignored.

    For frozen matrices (``peft_type``) the backward pass computes no gradient of weights; the
    adapters themselves are not counted. Frozen parameters (``freeze_parameters``)
    are treated alike. Multi-token prediction layers count with one head each.

    ``vocabulary_size`` is the padded vocabulary size.
    """
    forward = (
        sum(_flops_by_layer(args))
        + head_flops(args, vocabulary_size)
        + mtp_flops(args, vocabulary_size)
    )
    return training_factor(args) * forward - _spared_flops(args, vocabulary_size)


def _spared_flops(args: Any, vocabulary_size: int) -> float:
    """Return the FLOP of one token that frozen parameters spare: those of the gradients of frozen
    matrices, and the backward pass of all layers before the first trained parameter.
    """
    if freezing_argument(vars(args)) is None:
        return 0.0
    is_frozen, block = frozen_predicate(vars(args)), get_transformer(args).block
    spared, is_leading = 0.0, is_frozen(parameters.EMBEDDING)
    for number, kind in enumerate(list_layer_kinds(args)):
        frozen_sizes, is_whole = 0.0, True
        for parameter in parameters.list_layer_parameters(vars(args), is_moe=kind.is_moe):
            path = f"{parameters.EXPERT_PATH}0." if parameter.is_expert else ""
            if not is_frozen(f"{block}.layers.{number}.{path}{parameter.name}"):
                is_whole = False
            elif parameter.name.endswith("weight") and "norm" not in parameter.name:
                frozen_sizes += parameter.size * (
                    args.moe_router_topk if parameter.is_expert else 1
                )
        is_leading = is_leading and is_whole
        backward_flops = _INPUT_GRADIENT_COST + _WEIGHT_GRADIENT_COST
        spared += backward_flops * layer_flops(args, kind) if is_leading else 2 * frozen_sizes
    is_untied = args.untie_embeddings_and_output_weights
    if is_frozen(parameters.OUTPUT_LAYER if is_untied else parameters.EMBEDDING):
        spared += 2.0 * args.hidden_size * vocabulary_size
    return spared


def training_factor(args: Any) -> float:
    """Return the FLOP of training as a multiple of those of the forward pass.

    If weights are frozen, only attention's matrix multiplications have two gradients each, because
    neither of their operands is a weight.
    """
    full_factor = _FORWARD_COST + _INPUT_GRADIENT_COST + _WEIGHT_GRADIENT_COST
    if not args.peft_type:
        return full_factor
    attention = sum(attention_flops(args, window) for window in attention_windows(args))
    return (
        _FORWARD_COST
        + _INPUT_GRADIENT_COST
        + attention / sum(_flops_by_layer(args)) * _WEIGHT_GRADIENT_COST
    )


class LayerKind(NamedTuple):
    """Properties that distinguish layers of a model.

    ``window`` is the number of preceding tokens that a token attends to, None without a limit.
    ``is_fp8`` is True if the GEMMs of linear layers, except those of experts, use FP8.
    """

    is_moe: bool
    window: int | None = None
    is_fp8: bool = False


def list_layer_kinds(args: Any) -> tuple[LayerKind, ...]:
    """Return the kind of each layer of the model, in order."""
    return _combine_kinds(
        tuple(moe_layer_flags(args)),
        tuple(attention_windows(args)),
        tuple(_select_fp8_layers(args)),
    )


@lru_cache(maxsize=16)
def _combine_kinds(*properties: tuple[Any, ...]) -> tuple[LayerKind, ...]:
    """Return the kinds with these properties. A search asks for those of one model many times."""
    return tuple(LayerKind(*values) for values in zip(*properties, strict=True))


def _select_fp8_layers(args: Any) -> list[bool]:
    if not args.fp8:
        return [False] * args.num_layers
    first, last = 0, args.num_layers
    if args.first_last_layers_bf16:
        first, last = args.num_layers_at_start_in_bf16, last - args.num_layers_at_end_in_bf16
    return [first <= number < last for number in range(args.num_layers)]


def _flops_by_layer(args: Any) -> list[float]:
    """Return the forward FLOP of one token in each layer, summed over all ranks."""
    kinds = zip(moe_layer_flags(args), attention_windows(args), strict=True)
    return [layer_flops(args, LayerKind(is_moe, window)) for is_moe, window in kinds]


def layer_flops(args: Any, layer: LayerKind) -> float:
    """Return the forward FLOP of one token in a layer, summed over all ranks."""
    return linear_flops(args, is_moe=layer.is_moe) + attention_flops(args, layer.window)


def linear_flops(args: Any, *, is_moe: bool) -> float:
    """Return the forward FLOP of one token in the GEMMs of a layer's weights, over all ranks."""
    mlp = active_moe_weights(args) if is_moe else dense_mlp_weights(args)
    return float(2 * (projection_weights(args) + mlp))


def attention_flops(args: Any, window: int | None) -> float:
    """Return the forward FLOP of one token in a layer's QK^T and AV GEMMs, over all ranks.
    ``window`` is the number of preceding tokens that a token attends to, None without a limit.
    """
    length = args.seq_length
    if window is not None and window < length:
        return float(
            2 * (window + 1 - window * (window + 1) / (2 * length)) * query_and_value_width(args)
        )
    attended_tokens = length * (1 if get_transformer(args).causal else 2)
    return float(attended_tokens * query_and_value_width(args))


def attention_windows(args: Any) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens; None for layers without a window.

    ``window_attn_skip_freq`` n exempts every n-th layer; a list has a 1 for layers with a
    window.
    """
    layers: int = args.num_layers
    if not args.window_size or args.window_size[0] < 0:
        return (None,) * layers
    pattern: int | Iterable[Any] | None = args.window_attn_skip_freq
    if pattern is None:
        has_window = [True] * layers
    elif isinstance(pattern, int):
        has_window = [layer % pattern != 0 for layer in range(1, layers + 1)]
    else:
        has_window = [bool(int(layer)) for layer in pattern]
    return tuple(args.window_size[0] if layer else None for layer in has_window)


def head_flops(args: Any, vocabulary_size: int) -> float:
    """Return the forward FLOP of one token in the head (output layer and the layers before it that
    belong to the loss), over all ranks.
    """
    hidden = int(args.hidden_size)
    return 2.0 * hidden * (vocabulary_size + get_transformer(args).head_layers * hidden)


def mtp_flops(args: Any, vocabulary_size: int) -> float:
    """Return the forward FLOP of one token in the multi-token prediction layers, over all ranks.

    Each consists of the projection that combines embedding and hidden state, a layer, and a
    head.
    """
    projection = 2.0 * mtp_projection_weights(args)
    flops_per_depth = (
        layer_flops(args, list_layer_kinds(args)[-1])
        + projection
        + head_flops(args, vocabulary_size)
    )
    return mtp_depth(args) * flops_per_depth


def mtp_depth(args: Any) -> int:
    """Return the number of multi-token prediction layers. Each is of the same kind as the model's
    last layer.
    """
    return int(args.mtp_num_layers or 0)


def mtp_projection_weights(args: Any) -> int:
    """Return the weights of the projection that combines embedding and hidden state."""
    return 2 * int(args.hidden_size) ** 2


def mlp_matrix_count(args: Any) -> int:
    """Return the number of matrices of an MLP: 3 if it is gated, else 2."""
    return 3 if args.swiglu or args.gated_linear_unit else 2


def fc1_width_factor(args: Any) -> int:
    """Return the output width of an MLP's first linear layer as a multiple of the MLP's width."""
    return mlp_matrix_count(args) - 1


def expert_ffn_size(args: Any) -> int:
    """Return the width of an expert's MLP over all ranks."""
    return int(args.moe_ffn_hidden_size or args.ffn_hidden_size or 4 * args.hidden_size)


def expert_tp(args: Any) -> int:
    """Return the tensor-parallel size of experts."""
    return int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)


def dense_mlp_weights(args: Any) -> int:
    """Return the weights of a dense layer's MLP."""
    ffn_size = args.ffn_hidden_size or 4 * args.hidden_size
    return int(mlp_matrix_count(args) * args.hidden_size * ffn_size)


def active_moe_weights(args: Any) -> float:
    """Return the weights of a mixture of experts that one token passes: top-k experts, shared
    expert, router.
    """
    routed_width = args.moe_router_topk * expert_ffn_size(args)
    shared_width = args.moe_shared_expert_intermediate_size or 0
    columns = mlp_matrix_count(args) * (routed_width + shared_width) + args.num_moe_experts
    return float(args.hidden_size * columns)


def moe_layer_flags(args: Any) -> tuple[bool, ...]:
    """Return for each layer whether it is a mixture of experts."""
    return parameters.moe_layer_flags(vars(args))
