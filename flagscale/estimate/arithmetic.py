"""How much arithmetic a training step is.

The count is of the model's own floating-point operations: two for each multiply-add, the backward
pass as twice the forward pass, recomputation not counted, and of causal attention only the half
that is needed. So model FLOPs utilisation (MFU; Chowdhery et al., "PaLM", 2022, appendix B) says
how much of the hardware does work that the model asks for.

``args`` are resolved training arguments throughout, of a family that is known to be a stack of
transformer layers (:func:`transformer`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from flagscale.config.arguments.families import Transformer, family
from flagscale.errors import ConfigError
from flagscale.estimate.attention import projections, scored

_FORWARD, _OF_INPUTS, _OF_WEIGHTS = 1.0, 1.0, 1.0
"""Products of the forward pass, and of the backward pass: gradients of inputs, of weights."""


def transformer(args: Any) -> Transformer:
    """What the family of ``args`` is as a transformer.

    Raises:
        ConfigError: it is none that anybody has described.
    """
    own = family(args.family)
    if own.transformer is None:
        raise ConfigError(
            f"family: {args.family}: it does not say what its layers are, so neither its "
            "arithmetic nor its memory can be estimated"
        )
    return own.transformer


def flops_per_token(args: Any, vocabulary: int) -> float:
    """Floating-point operations of training one token, forward and backward, over all ranks.

    6 operations a weight of each matrix that a token meets (the output layer included, the
    embedding's lookup not), and 6 x sequence x attention width a layer for causal attention:
    QK^T and AV are 2 x 2 x sequence x width forward, halved by the mask, tripled by the backward.
    Where each token attends to all of its sequence it is 12 x. A layer with a window of w tokens
    before each has w + 1 - w (w + 1) / 2 sequence of them on average where others have half the
    sequence. Documents that are kept apart are not counted.

    Of frozen matrices (``peft_type``) the backward pass has no gradient of the weights; what
    adapters take is not counted. Layers that predict further tokens count with a head each.

    ``vocabulary`` is the padded vocabulary.
    """
    forward = sum(_layers(args)) + head_flops(args, vocabulary) + further_flops(args, vocabulary)
    return training(args) * forward


def training(args: Any) -> float:
    """What training takes of the forward pass: itself and the backward pass, which has no weights
    to differentiate by in attention, but two factors."""
    every = _FORWARD + _OF_INPUTS + _OF_WEIGHTS
    if not args.peft_type:
        return every
    attention = sum(attention_flops(args, window) for window in windows(args))
    return _FORWARD + _OF_INPUTS + attention / sum(_layers(args)) * _OF_WEIGHTS


class Layer(NamedTuple):
    """What sets layers of a model apart. ``window``: how many tokens before it a token attends to,
    None without one; ``eight``: its products, but for experts', take 8-bit numbers."""

    mixture: bool
    window: int | None = None
    eight: bool = False


def layers(args: Any) -> tuple[Layer, ...]:
    """Of each layer, in order."""
    each = zip(mixtures(args), windows(args), _in_eight_bits(args), strict=True)
    return tuple(Layer(*one) for one in each)


def _in_eight_bits(args: Any) -> list[bool]:
    if not args.fp8:
        return [False] * args.num_layers
    first, last = 0, args.num_layers
    if args.first_last_layers_bf16:
        first, last = args.num_layers_at_start_in_bf16, last - args.num_layers_at_end_in_bf16
    return [first <= number < last for number in range(args.num_layers)]


def _layers(args: Any) -> list[float]:
    """Operations of one token's forward pass through each layer, over all ranks."""
    each = zip(mixtures(args), windows(args), strict=True)
    return [layer_flops(args, Layer(mixture, window)) for mixture, window in each]


def layer_flops(args: Any, layer: Layer) -> float:
    """Operations of one token's forward pass through a layer, over all ranks."""
    return product_flops(args, mixture=layer.mixture) + attention_flops(args, layer.window)


def product_flops(args: Any, *, mixture: bool) -> float:
    """Those of its products with weights."""
    mlp = _mixture_weights(args) if mixture else dense_weights(args)
    return float(2 * (projections(args) + mlp))


def attention_flops(args: Any, window: int | None) -> float:
    """Operations of one token's scores and what they weigh."""
    length = args.seq_length
    if window is not None and window < length:
        return float(2 * (window + 1 - window * (window + 1) / (2 * length)) * scored(args))
    attended = length * (1 if transformer(args).causal else 2)
    return float(attended * scored(args))


def windows(args: Any) -> tuple[int | None, ...]:
    """Of each layer how many tokens before it a token attends to; None without a window. With
    ``window_attn_skip_freq`` every so many-th has none, or as a list of ones and zeros says."""
    layers: int = args.num_layers
    if not args.window_size or args.window_size[0] < 0:
        return (None,) * layers
    pattern: int | Iterable[Any] | None = args.window_attn_skip_freq
    if pattern is None:
        has = [True] * layers
    elif isinstance(pattern, int):
        has = [layer % pattern != 0 for layer in range(1, layers + 1)]
    else:
        has = [bool(int(layer)) for layer in pattern]
    return tuple(args.window_size[0] if layer else None for layer in has)


def head_flops(args: Any, vocabulary: int) -> float:
    """Operations of one token's forward pass through the head, over all ranks."""
    hidden = int(args.hidden_size)
    return 2.0 * hidden * (vocabulary + transformer(args).head_layers * hidden)


def further_flops(args: Any, vocabulary: int) -> float:
    """Operations of one token's forward pass through the layers that predict further tokens, each
    with the matrix that joins what it takes, and a head, over all ranks."""
    joins = 2.0 * further_weights(args)
    each = layer_flops(args, layers(args)[-1]) + joins + head_flops(args, vocabulary)
    return further(args) * each


def further(args: Any) -> int:
    """Layers that predict further tokens; they are as the model's last one."""
    return int(args.mtp_num_layers or 0)


def further_weights(args: Any) -> int:
    """Weights of the matrix by which such a layer joins a token's embedding and its state."""
    return 2 * int(args.hidden_size) ** 2


def mlp_matrices(args: Any) -> int:
    """Matrices of an MLP: a gated one has a second one inwards."""
    return 3 if args.swiglu or args.gated_linear_unit else 2


def dense_weights(args: Any) -> int:
    """Weights of a layer's MLP that is no mixture."""
    wide = args.ffn_hidden_size or 4 * args.hidden_size
    return int(mlp_matrices(args) * args.hidden_size * wide)


def _mixture_weights(args: Any) -> float:
    """Weights of a mixture that one token meets: of the chosen experts, the shared one, the
    router."""
    experts = args.moe_router_topk * (args.moe_ffn_hidden_size or args.ffn_hidden_size)
    shared = args.moe_shared_expert_intermediate_size or 0
    met = mlp_matrices(args) * (experts + shared) + args.num_moe_experts
    return float(args.hidden_size * met)


def mixtures(args: Any) -> tuple[bool, ...]:
    """Of each layer, whether it is a mixture of experts: every ``moe_layer_freq``-th, or as a list
    of ones and zeros says."""
    layers: int = args.num_layers
    if not args.num_moe_experts:
        return (False,) * layers
    frequency: int | Iterable[Any] = args.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    return tuple(bool(int(layer)) for layer in frequency)
