"""Memory of a rank in training, in bytes by purpose.

Weights, gradients and optimizer state follow from the arguments. Activations are the tensors
that layers keep for their backward pass with fused attention, norms and gated units (Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, counts them for
GPT without fusion). Communication libraries, CUDA's context and fragmentation are not included.
The compiler's share of a layer's activations, and the transient peak, were fitted to peaks of
real runs (``tests/unit/estimate/test_measured.py``).

``args`` are a rank's resolved arguments with its own parallel sizes throughout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

from flagscale.config.arguments.layout import tokens_per_sample
from flagscale.config.arguments.parameters import EMBEDDING, OUTPUT_LAYER, POSITIONS
from flagscale.config.arguments.rules.activation_offload import offloads_activations
from flagscale.config.arguments.rules.adapters import adapter_targets
from flagscale.config.arguments.rules.freezing import freezing_argument, frozen_predicate
from flagscale.config.arguments.rules.muon import ADAM_FAMILY, LION, uses_muon
from flagscale.config.arguments.rules.optimizer_states import (
    StateFormats,
    model_format,
    state_formats,
)
from flagscale.config.arguments.rules.recompute import module_choice
from flagscale.config.arguments.rules.sharding import shards_gradients, shards_weights
from flagscale.estimate import activation_offload, attention, module_recompute, muon, weights
from flagscale.estimate.arithmetic import (
    LayerKind,
    expert_tp,
    fc1_width_factor,
    get_transformer,
    list_layer_kinds,
    mtp_depth,
)
from flagscale.estimate.weights import WeightCount

FP32_BYTES = 4


@dataclass(frozen=True)
class ModelPart:
    """Part of the model that a rank holds.

    ``layers`` are its layers, chunk by chunk, and ``layer_numbers`` their numbers in the model
    (empty: counted from 0). ``chunk_sizes`` are the numbers of layers of its chunks (empty: one
    chunk). ``has_embedding`` and ``has_head`` are True if it has
    the embedding and the head. ``microbatches_in_flight`` is the maximum number of micro-batches
    between their forward and backward pass.
    """

    layers: tuple[LayerKind, ...]
    has_embedding: bool
    has_head: bool
    microbatches_in_flight: float = 1.0
    layer_numbers: tuple[int, ...] = ()
    chunk_sizes: tuple[int, ...] = ()

    def chunks(self) -> Iterator[tuple[LayerKind, ...]]:
        """Yield the layers of each chunk."""
        layers = iter(self.layers)
        for size in self.chunk_sizes or (len(self.layers),):
            yield tuple(islice(layers, size))

    def positions(self) -> Iterator[int]:
        """Yield the index of each layer in its chunk."""
        for chunk in self.chunks():
            yield from range(len(chunk))


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a rank in bytes by purpose.

    ``weights`` includes their FP8 copies. ``transient`` is memory that exists only within one
    forward or backward pass, including the logits. ``host`` is memory of the host, in addition to
    the device's: the optimizer's offloaded state, and offloaded activations.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Memory of the device."""
        return float(sum(vars(self).values()) - self.host)


_FORECAST_MARGIN = 0.97
"""Usable fraction of a device's free memory: the forecast is up to 3.4 % low."""
_RESERVED_FRACTION = 0.1
_MAX_RESERVED_BYTES = 8 * 2**30
"""Memory that is left to libraries and kernels outside torch's allocator. They took 7.7 GiB of an
80 GB H100, where a plan for 71.3 GiB ended out of memory.
"""


def usable_bytes(free_bytes: float) -> float:
    """Return the memory of a device that a plan may fill, of what is free before a start."""
    reserved = min(_RESERVED_FRACTION * free_bytes, _MAX_RESERVED_BYTES)
    return _FORECAST_MARGIN * free_bytes - reserved


