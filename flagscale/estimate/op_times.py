"""Load of the forward and backward passes on a rank's device, and the time that the device needs
for it.

The duration of a pass is the sum of GEMMs, attention, memory traffic of compiled
pointwise operations, and start and end of kernels; or the time in which the host launches the
kernels, if that is longer. The reachable fractions of a device's peaks were measured with layers
of Llama-3-8B, Mixtral, Qwen3 and a small model on H200s. docs/benchmarks/training.md compares
the estimate with each of these runs.

``args`` are a rank's resolved arguments with its own parallel sizes throughout.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

from flagscale.config.arguments.rules.muon import DUPLICATED, uses_muon
from flagscale.config.arguments.rules.optimizer import captures_steps
from flagscale.config.arguments.rules.optimizer_states import state_formats
from flagscale.config.arguments.rules.sharding import shards_gradients
from flagscale.estimate import arithmetic, attention, memory, muon, weights
from flagscale.estimate.arithmetic import LayerKind
from flagscale.estimate.memory import ModelPart

_GEMM_EFFICIENCY = 0.70
"""Reachable fraction of the peak FLOP/s for 16-bit GEMMs."""
_FP8_EFFICIENCY = 0.66
"""Reachable fraction of the 8-bit peak, which is twice the 16-bit peak, for FP8 GEMMs."""
_BLOCK_SCALED_EFFICIENCY = 0.55
"""The same for block-scaled FP8 GEMMs; calculated, because no such run was measured."""
_CUDNN_ATTENTION_EFFICIENCY = 0.48
"""Reachable fraction of the peak FLOP/s for cuDNN's attention to very long sequences."""
_FLASH_ATTENTION_EFFICIENCY = 0.28
"""The same for flash attention."""
_HALF_EFFICIENT_LENGTH = 1200
"""Length of a sequence, in tokens, for which attention reaches half of its efficiency. At 4,096
tokens cuDNN reaches 0.37, at 65,536 tokens 0.47.
"""
_BANDWIDTH_EFFICIENCY = 0.81
"""Reachable fraction of the peak memory bandwidth."""
_KERNEL_SECONDS = 4.5e-6
"""Time for the start and end of a kernel on the device."""
_LAUNCH_SECONDS = 75e-6
"""Time for the launch of a kernel by the host. The hosts of the measured machines are slow."""
_LINK_BYTES_PER_SECOND = 175e9
"""Bandwidth from tensor-parallel peers in bytes per second, over NVLink with NCCL."""
_DEFAULT_FLOP_PER_BYTE = 989e12 / 4.8e12
"""FLOP per byte of memory bandwidth of an H200, for devices whose bandwidth is unknown."""

_FORWARD_FRACTION = 1 / 3
"""The forward pass's fraction of the traffic and kernels of both passes."""
# Reads and writes per element by compiled operations, in both passes together.
_HIDDEN_ACCESSES = 50
"""Accesses per element of a layer's hidden state: norms, residuals, copies."""
_NORM_ACCESSES = 12
"""Accesses per element of a layer's hidden state by its two norms alone."""
_QKV_ACCESSES = 9
"""Accesses per element of queries, keys and values: rotary positions, and again for their norms if
there are any.
"""
_EXPERT_ACCESSES = 28
"""Accesses per element of tokens that are dispatched to an expert and combined."""
_LOGIT_ACCESSES = 5
"""Accesses per element of the logits."""
_FC1_ACCESSES = {1: 5, 2: 8}
"""Accesses per element of an MLP's width, by the width factor of its first linear layer."""
_FORWARD_EXCHANGES = 4
"""Exchanges (all-gather or reduce-scatter) of the hidden state between tensor-parallel ranks in a
layer's forward pass.
"""
_BACKWARD_EXCHANGES = 3
"""Exposed exchanges in a layer's backward pass. A fourth one overlaps with a GEMM."""
_CAST_BYTES = 12
"""Bytes of traffic per element that is cast for FP8 GEMMs."""
_EAGER_FACTOR = 2.5
"""Traffic of layers that are not compiled, relative to compiled ones."""
_EAGER_LOGIT_ACCESSES = 15
"""Reads and writes per logit if the loss is not compiled."""
_ACCUMULATE_BYTES = 10
"""Traffic per weight whose gradient a separate kernel adds to the fp32 sum."""
_GRADIENT_ACCESSES = 4
"""Accesses per element of gradients by their norm, clipping and the optimizer."""
_SHARD_ACCESSES = 5
"""Accesses per element of a shard of gradients in each micro-batch: its own part and one that is
received are added to it, and the received one is written before.
"""
_OFFLOADED_STATE_BYTES_PER_SECOND = 86e9
"""Bytes of the optimizer's states in host memory that an update reads and writes per second, with
copies. An H100 copies 86.6e9 bytes per second in both directions together. If the cores of the host
update some of the fp32 states, it takes as long.
"""
_COPIED_BYTES_PER_SECOND = 45e9
"""Pinned copies between a device and its host, in each direction. 55e9 down and 33e9 (first use of
the memory) to 50e9 up were measured on an H100; they do not slow down GEMMs beside them.
"""
_ORTHOGONALIZATION_BYTES = 100
"""Traffic per weight of Muon besides its matrix products: results of products are added to other
matrices, and momentum, norm and update are read and written.
"""
# Numbers of kernels: of a layer, of 8-bit products and of experts in addition, of the head in
# both passes, and of the end of a step.
_LAYER_KERNELS = 30
_FP8_KERNELS = 16
_EXPERT_KERNELS = 30
_HEAD_KERNELS = 15
_STEP_KERNELS = 100


