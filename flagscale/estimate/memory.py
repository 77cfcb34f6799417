"""Bytes that a rank's tensors take in training, by part.

Weights, gradients and optimizer state follow from the arguments. Activations are what layers keep
for their backward pass with fused attention, norms and gated units (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022, counts them for GPT, without fusion).
What communication libraries, CUDA's context and fragments take is not counted. What the compiler
keeps of a layer, and what exists at the moment that takes most, follow peaks of runs
(``tests/unit/estimate/test_measured.py``).

``args`` are a rank's resolved arguments, with its own parallel sizes, throughout.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

from flagscale.config.arguments.adapters import targets_of
from flagscale.estimate import attention, weights
from flagscale.estimate.arithmetic import Layer, further, layers
from flagscale.estimate.weights import Weights

FP32 = 4


@dataclass(frozen=True)
class Held:
    """What a rank holds of the model. ``layers``: its layers, chunk by chunk; ``first``, ``last``:
    it has the embedding, the head; ``under_way``: micro-batches whose backward passes are to come
    when the most are."""

    layers: tuple[Layer, ...]
    first: bool
    last: bool
    under_way: float = 1.0


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they are for. ``weights``: their copies in 8 bits too; ``moment``: what exists
    within one pass alone, the logits among it."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    moment: float

    @property
    def all(self) -> float:
        return float(sum(astuple(self)))


def of_rank(args: Any, vocabulary: int, held: Held) -> Memory:
    """What a rank takes at most.

    Args:
        args: see above.
        vocabulary: the padded vocabulary.
        held: what the rank holds.
    """
    counted = weights_of(args, vocabulary, held)
    trained = trained_of(args, vocabulary, held)
    if args.peft_type:
        counted += trained
    each = width_of(args)
    return Memory(
        counted.all * each + _copies(args, held),
        # Added up in fp32 wherever weights are of 16 bits.
        trained.all * FP32,
        _optimizer(args, trained),
        _activations(args, held),
        _moment(args, vocabulary, held),
    )


def trained_of(args: Any, vocabulary: int, held: Held) -> Weights:
    """The weights that a rank trains: adapters where there are some."""
    if targets := targets_of(vars(args)):
        return weights.adapters(args, targets) * len(held.layers)
    return weights_of(args, vocabulary, held)


def width_of(args: Any) -> int:
    """Bytes of a weight, and of an activation."""
    return 2 if args.bf16 or args.fp16 else FP32


def weights_of(args: Any, vocabulary: int, held: Held) -> Weights:
    """The weights that a rank holds."""
    counted = Weights()
    for layer in held.layers:
        counted += weights.layer(args, mixture=layer.mixture)
    if held.first:
        counted += weights.vocabulary_matrix(args, vocabulary) + weights.positions(args)
    if held.last:
        counted += Weights(weights.norm(args)) + weights.head(args, vocabulary)
        untied = bool(args.untie_embeddings_and_output_weights)
        if untied or not held.first:
            counted += weights.vocabulary_matrix(args, vocabulary)
        counted += weights.further(args)
        if further(args) and untied and not held.first:
            counted += weights.vocabulary_matrix(args, vocabulary)  # the embedding once more
    return counted


def _copies(args: Any, held: Held) -> float:
    """Bytes of weights in 8 bits, which lie in both orders that products want."""
    return 2.0 * sum(weights.linear(args, mixture=one.mixture) for one in held.layers if one.eight)


def _optimizer(args: Any, counted: Weights) -> float:
    """Moments, and fp32 weights where the model's are of 16 bits."""
    moments = 2 if args.optimizer == "adam" else int(bool(args.sgd_momentum))
    return float(FP32 * (moments + (width_of(args) < FP32)) * stepped(args, counted))