def estimate_rank_memory(args: Any, vocabulary_size: int, part: ModelPart) -> MemoryEstimate:
    """Return the peak memory of a rank.

    Args:
        args: see the module.
        vocabulary_size: the padded vocabulary size.
        part: the part of the model that the rank holds.
    """
    weight_count = count_weights(args, vocabulary_size, part)
    trainable = count_trainable_weights(args, vocabulary_size, part, weight_count)
    if args.peft_type:
        weight_count += trainable
    host_weights = offloaded_weights(args, trainable)
    kept_weights = count_optimizer_weights(args, trainable) - host_weights
    exact_bytes, exact_host_bytes = _replicated_state_bytes(args, vocabulary_size, part)
    optimizer_bytes = state_bytes(args) * kept_weights + exact_bytes
    offloaded = _offloaded_by_layer(args, part)
    activations = _activation_bytes(args, part, offloaded)
    transient = _transient_bytes(args, vocabulary_size, part)
    if uses_muon(vars(args)):
        matrices = count_muon_weights(args, vocabulary_size, part)
        optimizer_bytes -= FP32_BYTES * count_optimizer_weights(args, matrices)
        transient = max(transient, muon.workspace_bytes(args, part.layers) - activations)
    return MemoryEstimate(
        _weight_bytes(args, weight_count, vocabulary_size, part) + _fp8_copy_bytes(args, part),
        _gradient_bytes(args, trainable, vocabulary_size, part),
        optimizer_bytes,
        activations,
        transient,
        state_bytes(args) * host_weights
        + exact_host_bytes
        + part.microbatches_in_flight * sum(offloaded),
    )


def _weight_bytes(
    args: Any, weight_count: WeightCount, vocabulary_size: int, part: ModelPart
) -> float:
    """Return the bytes of a rank's weights; if they are sharded, of its shard and of what is
    gathered at the same time: a layer, and another one or the head.
    """
    if not shards_weights(vars(args)) or count_shards(args) == (1, 1):
        return float(weight_count.all * element_bytes(args))
    layer = max((_count_layer(args, kind).all for kind in set(part.layers)), default=0)
    outer = max(_count_outer(args, vocabulary_size, part))
    return float(element_bytes(args) * (_shard(args, weight_count) + layer + max(layer, outer)))


def _gradient_bytes(
    args: Any, trainable: WeightCount, vocabulary_size: int, part: ModelPart
) -> float:
    """Return the bytes of a rank's gradients.

    They are accumulated in fp32 by default, even if weights have 16 bits. If they are sharded, the
    whole ones of two layers and of the embedding or the head are in memory besides the shard.
    """
    bytes_per_weight = state_formats(vars(args)).gradient_bytes
    if not shards_gradients(vars(args)) or count_shards(args) == (1, 1):
        return float(trainable.all * bytes_per_weight)
    whole = trainable.all
    if not args.peft_type and freezing_argument(vars(args)) is None:
        layer = max((_count_layer(args, kind).all for kind in set(part.layers)), default=0)
        whole = min(whole, 2 * layer + max(_count_outer(args, vocabulary_size, part)))
    return float(bytes_per_weight * (_shard(args, trainable) + whole))


def _count_layer(args: Any, kind: LayerKind) -> WeightCount:
    return weights.layer_weights(args, is_moe=kind.is_moe)


def _count_outer(args: Any, vocabulary_size: int, part: ModelPart) -> tuple[int, int]:
    """Return the weights before the layers and those after them."""
    before = after = 0
    for name, count in _outer_weights(args, vocabulary_size, part):
        if part.has_embedding and name in (EMBEDDING, POSITIONS):
            before += count.all
        else:
            after += count.all
    return before, after


def count_shards(args: Any) -> tuple[int, int]:
    """Return the numbers of data-parallel ranks that share weights outside experts and experts."""
    ranks = args.data_parallel_size * args.context_parallel_size
    expert_ranks = ranks * args.tensor_model_parallel_size
    expert_ranks //= expert_tp(args) * args.expert_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    return max(ranks // instances, 1), max(expert_ranks // instances, 1)


def _shard(args: Any, count: WeightCount) -> float:
    """Return the number of weights in a rank's shard of ``count``."""
    shards, expert_shards = count_shards(args)
    return count.shared / shards + count.experts / expert_shards


