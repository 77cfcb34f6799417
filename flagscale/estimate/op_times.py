"""What passes ask of a rank's device, and how long that takes it.

A device is as long at a pass as its matrix products, attention, what the compiled rest moves
through memory, and the beginning and end of its kernels take, one after another; or as long as the
host takes to launch them, where that is longer. What of a device's peaks is reached was measured
with layers of Llama-3-8B, Mixtral, Qwen3 and a small model on H200s; how near the sum comes to each
of these runs is in docs/performance.md.

``args`` are a rank's resolved arguments, with its own parallel sizes, throughout.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from flagscale.config.arguments.graphs import captures_steps
from flagscale.estimate import arithmetic, attention, memory, weights
from flagscale.estimate.arithmetic import Layer
from flagscale.estimate.memory import Held

_PRODUCTS, _EIGHT, _BLOCKS, _FUSED, _FLASH, _BANDWIDTH = 0.70, 0.66, 0.55, 0.37, 0.20, 0.81
"""Shares of a device's peaks that are reached: by products of 16 and of 8 bits, whose peak is twice
as high, and by those that are scaled by blocks (reckoned, there is no such row); by cuDNN's and by
flash attention; and of the bandwidth."""
_KERNEL, _LAUNCH = 4.5e-6, 75e-6
"""Seconds in which a kernel begins and ends, and in which the host launches one. The latter is of
the slow hosts of the machines that all this was measured on."""
_LINK = 175e9
"""Bytes a second that a rank gets from its tensor-parallel peers, over NVLink by NCCL."""
_BALANCE = 989e12 / 4.8e12
"""Operations for each byte of bandwidth of an H200, where a device's bandwidth is not known."""

_FORWARD = 1 / 3
"""Of what both passes move and launch, the forward pass's."""
_OF_HIDDEN, _OF_HEADS, _OF_EXPERTS, _OF_LOGITS = 50, 9, 28, 5
"""How often, over both passes, what is compiled reads or writes a number of a layer's hidden state
(norms, residuals, copies); of queries, keys and values (rotary positions), once more where there
are norms over them; of what goes to an expert and back; of the logits."""
_OF_INWARD = {1: 5, 2: 8}
"""The same for an MLP's width, by how many times that its inward product is wide."""
_EXCHANGES = (4, 3)
"""How often a layer's passes wait for parts of the hidden state of tensor-parallel ranks. A fourth
of the backward pass is on its way beside a product."""
_CAST = 12
"""Bytes moved for each number that is cast for 8-bit products."""
_EAGER, _EAGER_LOGITS = 2.5, 15
"""As many times as much is moved where layers are not compiled; and the same of the logits."""
_ADDED, _STEPPED, _ZEROED = 10, 40, 4
"""Bytes moved for each weight: whose gradient is added to the fp32 sum by a kernel of its own; by
clipping and the optimizer; by setting its gradient to zero."""
_LAUNCHES, _EIGHT_LAUNCHES, _EXPERT_LAUNCHES, _HEAD_LAUNCHES, _STEP_LAUNCHES = 30, 16, 30, 15, 100


@dataclass(frozen=True)
class Chip:
    """A device: operations of dense 16-bit products a second, bytes of its memory a second where
    they are known."""

    peak: float
    bandwidth: float | None = None


@dataclass(frozen=True)
class Load:
    """What something asks of a rank: operations of products of 16 and 8 bits and of attention, each
    as at a device's 16-bit peak; bytes moved; kernels, and those of them that the host launches one
    by one; bytes that other ranks send while nothing else is done."""

    products: float = 0.0
    eight: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    launches: float = 0.0
    exchanged: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: float) -> Load:
        return Load(*(count * value for value in astuple(self)))

    def seconds(self, chip: Chip) -> float:
        """How long it takes a rank of such a device."""
        arithmetic = (self.products + self.eight + self.attention) / chip.peak
        moved = self.moved / (_BANDWIDTH * (chip.bandwidth or chip.peak / _BALANCE))
        waited = self.kernels * _KERNEL + self.exchanged / _LINK
        return max(arithmetic + moved + waited, self.launches * _LAUNCH)


@dataclass(frozen=True)
class Both:
    """A part's forward and backward pass of a micro-batch."""

    forward: Load = Load()
    backward: Load = Load()

    def __add__(self, other: Both) -> Both:
        return Both(self.forward + other.forward, self.backward + other.backward)


def layer(args: Any, one: Layer) -> Both:
    """A layer's passes."""
    tokens, tp = memory.tokens_of(args), args.tensor_model_parallel_size
    share = tokens / tp
    products = share * arithmetic.product_flops(args, mixture=one.mixture)
    eight = 2.0 * tokens * weights.linear(args, mixture=one.mixture) if one.eight else 0.0
    attended = share * arithmetic.attention_flops(args, one.window)
    forward = Load(*_products(args, products - eight, eight), attended / _attention_share(args))
    backward = Load(*_backward(args, products - eight, eight), 2 * forward.attention)
    moved = memory.width_of(args) * share * _numbers(args, one)
    if one.eight:
        moved += _CAST * share * _cast(args, mixture=one.mixture)
    moved *= 1.0 if memory.compiles(args) else _EAGER
    kernels = _LAUNCHES + _EIGHT_LAUNCHES * one.eight + _EXPERT_LAUNCHES * one.mixture
    experts = weights.layer(args, mixture=one.mixture).experts
    read = memory.width_of(args) * experts
    return (
        Both(forward, backward)
        + Both(*(Load(exchanged=count * _part(args, one)) for count in _EXCHANGES))
        + Both(
            _rest(args, _FORWARD * moved + read, _FORWARD * kernels),
            _rest(args, (1 - _FORWARD) * moved + 2 * read + _added(args, one), kernels * 2 / 3),
        )
    )