def stepped(args: Any, counted: Weights) -> float:
    """How many of the weights a rank's optimizer steps: all, or its share of them."""
    if not args.use_distributed_optimizer:
        return float(counted.all)
    replicas = args.data_parallel_size * args.context_parallel_size
    ranks = replicas * args.tensor_model_parallel_size
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    sharing = max(ranks // (expert_tp * args.expert_model_parallel_size), 1)
    return float(counted.shared / replicas + counted.experts / sharing)


def tokens_of(args: Any) -> float:
    """Tokens that a rank has of a micro-batch."""
    return float(args.micro_batch_size * args.seq_length / args.context_parallel_size)


def _activations(args: Any, held: Held) -> float:
    """Bytes that are kept for backward passes. Of recomputed layers it is the input of each, or of
    each ``recompute_num_layers``."""
    kept = [_kept(args, layer) for layer in held.layers]
    if held.last and (more := further(args)):
        kept += [_kept(args, layers(args)[-1]) + 4 * _input(args)] * more
    if args.recompute_granularity != "full":
        return held.under_way * sum(kept)
    several = max(args.recompute_num_layers or 1, 1)
    if args.recompute_method == "block":
        inputs, rest = min(several, len(kept)), sum(kept[several:])
    else:
        inputs, rest = math.ceil(len(kept) / several), 0.0
    return held.under_way * (rest + inputs * _input(args))


def _input(args: Any) -> float:
    """Bytes of a layer's input of a micro-batch."""
    sharing = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return float(tokens_of(args) * width_of(args) * args.hidden_size / sharing)


def _kept(args: Any, layer: Layer) -> float:
    """Bytes of a layer's activations of a micro-batch.

    Of each token the inputs of both norms and of what follows them, which sequence parallelism
    divides; what attention keeps, the MLP's inward product and the activation's output, which
    tensor parallelism divides; of a mixture, these last of every chosen expert, with the tokens
    that are sent to it. What 8-bit products take is cast from numbers that the compiler has made
    again: outputs of norms and of the activation do not stay.
    """
    tp = args.tensor_model_parallel_size
    norms = 6 if args.sandwich_norm else 4
    wide = args.ffn_hidden_size or 4 * args.hidden_size
    mlp = (inward(args) + (not layer.eight)) * wide / tp
    if layer.mixture:
        expert_tp = args.expert_tensor_parallel_size or tp
        wide = args.moe_ffn_hidden_size or wide
        beside = args.moe_shared_expert_intermediate_size or 0
        chosen = args.hidden_size + (inward(args) + 1) * wide
        # With expert parallelism a rank has as many tokens of others' as it sends away.
        mlp = args.moe_router_topk * chosen / max(expert_tp, 1) + (inward(args) + 1) * beside / tp
    if layer.eight:
        norms -= 1 if layer.mixture else 2
    whole = norms * args.hidden_size / (tp if args.sequence_parallel else 1)
    masks = 0.5 * 2 * args.hidden_size * (args.hidden_dropout > 0)
    return float(tokens_of(args) * width_of(args) * (whole + attention.kept(args) + mlp + masks))


def inward(args: Any) -> int:
    """How many times an MLP's width its inward product has."""
    return 2 if args.swiglu or args.gated_linear_unit else 1


def compiles(args: Any) -> bool:
    """Layers and loss are those of ``transformer_impl: compiled``, on a chip."""
    return args.transformer_impl in ("auto", "compiled") and args.device != "cpu"


def _moment(args: Any, vocabulary: int, held: Held) -> float:
    """What exists within one pass alone: on the last stage the head's backward pass, or that of one
    layer, whichever takes more; with embedding's or last layer's output and its gradient."""
    found = max([_within_layers(args, held), _at_the_head(args, vocabulary) if held.last else 0.0])
    return found + _ENDS * _input(args)


_ENDS = 3
"""Of hidden states beside layers: into and out of the last norm, and a gradient."""


def _at_the_head(args: Any, vocabulary: int) -> float:
    """Logits with what their loss takes: their own precision where it is fused, otherwise fp32
    beside it; and the gradient of the head's weight, which is as large as the weight even where it
    has been added already and nobody reads it."""
    each = width_of(args) if compiles(args) else FP32 + width_of(args)
    trained = not args.peft_type
    matrix = weights.vocabulary_matrix(args, vocabulary).all * width_of(args) * trained
    logits = tokens_of(args) * vocabulary / args.tensor_model_parallel_size * (1 + further(args))
    return float(logits * each + matrix)


def _within_layers(args: Any, held: Held) -> float:
    """Of one layer's backward pass the gradients of its inward product and of that product's
    weights, of all experts twice: as made, and as autograd gets it; the whole sequence's keys and
    values; and what is recomputed before it."""
    if not held.layers:
        return 0.0
    tokens, tp = tokens_of(args), args.tensor_model_parallel_size
    wide = inward(args) * (args.ffn_hidden_size or 4 * args.hidden_size) / tp
    mixture = any(layer.mixture for layer in held.layers)
    matrix = 2 * weights.experts_inward(args) if mixture else wide * args.hidden_size
    numbers = matrix * (not args.peft_type) + (0 if mixture else tokens * wide)
    if args.context_parallel_size > 1:
        numbers += tokens * attention.gathered(args)
    found = numbers * width_of(args)
    if args.recompute_granularity == "full":
        several = 1 if args.recompute_method == "block" else args.recompute_num_layers or 1
        found += sum(_kept(args, layer) for layer in held.layers[:several])
    return float(found)