def count_trainable_weights(
    args: Any, vocabulary_size: int, part: ModelPart, all_weights: WeightCount | None = None
) -> WeightCount:
    """Return the weights that a rank trains: adapters if there are any, otherwise all that are not
    frozen. ``all_weights`` are all weights of the rank, if they are known.
    """
    if targets := adapter_targets(vars(args)):
        counts = (weights.adapter_weights(args, targets, is_moe=k.is_moe) for k in part.layers)
        return sum(counts, WeightCount())
    if freezing_argument(vars(args)) is None:
        return all_weights or count_weights(args, vocabulary_size, part)
    is_frozen = frozen_predicate(vars(args))
    return count_weights(args, vocabulary_size, part, lambda name: not is_frozen(name))


def count_muon_weights(args: Any, vocabulary_size: int, part: ModelPart) -> WeightCount:
    """Return the weights of a rank that Muon trains."""
    is_frozen = frozen_predicate(vars(args))
    return count_weights(
        args,
        vocabulary_size,
        part,
        lambda name: muon.is_muon_weight(name) and not is_frozen(name),
    )


@dataclass(frozen=True)
class ModelSize:
    """Number of weights of a whole model, with adapters: all, those that one token passes, and
    those that are trained.
    """

    total: int
    active: int
    trained: int


def count_model_weights(args: Any, vocabulary_size: int) -> ModelSize:
    """Count the weights of a whole model, whatever its layout. The embedding has all rows of the
    padded vocabulary; a token passes ``moe_router_topk`` of the experts of a layer.
    """
    whole = copy(args)
    whole.tensor_model_parallel_size = whole.expert_model_parallel_size = 1
    whole.expert_tensor_parallel_size = None
    part = ModelPart(list_layer_kinds(whole), has_embedding=True, has_head=True)
    count = count_weights(whole, vocabulary_size, part)
    trained = count_trainable_weights(whole, vocabulary_size, part)
    if args.peft_type:
        count += trained
    active = count.shared
    if args.num_moe_experts:
        active += count.experts * args.moe_router_topk // args.num_moe_experts
    return ModelSize(count.all, active, trained.all)


def element_bytes(args: Any) -> int:
    """Return the bytes per weight or activation element."""
    return 2 if args.bf16 or args.fp16 else FP32_BYTES


def count_weights(
    args: Any,
    vocabulary_size: int,
    part: ModelPart,
    is_counted: Callable[[str], bool] | None = None,
) -> WeightCount:
    """Return the weights that a rank holds.

    ``is_counted`` selects parameters by their global names; None selects all.
    """
    block = get_transformer(args).block
    total = WeightCount()
    if is_counted is None:
        for kind, layers in Counter(part.layers).items():
            total += weights.layer_weights(args, is_moe=kind.is_moe) * layers
    numbers = part.layer_numbers or range(len(part.layers))
    for number, layer in zip(numbers, part.layers, strict=True) if is_counted else ():
        total += weights.layer_weights(
            args,
            is_moe=layer.is_moe,
            is_counted=weights.below(f"{block}.layers.{number}.", is_counted),
        )
    for name, count in _outer_weights(args, vocabulary_size, part):
        if is_counted is None or is_counted(name):
            total += count
    if part.has_head:
        total += weights.mtp_weights(args, is_counted)
    return total


def _outer_weights(
    args: Any, vocabulary_size: int, part: ModelPart
) -> Iterator[tuple[str, WeightCount]]:
    """Yield the weights outside layers; of a module with several parameters, the first one's name
    stands for all.
    """
    embedding = weights.embedding_weights(args, vocabulary_size)
    is_untied = bool(args.untie_embeddings_and_output_weights)
    if part.has_embedding:
        yield EMBEDDING, embedding
        yield POSITIONS, weights.position_weights(args)
    if not part.has_head:
        return
    block = get_transformer(args).block
    yield f"{block}.final_layernorm.weight", WeightCount(weights.norm_weights(args))
    yield "lm_head.dense.weight", weights.head_weights(args, vocabulary_size)
    if is_untied:
        yield OUTPUT_LAYER, embedding
    if not part.has_embedding and (mtp_depth(args) or not is_untied):
        # a second copy of the embedding
        yield EMBEDDING, embedding