@dataclass(frozen=True)
class DevicePeaks:
    """Peaks of a device: dense 16-bit FLOP per second, and memory bytes per second if known.

    The other constants are those of the measured machines, see the module.
    """

    flops: float
    bytes_per_second: float | None = None
    kernel_seconds: float = _KERNEL_SECONDS
    launch_seconds: float = _LAUNCH_SECONDS
    link_bytes_per_second: float = _LINK_BYTES_PER_SECOND


class LoadSeconds(NamedTuple):
    """Seconds of a load on a device by cause. They add up to its duration.

    ``launch`` is the time by which the host's launches take longer than the device.
    """

    compute: float
    memory: float
    kernels: float
    exchange: float
    launch: float
    host: float


@dataclass(frozen=True)
class Workload:
    """Load of an operation on a rank.

    ``gemm_flops`` (16-bit), ``fp8_gemm_flops`` and ``attention_flops`` are FLOP, divided by the
    reachable fraction of the device's 16-bit peak. ``traffic_bytes`` is memory traffic, ``kernels``
    the number of kernels, ``launches`` the number of those that the host launches one by one, and
    ``exchanged_bytes`` are received from other ranks without overlap with computation, and
    ``offloaded_state_bytes`` of the optimizer in host memory are read and written. ``copied_bytes``
    are copied to or from the host while the device computes.
    """

    gemm_flops: float = 0.0
    fp8_gemm_flops: float = 0.0
    attention_flops: float = 0.0
    traffic_bytes: float = 0.0
    kernels: float = 0.0
    launches: float = 0.0
    exchanged_bytes: float = 0.0
    offloaded_state_bytes: float = 0.0
    copied_bytes: float = 0.0

    def __add__(self, other: Workload) -> Workload:
        # Not by dataclasses.astuple(), which copies deeply: a search adds up many loads.
        return Workload(*map(add, vars(self).values(), vars(other).values()))

    def scale(self, count: float) -> Workload:
        return Workload(*(count * value for value in vars(self).values()))

    def duration(self, peaks: DevicePeaks) -> float:
        """Return the time on a device in seconds."""
        return sum(self.split_duration(peaks))

    def split_duration(self, peaks: DevicePeaks) -> LoadSeconds:
        """Return the time on a device by cause."""
        compute = (self.gemm_flops + self.fp8_gemm_flops + self.attention_flops) / peaks.flops
        memory = self.traffic_bytes / (
            _BANDWIDTH_EFFICIENCY * (peaks.bytes_per_second or peaks.flops / _DEFAULT_FLOP_PER_BYTE)
        )
        kernels = self.kernels * peaks.kernel_seconds
        exchange = self.exchanged_bytes / peaks.link_bytes_per_second
        device_seconds = compute + memory + kernels + exchange
        launch = max(self.launches * peaks.launch_seconds - device_seconds, 0.0)
        # Copies to and from the host run beside the rest.
        copies = self.copied_bytes / _COPIED_BYTES_PER_SECOND
        host = max(copies - device_seconds - launch, 0.0)
        host += self.offloaded_state_bytes / _OFFLOADED_STATE_BYTES_PER_SECOND
        return LoadSeconds(compute, memory, kernels, exchange, launch, host)


