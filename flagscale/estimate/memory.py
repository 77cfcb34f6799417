"""Bytes that a rank's tensors take in training, by part.

Weights, gradients and optimizer state follow from the arguments. Activations are what layers keep
for their backward pass with fused attention, norms and gated units (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022, counts them for GPT, without fusion).
What communication libraries, CUDA's context and fragments take is not counted.

``args`` are a rank's resolved arguments, with its own parallel sizes, throughout.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

from flagscale.config.arguments.adapters import targets_of
from flagscale.estimate import attention, weights
from flagscale.estimate.weights import Weights

FP32 = 4


@dataclass(frozen=True)
class Held:
    """What a rank holds of the model. ``layers``: whether each of its layers is a mixture, chunk by
    chunk; ``first``, ``last``: it has the embedding, the head; ``under_way``: micro-batches whose
    backward passes are to come when the most are."""

    layers: tuple[bool, ...]
    first: bool
    last: bool
    under_way: float = 1.0


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they are for. ``moment``: what exists within one pass alone, the logits among
    it."""

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
    trained = counted
    if targets := targets_of(vars(args)):
        trained = weights.adapters(args, targets) * len(held.layers)
        counted += trained
    each = width_of(args)
    return Memory(
        counted.all * each,
        # Added up in fp32 wherever weights are of 16 bits.
        trained.all * FP32,
        _optimizer(args, trained),
        _activations(args, held),
        _moment(args, vocabulary, held),
    )


def width_of(args: Any) -> int:
    """Bytes of a weight, and of an activation."""
    return 2 if args.bf16 or args.fp16 else FP32


def weights_of(args: Any, vocabulary: int, held: Held) -> Weights:
    """The weights that a rank holds."""
    counted = Weights()
    for mixture in held.layers:
        counted += weights.layer(args, mixture=mixture)
    if held.first:
        counted += weights.vocabulary_matrix(args, vocabulary) + weights.positions(args)
    if held.last:
        counted += Weights(weights.norm(args)) + weights.head(args, vocabulary)
        if args.untie_embeddings_and_output_weights or not held.first:
            counted += weights.vocabulary_matrix(args, vocabulary)
    return counted


def _optimizer(args: Any, counted: Weights) -> float:
    """Moments, and fp32 weights where the model's are of 16 bits, of all weights or of this rank's
    share of them."""
    moments = 2 if args.optimizer == "adam" else int(bool(args.sgd_momentum))
    each = FP32 * (moments + (width_of(args) < FP32))
    if not args.use_distributed_optimizer:
        return float(each * counted.all)
    replicas = args.data_parallel_size * args.context_parallel_size
    ranks = replicas * args.tensor_model_parallel_size
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    sharing = max(ranks // (expert_tp * args.expert_model_parallel_size), 1)
    return float(each * (counted.shared / replicas + counted.experts / sharing))


def tokens_of(args: Any) -> float:
    """Tokens that a rank has of a micro-batch."""
    return float(args.micro_batch_size * args.seq_length / args.context_parallel_size)


def _activations(args: Any, held: Held) -> float:
    """Bytes that are kept for backward passes. Of recomputed layers it is the input of each, or of
    each ``recompute_num_layers``."""
    kept = [_kept(args, mixture=mixture) for mixture in held.layers]
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


def _kept(args: Any, *, mixture: bool) -> float:
    """Bytes of a layer's activations of a micro-batch.

    Of each token the inputs of both norms and of what follows them, which sequence parallelism
    divides; queries, keys, values, the attention's output, the MLP's inward product and the
    activation's output, which tensor parallelism divides; of a mixture, these last of every chosen
    expert, with the tokens that are sent to it.
    """
    tp = args.tensor_model_parallel_size
    norms = 6 if args.sandwich_norm else 4
    whole = norms * args.hidden_size / (tp if args.sequence_parallel else 1)
    mlp = _mlp(args, args.ffn_hidden_size or 4 * args.hidden_size) / tp
    if mixture:
        expert_tp = args.expert_tensor_parallel_size or tp
        wide = args.moe_ffn_hidden_size or args.ffn_hidden_size or 4 * args.hidden_size
        beside = args.moe_shared_expert_intermediate_size or 0
        chosen = args.hidden_size + _mlp(args, wide)
        # With expert parallelism a rank has as many tokens of others' as it sends away.
        mlp = args.moe_router_topk * chosen / max(expert_tp, 1) + _mlp(args, beside) / tp
    masks = 0.5 * 2 * args.hidden_size * (args.hidden_dropout > 0)
    return float(tokens_of(args) * width_of(args) * (whole + attention.kept(args) + mlp + masks))


def _mlp(args: Any, wide: int) -> float:
    inward = 2 if args.swiglu or args.gated_linear_unit else 1
    return float((inward + 1) * wide)


def _moment(args: Any, vocabulary: int, held: Held) -> float:
    """Of one layer's backward pass the gradients, and what it recomputes; on the last stage the
    logits with what their loss takes: their own precision where it is fused, otherwise fp32 beside
    it."""
    tokens, tp = tokens_of(args), args.tensor_model_parallel_size
    wide = _mlp(args, args.ffn_hidden_size or 4 * args.hidden_size) / tp
    found = tokens * width_of(args) * wide if held.layers else 0.0
    if held.last:
        fused = args.transformer_impl in ("auto", "compiled") and args.device != "cpu"
        each = width_of(args) if fused else FP32 + width_of(args)
        found += tokens * vocabulary / tp * each
    if args.recompute_granularity == "full":
        several = 1 if args.recompute_method == "block" else args.recompute_num_layers or 1
        found += sum(_kept(args, mixture=mixture) for mixture in held.layers[:several])
    return found