def _fp8_copy_bytes(args: Any, part: ModelPart) -> float:
    """Return the bytes of FP8 copies of weights.

    They exist row-wise and column-wise, because FP8 GEMMs require both. If weights are sharded, the
    two copies of the layers that are gathered at a time take the place of their 16-bit weights
    (:mod:`flagscale.train.sharding.fp8_bucket`), and a rank has its shard of the values. With
    rowwise scaling it has none, but both copies and the weights of the layer that arrives.
    """
    layers = [
        weights.linear_weights(args, is_moe=layer.is_moe) for layer in part.layers if layer.is_fp8
    ]
    shards, _ = count_shards(args)
    if not shards_weights(vars(args)) or shards == 1:
        return 2.0 * sum(layers)
    if args.fp8_recipe == "rowwise":
        return 2.0 * max(layers, default=0)
    return sum(layers) / shards


def state_bytes(args: Any) -> float:
    """Return the bytes of the optimizer's state per weight: moments, and fp32 weights if the model
    has 16-bit weights. Matrices that Muon trains have one moment less.
    """
    if args.optimizer in ADAM_FAMILY:
        return state_formats(vars(args)).state_bytes(model_format(vars(args)))
    has_masters = element_bytes(args) < FP32_BYTES
    has_momentum = args.optimizer == LION or bool(args.sgd_momentum)
    return float(FP32_BYTES * (has_momentum + has_masters))


def _replicated_state_bytes(
    args: Any, vocabulary_size: int, part: ModelPart
) -> tuple[float, float]:
    """Return the bytes on the device and on the host that are added because the first and the last
    pipeline stage keep the states of their copies of the embedding in fp32.
    """
    is_copied = mtp_depth(args) or not args.untie_embeddings_and_output_weights
    if not is_copied or part.has_embedding == part.has_head or args.peft_type:
        return 0.0, 0.0
    formats = state_formats(vars(args))
    exact_formats = StateFormats(remainders=formats.remainders)
    model = model_format(vars(args))
    embedding = weights.embedding_weights(args, vocabulary_size)
    host_weights = offloaded_weights(args, embedding)
    kept_weights = count_optimizer_weights(args, embedding) - host_weights
    added_bytes = exact_formats.state_bytes(model) - formats.state_bytes(model)
    return added_bytes * kept_weights, added_bytes * host_weights


def offloaded_weights(args: Any, trainable: WeightCount) -> float:
    """Return the number of weights of a rank whose optimizer state is in host memory."""
    if not args.optimizer_cpu_offload:
        return 0.0
    return float(args.optimizer_offload_fraction * count_optimizer_weights(args, trainable))


def count_optimizer_weights(args: Any, trainable: WeightCount) -> float:
    """Return the number of weights that a rank's optimizer updates: all, or its shard."""
    if not args.use_distributed_optimizer:
        return float(trainable.all)
    return float(_shard(args, trainable))


def count_microbatch_tokens(args: Any) -> float:
    """Return the number of tokens of a rank per micro-batch."""
    return float(args.micro_batch_size * tokens_per_sample(vars(args)) / args.context_parallel_size)


def _activation_bytes(args: Any, part: ModelPart, offloaded: Sequence[float]) -> float:
    """Return the bytes kept for backward passes, without those ``offloaded``, by layer.

    With full recomputation these are the inputs of recomputed layers, or of each group of
    ``recompute_num_layers`` layers; with selective recomputation everything but the modules that
    are recomputed.
    """
    layer_bytes = _kept_bytes(args, part)
    layer_bytes = [kept - away for kept, away in zip(layer_bytes, offloaded, strict=True)]
    if part.has_head and (mtp_layers := mtp_depth(args)):
        last = list_layer_kinds(args)[-1]
        discarded = discarded_bytes(args, last, module_choice(args).of_layer(len(part.layers)))
        layer_bytes += [
            _layer_activation_bytes(args, last) - discarded + 4 * _layer_input_bytes(args)
        ] * mtp_layers
    if args.recompute_granularity != "full":
        return part.microbatches_in_flight * sum(layer_bytes)
    group_size = max(args.recompute_num_layers or 1, 1)
    if args.recompute_method == "block":
        indices = [*part.positions(), *[group_size] * (len(layer_bytes) - len(part.layers))]
        kept = [index >= group_size for index in indices]
        inputs, unrecomputed = kept.count(False), sum(compress(layer_bytes, kept))
    else:
        inputs, unrecomputed = math.ceil(len(layer_bytes) / group_size), 0.0
    return part.microbatches_in_flight * (unrecomputed + inputs * _layer_input_bytes(args))