@dataclass(frozen=True)
class PassLoads:
    """Load of a model part's forward and backward pass for one micro-batch."""

    forward: Workload = Workload()
    backward: Workload = Workload()

    def __add__(self, other: PassLoads) -> PassLoads:
        return PassLoads(self.forward + other.forward, self.backward + other.backward)

    def scale(self, count: float) -> PassLoads:
        return PassLoads(self.forward.scale(count), self.backward.scale(count))


def layer_load(args: Any, kind: LayerKind) -> PassLoads:
    """Return the load of a layer's passes."""
    tokens, tp = memory.count_microbatch_tokens(args), args.tensor_model_parallel_size
    tokens_per_rank = tokens / tp
    gemm_flops = tokens_per_rank * arithmetic.linear_flops(args, is_moe=kind.is_moe)
    fp8_gemm_flops = (
        2.0 * tokens * weights.linear_weights(args, is_moe=kind.is_moe) if kind.is_fp8 else 0.0
    )
    attention_flops = tokens_per_rank * arithmetic.attention_flops(args, kind.window)
    forward = Workload(
        *_forward_gemms(args, gemm_flops - fp8_gemm_flops, fp8_gemm_flops),
        attention_flops / _attention_efficiency(args),
    )
    backward = Workload(
        *_backward_gemms(args, gemm_flops - fp8_gemm_flops, fp8_gemm_flops),
        2 * forward.attention_flops,
    )
    traffic_bytes = memory.element_bytes(args) * tokens_per_rank * _pointwise_elements(args, kind)
    if kind.is_fp8:
        traffic_bytes += _CAST_BYTES * tokens_per_rank * _cast_elements(args, is_moe=kind.is_moe)
    traffic_bytes *= _traffic_factor(args)
    kernels = _LAYER_KERNELS + _FP8_KERNELS * kind.is_fp8 + _EXPERT_KERNELS * kind.is_moe
    expert_weights = weights.layer_weights(args, is_moe=kind.is_moe).experts
    expert_bytes = memory.element_bytes(args) * expert_weights
    exchange_bytes = _exchange_bytes(args, kind)
    return (
        PassLoads(forward, backward)
        + PassLoads(
            Workload(exchanged_bytes=_FORWARD_EXCHANGES * exchange_bytes),
            Workload(exchanged_bytes=_BACKWARD_EXCHANGES * exchange_bytes),
        )
        + PassLoads(
            _overhead_load(
                args, _FORWARD_FRACTION * traffic_bytes + expert_bytes, _FORWARD_FRACTION * kernels
            ),
            _overhead_load(
                args,
                (1 - _FORWARD_FRACTION) * traffic_bytes
                + 2 * expert_bytes
                + _accumulation_bytes(args, kind),
                kernels * 2 / 3,
            ),
        )
    )


