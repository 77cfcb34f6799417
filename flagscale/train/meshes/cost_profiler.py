"""Measurement of the costs of model parts on this rank, in seconds and bytes.

The costs are used to assign layers to the stages of heterogeneous meshes (:mod:`.auto_layout`). A
mesh is a number of ranks with the same parallel sizes that hold consecutive pipeline stages.

Small models with the layout of the rank's mesh are trained for a few micro-batches. The cost of a
layer is the difference between models with different numbers of layers and a small vocabulary. The
cost of embedding and output layer is the remaining cost of a model with one layer and the whole
vocabulary. All ranks measure at the same time, as in training.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_moe_layer_wise_logging_tracker,
)

from flagscale.config.arguments.layout import vocabulary_parts
from flagscale.config.arguments.spec.system_arguments import LAYER_SPLIT, STAGE_RECOMPUTE
from flagscale.errors import ConfigError
from flagscale.estimate.costs import MIXTURE, PartCost, RankCosts, min_cost
from flagscale.estimate.split import layer_kinds
from flagscale.train.build import build_state
from flagscale.train.device import Device
from flagscale.train.forward_step import ForwardStep
from flagscale.train.meshes.finalize_grads import build_group_collection
from flagscale.train.meshes.groups import PipelineStagePosition
from flagscale.train.models.base import get_model_spec
from flagscale.train.models.config import build_transformer_config
from flagscale.train.state import TrainState, unwrap_model

_MIN_REPEATS, _MAX_REPEATS = 5, 40
"""Minimum and maximum number of repetitions of a measurement on a CPU. The first quartile is used,
because other load on the host only slows a measurement down.
"""
_FORWARD_BACKWARD_SECONDS = 0.5
"""Total duration of the repetitions of forward and backward pass, within the limits above."""
_SHORT_MEASUREMENT_SECONDS = 0.2
"""Total duration of the repetitions of all other measurements, within the limits above."""
_CPU_ROUNDS = 3
"""Number of times that all models are measured on a CPU, which may be slower than usual for
seconds. The minimum is used.
"""
_CLOCK_SETTLING_SECONDS = 2.0
"""Seconds of computation until a GPU's clock has settled at its sustained power limit. The mean is
taken after that, because training runs at this clock.
"""
_LAYER_DIFFERENCE = 2
"""Number of layers by which two measured models differ."""
_ONE_LAYER_MODEL, _WHOLE_VOCABULARY_MODEL = "one", "whole"
"""Keys of the models with one layer: with a small vocabulary, and with the whole vocabulary. The
key of every other model is the kind of its additional layers.
"""
MAX_MEASURED_LAYERS = 1 + _LAYER_DIFFERENCE
"""Layers of the largest model that is measured with a small vocabulary."""
_SMALL_VOCABULARY_DIVISOR = 128
"""Divisor of a small vocabulary on each tensor-parallel rank, for efficient GEMM shapes."""
_MEMORY_FRACTION = 0.95
"""Fraction of a device's memory used for planning; allocators lose some to fragmentation."""


def measure_costs(args: argparse.Namespace, vocabulary: int, device: Device) -> RankCosts:
    """Measure the cost of a layer, the embedding and the output layer on this rank.

    Collective: all ranks call it after the layout is initialized.

    Args:
        args: resolved arguments of this rank.
        vocabulary: number of vocabulary entries with padding.
        device: device of this rank.

    Raises:
        ConfigError: megatron.core rejects the model's configuration, or a model does not fit in
            memory.
    """
    kinds = layer_kinds(args)
    base_kind = kinds[-1]  # of the layer that all models have; MTP layers are like the last layer
    device_memory = device.accelerator.available_memory(device.torch_device)
    small_vocabulary = min(_choose_small_vocabulary(args), vocabulary)
    # Kinds of layers and vocabulary size of each model to measure.
    models: dict[str, tuple[list[str], int]] = {
        kind: ([*[kind] * _LAYER_DIFFERENCE, base_kind], small_vocabulary)
        for kind in sorted(set(kinds))
    }
    models |= {
        _ONE_LAYER_MODEL: ([base_kind], small_vocabulary),
        _WHOLE_VOCABULARY_MODEL: ([base_kind], vocabulary),
    }
    rounds = range(_CPU_ROUNDS if device.accelerator.is_host else 1)
    try:
        with _single_stage_state():
            round_costs = [
                {name: _measure_model(args, *model, device) for name, model in models.items()}
                for _ in rounds
            ]
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{LAYER_SPLIT}: a model of {MAX_MEASURED_LAYERS} layers, or of one layer with the "
            "whole vocabulary, which is trained to measure a layer's cost, does not fit in the "
            f"memory of {device.name}",
            hint=f"set the layers of each stage in {LAYER_SPLIT}",
        ) from error
    model_costs = {name: _minimum_costs([costs[name] for costs in round_costs]) for name in models}
    one_layer = model_costs.pop(_ONE_LAYER_MODEL)
    whole_vocabulary = model_costs.pop(_WHOLE_VOCABULARY_MODEL)
    layer_costs = {kind: _layer_cost(one_layer.total, costs) for kind, costs in model_costs.items()}
    memory_limit = None
    if device_memory is not None:
        memory_limit = max(device_memory * _MEMORY_FRACTION - whole_vocabulary.transient_bytes, 0.0)
    vocabulary_cost = whole_vocabulary.total.subtract(layer_costs[base_kind])
    mtp_cost = _mtp_layers_cost(
        args,
        one_layer.total.subtract(layer_costs[base_kind]),
        vocabulary_cost,
        small_vocabulary / vocabulary,
    )
    embedding, head = _divide_vocabulary_cost(
        args, vocabulary_cost, whole_vocabulary.embedding, mtp_cost
    )
    return RankCosts(layer_costs, embedding, head, memory_limit)