def _kept_bytes(args: Any, part: ModelPart) -> list[float]:
    """Return the bytes of each layer's activations that are kept on the device or the host."""
    bytes_by_kind = {kind: _layer_activation_bytes(args, kind) for kind in set(part.layers)}
    return [
        bytes_by_kind[layer] - discarded
        for layer, discarded in zip(part.layers, _discarded_bytes(args, part), strict=True)
    ]


def _offloaded_by_layer(args: Any, part: ModelPart) -> list[float]:
    """Return the bytes of each layer's activations per micro-batch that are in host memory."""
    if not offloads_activations(vars(args)):
        return [0.0] * len(part.layers)
    chunks = list(part.chunks())
    bytes_by_chunk = {chunk: offloaded_bytes(args, chunk) for chunk in set(chunks)}
    return [size for chunk in chunks for size in bytes_by_chunk[chunk]]


def offloaded_bytes(args: Any, layers: Sequence[LayerKind]) -> list[float]:
    """Return the bytes of each layer's activations per micro-batch that are in host memory between
    its passes, for the layers of a chunk.
    """
    if not offloads_activations(vars(args)):
        return [0.0] * len(layers)
    part = ModelPart(tuple(layers), has_embedding=False, has_head=False)
    count = activation_offload.offloaded_layers(args, len(layers))
    scale = count_microbatch_tokens(args) * element_bytes(args)
    return [
        scale * activation_offload.offloaded_elements(args, layer, kept / scale)
        if index < count
        else 0.0
        for index, (layer, kept) in enumerate(zip(layers, _kept_bytes(args, part), strict=True))
    ]


def _discarded_bytes(args: Any, part: ModelPart) -> list[float]:
    """Return the bytes of each layer's activations that selective recomputation does not keep."""
    choice = module_choice(args)
    if not choice:
        return [0.0] * len(part.layers)
    layers = [
        (layer, tuple(choice.of_layer(index)))
        for index, layer in zip(part.positions(), part.layers, strict=True)
    ]
    bytes_by_layer = {layer: discarded_bytes(args, *layer) for layer in set(layers)}
    return [bytes_by_layer[layer] for layer in layers]


def discarded_bytes(args: Any, layer: LayerKind, modules: Collection[str]) -> float:
    """Return the bytes per micro-batch that a layer does not keep if it recomputes modules."""
    elements = module_recompute.discarded_elements(
        args, layer, modules, is_compiled=uses_compiled_layers(args)
    )
    return count_microbatch_tokens(args) * element_bytes(args) * elements


def whole_layer_saving(args: Any, layer: LayerKind) -> float:
    """Return the bytes per micro-batch that a layer does not keep if it is recomputed whole."""
    return _layer_activation_bytes(args, layer) - _layer_input_bytes(args)


def _layer_input_bytes(args: Any) -> float:
    """Return the bytes of a layer's input per micro-batch."""
    divisor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return float(count_microbatch_tokens(args) * element_bytes(args) * args.hidden_size / divisor)


def _layer_activation_bytes(args: Any, layer: LayerKind) -> float:
    """Return the bytes of a layer's activations per micro-batch.

    Per token: the inputs of both norms and of the operations after them, which sequence
    parallelism divides; attention's activations, the output of the MLP's first linear layer and of
    its activation function, which tensor parallelism divides. In a mixture of experts, the
    latter for every selected expert, and the dispatched tokens. Inputs of FP8 GEMMs are
    recomputed and cast by the compiler, so outputs of norms and of the activation function are
    not kept.
    """
    tp = args.tensor_model_parallel_size
    # Tensors of hidden size that norms and residual connections keep.
    norms = (6 if args.sandwich_norm else 4) - 2 + module_recompute.norm_outputs(layer)
    norm_elements = norms * args.hidden_size / (tp if args.sequence_parallel else 1)
    # The masks of both dropouts of a layer have one byte per element, half of an activation's.
    mlp_elements = module_recompute.mlp_elements(args, layer)
    mask_elements = 0.5 * 2 * args.hidden_size * (args.hidden_dropout > 0)
    return float(
        count_microbatch_tokens(args)
        * element_bytes(args)
        * (norm_elements + attention.activation_elements(args) + mlp_elements + mask_elements)
    )