def module_recompute_load(args: Any, kind: LayerKind, modules: Collection[str]) -> Workload:
    """Return the load of recomputing ``modules`` of a layer in its backward pass."""
    is_compiled = memory.uses_compiled_layers(args)
    load = Workload()
    if "layernorm" in modules:
        load += _recomputed_part(args, kind, _NORM_ACCESSES * args.hidden_size, kernels=4)
    if "core_attn" in modules and not (is_compiled and "mla_up_proj" in modules):
        flops = arithmetic.attention_flops(args, kind.window) / _attention_efficiency(args)
        load += Workload(attention_flops=_tokens_per_rank(args) * flops)
        load += _recomputed_part(args, kind, 0.0, kernels=2)
    if "mla_up_proj" in modules:
        width = attention.query_and_value_width(args) / 2 + attention.kv_width(args)
        up_weights = attention.up_projection_weights(args)
        load += _recomputed_part(args, kind, _QKV_ACCESSES * width, up_weights, kernels=4)
    if not kind.is_moe:
        ffn_size = args.ffn_hidden_size or 4 * args.hidden_size
        return load + _recomputed_mlp(args, kind, ffn_size) if "mlp" in modules else load
    activation_accesses = (
        args.moe_router_topk * arithmetic.expert_ffn_size(args) * _fc1_accesses(args)
    )
    if "moe" in modules:
        accesses = activation_accesses + args.moe_router_topk * _EXPERT_ACCESSES * args.hidden_size
        moe_weights = arithmetic.active_moe_weights(args)
        bf16_kind = kind._replace(is_fp8=False)
        return load + _recomputed_part(
            args, bf16_kind, accesses, moe_weights, kernels=_EXPERT_KERNELS
        )
    if "moe_act" in modules:
        load += _recomputed_part(args, kind, activation_accesses, kernels=3)
    if "shared_experts" in modules:
        load += _recomputed_mlp(args, kind, args.moe_shared_expert_intermediate_size or 0)
    return load


def _recomputed_mlp(args: Any, kind: LayerKind, ffn_size: int) -> Workload:
    """Return the load of recomputing an MLP.

    Compiled layers do not repeat its last GEMM, because its output is not needed.
    """
    repeats_all = kind.is_moe or not memory.uses_compiled_layers(args)
    matrices = arithmetic.mlp_matrix_count(args) - (not repeats_all)
    mlp_weights = matrices * ffn_size * args.hidden_size
    load = _recomputed_part(args, kind, ffn_size * _fc1_accesses(args), mlp_weights, kernels=4)
    exchanges = (1 + repeats_all) * _exchange_bytes(args, kind._replace(is_moe=False))
    return load + Workload(exchanged_bytes=exchanges)


def _recomputed_part(
    args: Any, kind: LayerKind, accesses: float, part_weights: float = 0.0, *, kernels: float
) -> Workload:
    """Return the load of a forward pass of a part of a layer.

    ``accesses`` are those per token of both passes, ``part_weights`` is the number of weights that
    a token passes, and ``kernels`` the number of kernels.
    """
    tokens_per_rank = _tokens_per_rank(args)
    flops = 2.0 * tokens_per_rank * part_weights
    gemms = _forward_gemms(args, *((0.0, flops) if kind.is_fp8 else (flops, 0.0)))
    traffic_bytes = _FORWARD_FRACTION * memory.element_bytes(args) * tokens_per_rank * accesses
    traffic_bytes *= _traffic_factor(args)
    return Workload(*gemms) + _overhead_load(args, traffic_bytes, kernels)


def _traffic_factor(args: Any) -> float:
    """Return the traffic of a layer's pointwise operations relative to compiled ones."""
    return 1.0 if memory.uses_compiled_layers(args) else _EAGER_FACTOR


def _fc1_accesses(args: Any) -> int:
    return _FC1_ACCESSES[arithmetic.fc1_width_factor(args)]


def _tokens_per_rank(args: Any) -> float:
    return memory.count_microbatch_tokens(args) / int(args.tensor_model_parallel_size)


def _exchange_bytes(args: Any, kind: LayerKind) -> float:
    """Return the bytes that a rank receives in one exchange of the hidden state.

    An exchange is an all-gather or a reduce-scatter. A mixture of experts needs half as many per
    layer. The result is zero if GEMMs overlap with the exchanges, which FP8 GEMMs do not.
    """
    peer_count = args.tensor_model_parallel_size - 1
    if args.tp_comm_overlap and args.sequence_parallel and not args.fp8:
        return 0.0
    tokens = memory.count_microbatch_tokens(args) / args.tensor_model_parallel_size
    received_bytes = tokens * args.hidden_size * memory.element_bytes(args) * peer_count
    return float(received_bytes * (0.5 if kind.is_moe else 1))