def _choose_small_vocabulary(args: argparse.Namespace) -> int:
    """Return a small vocabulary in which tokens of a micro-batch rarely repeat.

    A GPU that repeats the same computation uses less power, and would be faster than in training.
    """
    divisor = _SMALL_VOCABULARY_DIVISOR * vocabulary_parts(vars(args))
    tokens: int = args.micro_batch_size * args.seq_length
    return divisor * math.ceil(tokens / divisor)


def _layer_cost(fewer_layers: PartCost, more_layers: _ModelCosts) -> PartCost:
    """Return the cost of one layer, from two models that differ by layers.

    Measurement noise may exceed the difference. Therefore a layer costs at least a quarter of the
    larger model's cost per layer.
    """
    layer = more_layers.total.subtract(fewer_layers).scale(1 / _LAYER_DIFFERENCE)
    lower_bound = more_layers.total.scale(0.25 / MAX_MEASURED_LAYERS)
    return replace(
        layer,
        forward_seconds=max(layer.forward_seconds, lower_bound.forward_seconds),
        backward_seconds=max(layer.backward_seconds, lower_bound.backward_seconds),
    )


def _mtp_layers_cost(
    args: argparse.Namespace, small_cost: PartCost, whole_cost: PartCost, fraction: float
) -> PartCost:
    """Return the cost of multi-token prediction (MTP) layers without the output layer.

    ``small_cost`` and ``whole_cost`` are the costs of all parts except decoder layers, with a
    ``fraction`` of the vocabulary and with the whole vocabulary. The MTP layers are the part that
    does not depend on the vocabulary.
    """
    if not args.mtp_num_layers or fraction >= 1.0:
        return PartCost()
    return small_cost.subtract(whole_cost.scale(fraction)).scale(1.0 / (1.0 - fraction))


def _divide_vocabulary_cost(
    args: argparse.Namespace, vocabulary_cost: PartCost, embedding: PartCost, mtp_cost: PartCost
) -> tuple[PartCost, PartCost]:
    """Divide the cost of all parts except decoder layers into embedding and output layer.

    The cost of the output layer includes the MTP layers. With tied weights the small model has one
    weight, of which the first and the last stage each hold a copy. With MTP layers the last stage
    holds the embedding too.
    """
    untied = args.untie_embeddings_and_output_weights
    weight = vocabulary_cost.subtract(mtp_cost).scale(0.5 if untied else 1.0)
    last_stage = weight.scale(2 if untied and args.mtp_num_layers else 1)
    head = vocabulary_cost.subtract(embedding)
    return (
        PartCost(
            embedding.forward_seconds,
            embedding.backward_seconds,
            weight.step_seconds,
            weight.static_bytes,
            embedding.activation_bytes,
        ),
        PartCost(
            head.forward_seconds,
            head.backward_seconds,
            last_stage.step_seconds + mtp_cost.step_seconds,
            last_stage.static_bytes + mtp_cost.static_bytes,
            head.activation_bytes,
        ),
    )