def _part(args: Any, one: Layer) -> float:
    """Bytes that a rank gets when the hidden state is gathered, or a sum of it is shared out: an
    MLP's exchanges are half of a layer's. Nothing where products hide it, which those of 8-bit
    numbers do not."""
    peers = args.tensor_model_parallel_size - 1
    if args.tp_comm_overlap and args.sequence_parallel and not args.fp8:
        return 0.0
    tokens = memory.tokens_of(args) / args.tensor_model_parallel_size
    whole = tokens * args.hidden_size * memory.width_of(args) * peers
    return float(whole * (0.5 if one.mixture else 1))


def head(args: Any, vocabulary: int) -> Both:
    """The passes of the output layer and the loss."""
    tokens, tp = memory.tokens_of(args), args.tensor_model_parallel_size
    products = tokens / tp * arithmetic.head_flops(args, vocabulary)
    often = _OF_LOGITS if memory.compiles(args) else _EAGER_LOGITS
    moved = tokens * vocabulary / tp * often * memory.width_of(args)
    return Both(
        Load(*_products(args, products, 0)) + _rest(args, _FORWARD * moved, _HEAD_LAUNCHES / 3),
        Load(*_backward(args, products, 0))
        + _rest(args, (1 - _FORWARD) * moved, _HEAD_LAUNCHES * 2 / 3),
    )


def further(args: Any, vocabulary: int) -> Both:
    """The passes of the layers that predict further tokens, each with its join and its head."""
    tokens, tp = memory.tokens_of(args), args.tensor_model_parallel_size
    joins = 2.0 * arithmetic.further_weights(args) * tokens / tp
    join = Both(Load(*_products(args, joins, 0)), Load(*_backward(args, joins, 0)))
    own = layer(args, arithmetic.layers(args)[-1]) + join + head(args, vocabulary)
    return sum([own] * arithmetic.further(args), Both())


def after(args: Any, vocabulary: int, held: Held) -> Load:
    """What follows the passes, once a step: the optimizer on this rank's share of the weights."""
    counted = memory.trained_of(args, vocabulary, held)
    moved = _STEPPED * memory.stepped(args, counted) + _ZEROED * counted.all
    return Load(moved=moved, kernels=_STEP_LAUNCHES, launches=_STEP_LAUNCHES)


def _rest(args: Any, moved: float, kernels: float) -> Load:
    """What is no arithmetic. A step that is captured is launched as one."""
    captured = captures_steps(vars(args))
    return Load(moved=moved, kernels=kernels, launches=0.0 if captured else kernels)


def _products(args: Any, plain: float, eight: float) -> tuple[float, float]:
    blocks = args.fp8_recipe == "blockwise"
    return plain / _PRODUCTS, eight / 2 / (_BLOCKS if blocks else _EIGHT)


def _backward(args: Any, plain: float, eight: float) -> tuple[float, float]:
    """Gradients of inputs, and of weights that are not frozen, in 16 bits if that is asked for."""
    if args.peft_type:
        return _products(args, plain, eight)
    if not args.fp8_wgrad:
        return _products(args, 2 * plain + eight, eight)
    return _products(args, 2 * plain, 2 * eight)


def _attention_share(args: Any) -> float:
    """cuDNN's attention where the model may have it, else flash attention."""
    flash = (
        not memory.compiles(args)
        or getattr(args.attention_backend, "name", args.attention_backend) == "flash"
        or args.context_parallel_size > 1
        or args.attention_dropout
    )
    return _FLASH if flash else _FUSED


def _numbers(args: Any, one: Layer) -> float:
    """Numbers that what is compiled moves for a token."""
    hidden, wide = args.hidden_size, args.ffn_hidden_size or 4 * args.hidden_size
    asked = attention.scored(args) / 2
    heads = asked + attention.keys_and_values(args)
    if args.qk_layernorm:
        heads += asked + attention.keys_and_values(args) / 2
    whole = _OF_HIDDEN * (args.tensor_model_parallel_size if not args.sequence_parallel else 1)
    found = whole * hidden + _OF_HEADS * heads
    each = _OF_INWARD[memory.inward(args)]
    if not one.mixture:
        return float(found + each * wide)
    chosen = _OF_EXPERTS * hidden + each * (args.moe_ffn_hidden_size or wide)
    beside = args.moe_shared_expert_intermediate_size or 0
    return float(found + args.moe_router_topk * chosen + each * beside)


def _cast(args: Any, *, mixture: bool) -> float:
    """Numbers into and out of a layer's linear products for a token."""
    hidden, wide = args.hidden_size, args.ffn_hidden_size or 4 * args.hidden_size
    asked = attention.scored(args) / 2
    inner = 2 * hidden + 2 * asked + attention.keys_and_values(args)
    if mixture:
        wide = args.moe_shared_expert_intermediate_size or 0
    return float(inner + (2 * hidden + (memory.inward(args) + 1) * wide if wide else 0))


def _added(args: Any, one: Layer) -> float:
    """Bytes by which gradients are added where no product does that itself."""
    counted = weights.layer(args, mixture=one.mixture)
    if args.peft_type:
        return 0.0
    alone = (one.eight and args.fp8_wgrad) or not memory.compiles(args)
    return float(_ADDED * (counted.experts + counted.shared * alone))