def head_load(args: Any, vocabulary_size: int) -> PassLoads:
    """Return the load of the output layer and the loss."""
    tokens, tp = memory.count_microbatch_tokens(args), args.tensor_model_parallel_size
    gemm_flops = tokens / tp * arithmetic.head_flops(args, vocabulary_size)
    accesses = _LOGIT_ACCESSES if memory.uses_compiled_loss(args) else _EAGER_LOGIT_ACCESSES
    traffic_bytes = tokens * vocabulary_size / tp * accesses * memory.element_bytes(args)
    return PassLoads(
        Workload(*_forward_gemms(args, gemm_flops, 0))
        + _overhead_load(args, _FORWARD_FRACTION * traffic_bytes, _HEAD_KERNELS / 3),
        Workload(*_backward_gemms(args, gemm_flops, 0))
        + _overhead_load(args, (1 - _FORWARD_FRACTION) * traffic_bytes, _HEAD_KERNELS * 2 / 3),
    )


def mtp_load(args: Any, vocabulary_size: int) -> PassLoads:
    """Return the load of the multi-token prediction layers with their projections and heads."""
    tokens, tp = memory.count_microbatch_tokens(args), args.tensor_model_parallel_size
    projection_flops = 2.0 * arithmetic.mtp_projection_weights(args) * tokens / tp
    projection = PassLoads(
        Workload(*_forward_gemms(args, projection_flops, 0)),
        Workload(*_backward_gemms(args, projection_flops, 0)),
    )
    depth_load = (
        layer_load(args, arithmetic.list_layer_kinds(args)[-1])
        + projection
        + head_load(args, vocabulary_size)
    )
    return sum([depth_load] * arithmetic.mtp_depth(args), PassLoads())


def optimizer_load(args: Any, vocabulary_size: int, part: ModelPart) -> Workload:
    """Return the load after the passes, once per step: the optimizer on this rank's shard."""
    trainable = memory.count_trainable_weights(args, vocabulary_size, part)
    host_weights = memory.offloaded_weights(args, trainable)
    device_weights = memory.count_optimizer_weights(args, trainable) - host_weights
    gradient_bytes = state_formats(vars(args)).gradient_bytes
    # States are read and written, and gradients set to zero.
    bytes_per_weight = _GRADIENT_ACCESSES * gradient_bytes + 2 * memory.state_bytes(args)
    traffic_bytes = bytes_per_weight * device_weights + gradient_bytes * trainable.all
    orthogonalization = Workload()
    if uses_muon(vars(args)):
        orthogonalization = _orthogonalization_load(args, vocabulary_size, part)
    if shards_gradients(vars(args)):
        shard = memory.count_optimizer_weights(args, trainable)
        accesses = _SHARD_ACCESSES * args.num_microbatches
        traffic_bytes += accesses * gradient_bytes * shard
    return (
        Workload(
            traffic_bytes=traffic_bytes,
            kernels=_STEP_KERNELS,
            launches=_STEP_KERNELS,
            offloaded_state_bytes=2 * memory.state_bytes(args) * host_weights,
        )
        + orthogonalization
    )


def _orthogonalization_load(args: Any, vocabulary_size: int, part: ModelPart) -> Workload:
    """Return the load of Muon in addition to Adam's. If states are sharded, momentum and updates
    are exchanged with the ranks that have whole matrices.
    """
    layers = list(part.layers)
    if part.has_head:
        layers += [arithmetic.list_layer_kinds(args)[-1]] * arithmetic.mtp_depth(args)
    replicas = memory.count_shards(args)
    load = muon.orthogonalization_load(args, layers, replicas)
    shard = memory.count_optimizer_weights(
        args, memory.count_muon_weights(args, vocabulary_size, part)
    )
    is_exchanged = args.use_distributed_optimizer and max(replicas) > 1
    exchanged = 2 * memory.FP32_BYTES * shard if is_exchanged else 0.0
    if args.muon_tp_mode == DUPLICATED:
        exchanged += memory.FP32_BYTES * shard * (args.tensor_model_parallel_size - 1)
    return Workload(
        load.flops / _GEMM_EFFICIENCY,
        traffic_bytes=_ORTHOGONALIZATION_BYTES * shard,
        kernels=load.kernels,
        launches=load.kernels,
        exchanged_bytes=exchanged,
    )