@contextmanager
def _single_stage_state() -> Iterator[None]:
    """Return a context manager in which megatron.core's pipeline has only this rank's stage."""
    names = (
        "_PIPELINE_MODEL_PARALLEL_GROUP",
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    )
    saved_values = {name: getattr(parallel_state, name) for name in names}
    for name, value in zip(names, (PipelineStagePosition(0, 1), 0, 1, None, None), strict=True):
        setattr(parallel_state, name, value)
    try:
        yield
    finally:
        for name, value in saved_values.items():
            setattr(parallel_state, name, value)


def _small_model_arguments(args: argparse.Namespace, kinds: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a model of one stage, with a layer of each of ``kinds``."""
    small_args = copy.copy(args)
    small_args.num_layers = len(kinds)
    small_args.pipeline_model_parallel_size = 1
    small_args.pipeline_model_parallel_layout = None
    small_args.virtual_pipeline_model_parallel_size = None
    small_args.num_virtual_stages_per_pipeline_rank = None
    small_args.meshes = small_args.stage = None
    small_args.overlap_grad_reduce = False
    small_args.overlap_param_gather = False
    small_args.align_param_gather = False
    if args.num_moe_experts:
        small_args.moe_layer_freq = [int(kind == MIXTURE) for kind in kinds]
    for name in STAGE_RECOMPUTE:
        setattr(small_args, name, None)
    if args.recompute_granularity == "full":
        small_args.recompute_num_layers = _scale_recomputed_layers(args, len(kinds))
    return small_args


def _scale_recomputed_layers(args: argparse.Namespace, layers: int) -> int:
    """Return ``recompute_num_layers`` for a model with few layers.

    It is the same fraction of the layers as in training, or the largest valid unit.
    """
    configured: int = args.recompute_num_layers
    if args.recompute_method == "block":
        fraction = configured * args.pipeline_model_parallel_size / int(args.num_layers)
        return int(min(round(fraction * layers), layers))
    return layers if configured >= layers else 1


@dataclass(frozen=True)
class _ModelCosts:
    """Measured costs of a small model.

    Attributes:
        total: cost of the whole model.
        embedding: cost of its embedding.
        transient_bytes: peak memory in addition to weights, optimizer state and activations.
    """

    total: PartCost
    embedding: PartCost
    transient_bytes: float


def _minimum_costs(rounds: Sequence[_ModelCosts]) -> _ModelCosts:
    """Return the minimum of several rounds for each part."""
    return _ModelCosts(
        min_cost([costs.total for costs in rounds]),
        min_cost([costs.embedding for costs in rounds]),
        min(costs.transient_bytes for costs in rounds),
    )


def _measure_model(
    args: argparse.Namespace, kinds: Sequence[str], vocabulary: int, device: Device
) -> _ModelCosts:
    small_args = _small_model_arguments(args, kinds)
    config = build_transformer_config(small_args, device)
    bytes_before = _allocated_bytes(device)
    state = build_state(small_args, config, vocabulary, device)
    config.grad_scale_func = state.optimizer.scale_loss
    model_runner = _SmallModelRunner(small_args, vocabulary, state, device)
    dist.barrier()
    step_seconds = model_runner.time_update()
    static_bytes = _allocated_bytes(device) - bytes_before
    forward_seconds, backward_seconds, activation_bytes = model_runner.time_forward_backward()
    embedding = model_runner.time_embedding()
    peak_bytes = device.accelerator.peak_memory(device.torch_device) or 0
    transient_bytes = max(peak_bytes - bytes_before - static_bytes - activation_bytes, 0.0)
    del model_runner, state
    _reset_router_state()
    gc.collect()
    device.accelerator.empty_cache()
    return _ModelCosts(
        PartCost(forward_seconds, backward_seconds, step_seconds, static_bytes, activation_bytes),
        embedding,
        transient_bytes,
    )


def _reset_router_state() -> None:
    """Reset megatron.core's global state of router losses.

    It contains a table for the number of layers of the first model, and a loss scale with the first
    shape that was set.
    """
    get_moe_layer_wise_logging_tracker().clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def _allocated_bytes(device: Device) -> float:
    """Return the bytes that are allocated on the device, 0 if it does not record them."""
    return float(device.accelerator.allocated_memory(device.torch_device) or 0)


class _SmallModelRunner:
    """Runs and times forward pass, backward pass and optimizer step of a small model."""

    def __init__(
        self, args: argparse.Namespace, vocabulary: int, state: TrainState, device: Device
    ) -> None:
        self._state, self._device = state, device
        (self._chunk,) = state.chunks
        spec = get_model_spec(args)
        self._batch = spec.trial(args, vocabulary)
        self._forward_step = ForwardStep(spec, device, per_token=args.calculate_per_token_loss)

    def time_update(self) -> float:
        """Return the seconds of gradient reduction and optimizer step."""
        self._run_forward_backward()
        return self._first_quartile(
            lambda: (self._time(self._update_weights),), _SHORT_MEASUREMENT_SECONDS
        )[0]

    def time_forward_backward(self) -> tuple[float, ...]:
        """Return the seconds of forward and backward pass, and the bytes of activations between
        them.
        """
        self._run_forward_backward()
        self._device.accelerator.reset_peak_memory(self._device.torch_device)
        if self._device.accelerator.is_host:
            return self._first_quartile(self._run_forward_backward, _FORWARD_BACKWARD_SECONDS)
        repeats = self._count_repeats(
            self._run_forward_backward, _CLOCK_SETTLING_SECONDS + _FORWARD_BACKWARD_SECONDS
        )
        timings = [self._run_forward_backward() for _ in range(max(repeats, _MIN_REPEATS))]
        settling_fraction = _CLOCK_SETTLING_SECONDS / (
            _CLOCK_SETTLING_SECONDS + _FORWARD_BACKWARD_SECONDS
        )
        settled_timings = timings[int(len(timings) * settling_fraction) :]
        return tuple(map(fmean, zip(*settled_timings, strict=True)))

    def time_embedding(self) -> PartCost:
        """Return the cost of the embedding's forward and backward pass."""
        model: Any = unwrap_model(self._chunk)
        device = self._device.torch_device
        tokens, positions = (self._batch[n].to(device) for n in ("tokens", "position_ids"))
        outputs: list[torch.Tensor] = []

        def forward() -> None:
            outputs[:] = [model.embedding(input_ids=tokens, position_ids=positions)]

        def backward() -> None:
            torch.autograd.backward(outputs[0], torch.ones_like(outputs[0]))

        with self._chunk.no_sync():
            timings = self._first_quartile(
                lambda: (self._time(forward), self._time(backward)), _SHORT_MEASUREMENT_SECONDS
            )
        return PartCost(*timings)

    def _first_quartile(
        self, action: Callable[[], tuple[float, ...]], seconds: float
    ) -> tuple[float, ...]:
        """Return the first quartile of each number that ``action`` returns."""
        repeats = min(max(self._count_repeats(action, seconds), _MIN_REPEATS), _MAX_REPEATS)
        timings = [action() for _ in range(repeats)]
        return tuple(sorted(values)[len(values) // 4] for values in zip(*timings, strict=True))

    def _count_repeats(self, action: Callable[[], tuple[float, ...]], seconds: float) -> int:
        """Return how often the slowest rank can run ``action`` in ``seconds``.

        The result is equal on all ranks.
        """
        action()
        start_time = time.perf_counter()
        action()
        seconds_per_run = torch.tensor(
            [time.perf_counter() - start_time], device=self._device.torch_device
        )
        dist.all_reduce(seconds_per_run, dist.ReduceOp.MAX)
        return int(seconds / seconds_per_run.item())

    def _run_forward_backward(self) -> tuple[float, float, float]:
        """Return seconds of forward and of backward pass, and bytes of the activations."""
        scaled_losses: list[torch.Tensor] = []

        def forward() -> None:
            output, loss_function = self._forward_step(iter([self._batch]), self._chunk)
            total, count, _ = loss_function(output)
            scaled_losses[:] = [self._state.optimizer.scale_loss(total / count)]

        def backward() -> None:
            torch.autograd.backward(scaled_losses.pop())

        bytes_before = _allocated_bytes(self._device)
        with self._chunk.no_sync():
            forward_seconds = self._time(forward)
            activation_bytes = _allocated_bytes(self._device) - bytes_before
            return forward_seconds, self._time(backward), activation_bytes

    def _update_weights(self) -> None:
        finalize_model_grads([self._chunk], None, pg_collection=build_group_collection())
        self._state.optimizer.step()
        self._chunk.zero_grad_buffer()
        self._state.optimizer.zero_grad()

    def _time(self, action: Callable[[], None]) -> float:
        """Return the seconds that ``action`` takes, including its work on the device."""
        self._device.synchronize()
        start_time = time.perf_counter()
        action()
        self._device.synchronize()
        return time.perf_counter() - start_time