def uses_compiled_layers(args: Any) -> bool:
    """Return True if layers are compiled as a whole (``transformer_impl: compiled``) on an
    accelerator.
    """
    return uses_compiled_loss(args) and not args.fine_grained_activation_offloading


def uses_compiled_loss(args: Any) -> bool:
    """Return True if the loss is compiled (``transformer_impl: compiled``) on an accelerator."""
    return args.transformer_impl in ("auto", "compiled") and args.device != "cpu"


def _transient_bytes(args: Any, vocabulary_size: int, part: ModelPart) -> float:
    """Return the bytes that exist within one pass only.

    On the last stage this is the head's backward pass or that of one layer, whichever is larger,
    in addition to :data:`_OUTER_HIDDEN_STATES`.
    """
    peak = max(
        _layer_transient_bytes(args, part),
        _head_transient_bytes(args, vocabulary_size) if part.has_head else 0.0,
    )
    return peak + _OUTER_HIDDEN_STATES * _layer_input_bytes(args)


_OUTER_HIDDEN_STATES = 3
"""Hidden states outside layers: input and output of the last norm, and a gradient."""


def _head_transient_bytes(args: Any, vocabulary_size: int) -> float:
    """Return the transient bytes of head and loss.

    The logits have the model's precision with a fused loss, otherwise fp32 in addition. The
    gradient of the head's weight is as large as the weight, even if it has been accumulated
    already and is no longer used.
    """
    bytes_per_logit = (
        element_bytes(args) if uses_compiled_loss(args) else FP32_BYTES + element_bytes(args)
    )
    name = OUTPUT_LAYER if args.untie_embeddings_and_output_weights else EMBEDDING
    is_trained = not args.peft_type and not frozen_predicate(vars(args))(name)
    weight_gradient_bytes = (
        weights.embedding_weights(args, vocabulary_size).all * element_bytes(args) * is_trained
    )
    logits = (
        count_microbatch_tokens(args)
        * vocabulary_size
        / args.tensor_model_parallel_size
        * (1 + mtp_depth(args))
    )
    return float(logits * bytes_per_logit + weight_gradient_bytes)


def _layer_transient_bytes(args: Any, part: ModelPart) -> float:
    """Return the transient bytes of one layer's backward pass.

    These are the gradients of the output of the MLP's first linear layer and of its weights (for
    all experts twice: as computed, and as passed to autograd), the whole sequence's keys and
    values, and the recomputed activations.
    """
    if not part.layers:
        return 0.0
    tokens, tp = count_microbatch_tokens(args), args.tensor_model_parallel_size
    fc1_width = fc1_width_factor(args) * (args.ffn_hidden_size or 4 * args.hidden_size) / tp
    has_moe = any(layer.is_moe for layer in part.layers)
    weight_elements = (
        2 * weights.grouped_fc1_weights(args) if has_moe else fc1_width * args.hidden_size
    )
    elements = weight_elements * (not args.peft_type) + (0 if has_moe else tokens * fc1_width)
    elements += tokens * attention.exchanged_kv_elements(args)
    transient = elements * element_bytes(args)
    if args.recompute_granularity == "full":
        recomputed_layers = (
            1 if args.recompute_method == "block" else args.recompute_num_layers or 1
        )
        transient += sum(
            _layer_activation_bytes(args, layer) for layer in part.layers[:recomputed_layers]
        )
    else:
        transient += max(_discarded_bytes(args, part))
    # A layer that is being copied in addition to the one that computes.
    transient += max(size for chunk in part.chunks() for size in offloaded_bytes(args, chunk))
    return float(transient)