def _overhead_load(args: Any, traffic_bytes: float, kernels: float) -> Workload:
    """Return the load of everything but GEMMs and attention. A step that is captured in a CUDA
    graph is a single launch.
    """
    is_captured = captures_steps(vars(args))
    return Workload(
        traffic_bytes=traffic_bytes, kernels=kernels, launches=0.0 if is_captured else kernels
    )


def _forward_gemms(args: Any, flops_16bit: float, flops_8bit: float) -> tuple[float, float]:
    """Return the forward pass's 16-bit and FP8 GEMM FLOP, divided by the reachable fraction of the
    peak.
    """
    is_block_scaled = args.fp8_recipe == "blockwise"
    efficiency = _BLOCK_SCALED_EFFICIENCY if is_block_scaled else _FP8_EFFICIENCY
    return flops_16bit / _GEMM_EFFICIENCY, flops_8bit / 2 / efficiency


def _backward_gemms(args: Any, flops_16bit: float, flops_8bit: float) -> tuple[float, float]:
    """Return the same for the backward pass: GEMMs for gradients of inputs and of weights.

    Frozen weights have no gradient. Gradients of weights use 16 bits unless 8 are configured.
    """
    if args.peft_type:
        return _forward_gemms(args, flops_16bit, flops_8bit)
    if not args.fp8_wgrad:
        return _forward_gemms(args, 2 * flops_16bit + flops_8bit, flops_8bit)
    return _forward_gemms(args, 2 * flops_16bit, 2 * flops_8bit)


def _attention_efficiency(args: Any) -> float:
    """Return the reachable fraction of the peak: cuDNN attention where it is used, otherwise flash
    attention.
    """
    uses_flash = (
        not memory.uses_compiled_layers(args)
        or getattr(args.attention_backend, "name", args.attention_backend) == "flash"
        or args.attention_dropout
    )
    limit = _FLASH_ATTENTION_EFFICIENCY if uses_flash else _CUDNN_ATTENTION_EFFICIENCY
    return float(limit * args.seq_length / (args.seq_length + _HALF_EFFICIENT_LENGTH))


def _pointwise_elements(args: Any, kind: LayerKind) -> float:
    """Return the elements per token that compiled pointwise operations read or write."""
    hidden, ffn_size = args.hidden_size, args.ffn_hidden_size or 4 * args.hidden_size
    query_width = attention.query_and_value_width(args) / 2
    qkv_width = query_width + attention.kv_width(args)
    if args.qk_layernorm:
        qkv_width += query_width + attention.kv_width(args) / 2
    hidden_accesses = _HIDDEN_ACCESSES * (
        args.tensor_model_parallel_size if not args.sequence_parallel else 1
    )
    elements = hidden_accesses * hidden + _QKV_ACCESSES * qkv_width
    fc1_accesses = _fc1_accesses(args)
    if not kind.is_moe:
        return float(elements + fc1_accesses * ffn_size)
    per_expert = _EXPERT_ACCESSES * hidden + fc1_accesses * arithmetic.expert_ffn_size(args)
    shared_expert_size = args.moe_shared_expert_intermediate_size or 0
    return float(elements + args.moe_router_topk * per_expert + fc1_accesses * shared_expert_size)


def _cast_elements(args: Any, *, is_moe: bool) -> float:
    """Return the elements per token of inputs and outputs of a layer's linear layers."""
    hidden, ffn_size = args.hidden_size, args.ffn_hidden_size or 4 * args.hidden_size
    query_width = attention.query_and_value_width(args) / 2
    attention_elements = 2 * hidden + 2 * query_width + attention.kv_width(args)
    if is_moe:
        ffn_size = args.moe_shared_expert_intermediate_size or 0
    return float(
        attention_elements
        + (2 * hidden + (arithmetic.fc1_width_factor(args) + 1) * ffn_size if ffn_size else 0)
    )


def _accumulation_bytes(args: Any, kind: LayerKind) -> float:
    """Return the bytes of traffic for accumulating gradients in separate kernels."""
    layer_weights = weights.layer_weights(args, is_moe=kind.is_moe)
    if args.peft_type:
        return 0.0
    is_separate = (kind.is_fp8 and args.fp8_wgrad) or not memory.uses_compiled_layers(args)
    return float(_ACCUMULATE_BYTES * (layer_weights.experts + layer_weights.shared * is_separate))
