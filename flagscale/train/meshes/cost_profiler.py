"""Measurement of the costs of model parts on this rank.

Small models with the layout of the rank's own mesh are trained for a few micro-batches. The cost of
a layer is the difference between models with different numbers of layers and a small vocabulary.
The cost of embedding and output layer is the remaining cost of a model with one layer and the whole
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
"""Minimum and maximum number of repetitions on a CPU. The first quartile is used, because other
load on the host only slows a measurement down.
"""
_REPEAT_SECONDS, _SHORT_REPEAT_SECONDS = 0.5, 0.2
"""Duration of the repetitions in seconds, within these limits."""
_CPU_ROUNDS = 3
"""Number of rounds on a CPU, which may be slower than usual for seconds."""
_SETTLING_SECONDS = 2.0
"""Seconds of passes until a GPU's clock has settled at its sustained power limit. The mean is taken
after that, because training runs at this clock.
"""
_LAYER_DIFFERENCE = 2
"""Difference of two models in layers."""
_ONE_LAYER_MODEL, _WHOLE_VOCABULARY_MODEL = "one", "whole"
"""Names of the models with one layer, with a small and with the whole vocabulary. Other models are
named by the kind of their additional layers.
"""
MAX_MEASURED_LAYERS = 1 + _LAYER_DIFFERENCE
"""Layers of the largest model that is measured with a small vocabulary."""
_SMALL_VOCABULARY_DIVISOR = 128
"""Divisor of a small vocabulary, for each of its parts."""
_MEMORY_FRACTION = 0.95
"""Fraction of a device's memory used for planning; allocators lose some memory."""


def measure_costs(args: argparse.Namespace, vocabulary: int, device: Device) -> RankCosts:
    """Measure the cost of each part on this rank.

    All ranks call it after the layout is initialized.

    Args:
        args: resolved arguments of this rank.
        vocabulary: size of the padded vocabulary.
        device: device of this rank.

    Raises:
        ConfigError: megatron.core rejects the model's configuration, or a model does not fit in
            memory.
    """
    *_, base = kinds = layer_kinds(args)  # MTP layers are like the last layer
    device_memory = device.accelerator.available_memory(device.torch_device)
    small_vocabulary = min(_choose_small_vocabulary(args), vocabulary)
    models: dict[str, tuple[list[str], int]] = {
        kind: ([*[kind] * _LAYER_DIFFERENCE, base], small_vocabulary) for kind in sorted(set(kinds))
    }
    models |= {
        _ONE_LAYER_MODEL: ([base], small_vocabulary),
        _WHOLE_VOCABULARY_MODEL: ([base], vocabulary),
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
            f"{LAYER_SPLIT}: a model of {MAX_MEASURED_LAYERS} layers or of one with the whole "
            f"vocabulary, by which a layer's cost is measured, does not fit into {device.name}",
            hint=f"give the layers of each stage in {LAYER_SPLIT}",
        ) from error
    model_costs = {name: _minimum_costs([costs[name] for costs in round_costs]) for name in models}
    one_layer = model_costs.pop(_ONE_LAYER_MODEL)
    whole_vocabulary = model_costs.pop(_WHOLE_VOCABULARY_MODEL)
    layers = {kind: _layer_cost(one_layer.whole, costs) for kind, costs in model_costs.items()}
    memory_limit = None
    if device_memory is not None:
        memory_limit = max(device_memory * _MEMORY_FRACTION - whole_vocabulary.peak, 0.0)
    ends = whole_vocabulary.whole.subtract(layers[base])
    mtp_cost = _mtp_layers_cost(
        args, one_layer.whole.subtract(layers[base]), ends, small_vocabulary / vocabulary
    )
    embedding, head = _divide_ends(args, ends, whole_vocabulary.embedding, mtp_cost)
    return RankCosts(layers, embedding, head, memory_limit)


def _choose_small_vocabulary(args: argparse.Namespace) -> int:
    """Return a small vocabulary in which tokens of a micro-batch rarely repeat.

    A GPU that repeats the same computation uses less power, and would be faster than in training.
    """
    divisor = _SMALL_VOCABULARY_DIVISOR * vocabulary_parts(vars(args))
    tokens: int = args.micro_batch_size * args.seq_length
    return divisor * math.ceil(tokens / divisor)


def _layer_cost(fewer_layers: PartCost, more_layers: _ModelCosts) -> PartCost:
    """Return the cost of one layer, from two models that differ by layers.

    Measurement noise may cancel the difference. A layer costs at least a quarter of its share of
    the larger model.
    """
    layer = more_layers.whole.subtract(fewer_layers).scale(1 / _LAYER_DIFFERENCE)
    lower_bound = more_layers.whole.scale(0.25 / MAX_MEASURED_LAYERS)
    return replace(
        layer,
        forward_seconds=max(layer.forward_seconds, lower_bound.forward_seconds),
        backward_seconds=max(layer.backward_seconds, lower_bound.backward_seconds),
    )


def _mtp_layers_cost(
    args: argparse.Namespace, small_ends: PartCost, ends: PartCost, share: float
) -> PartCost:
    """Return the cost of multi-token prediction layers without the output layer.

    ``small_ends`` and ``ends`` are the costs of all parts except decoder layers, with a ``share``
    of the vocabulary and with the whole. The part that does not depend on the vocabulary is the MTP
    layers'.
    """
    if not args.mtp_num_layers or share >= 1.0:
        return PartCost()
    return small_ends.subtract(ends.scale(share)).scale(1.0 / (1.0 - share))


def _divide_ends(
    args: argparse.Namespace, ends: PartCost, embedding: PartCost, mtp_cost: PartCost
) -> tuple[PartCost, PartCost]:
    """Divide the cost of both ends into embedding and output layer, which includes MTP layers.

    With tied weights both ends of the pipeline hold the one weight of the small model. With MTP
    layers the last stage holds the embedding too.
    """
    untied = args.untie_embeddings_and_output_weights
    weight = ends.subtract(mtp_cost).scale(0.5 if untied else 1.0)
    last_stage = weight.scale(2 if untied and args.mtp_num_layers else 1)
    output_passes = ends.subtract(embedding)
    after, held = (
        last_stage.step_seconds + mtp_cost.step_seconds,
        last_stage.static_bytes + mtp_cost.static_bytes,
    )
    return (
        PartCost(
            embedding.forward_seconds,
            embedding.backward_seconds,
            weight.step_seconds,
            weight.static_bytes,
            embedding.activation_bytes,
        ),
        PartCost(
            output_passes.forward_seconds,
            output_passes.backward_seconds,
            after,
            held,
            output_passes.activation_bytes,
        ),
    )


@contextmanager
def _single_stage_state() -> Iterator[None]:
    """Context manager in which megatron.core's state has only this rank's pipeline stage."""
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
    """Return the arguments of a model with these layers in one stage."""
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

    It covers the same share of layers as in a stage, or is the largest valid unit.
    """
    configured: int = args.recompute_num_layers
    if args.recompute_method == "block":
        share = configured * args.pipeline_model_parallel_size / int(args.num_layers)
        return int(min(round(share * layers), layers))
    return layers if configured >= layers else 1


@dataclass(frozen=True)
class _ModelCosts:
    """Measured costs of a small model.

    Attributes:
        whole: cost of the model.
        embedding: cost of its embedding.
        peak: transient bytes in addition to the memory that is held throughout.
    """

    whole: PartCost
    embedding: PartCost
    peak: float


def _minimum_costs(rounds: Sequence[_ModelCosts]) -> _ModelCosts:
    """Return the minimum of several rounds for each part."""
    return _ModelCosts(
        min_cost([costs.whole for costs in rounds]),
        min_cost([costs.embedding for costs in rounds]),
        min(costs.peak for costs in rounds),
    )


def _measure_model(
    args: argparse.Namespace, kinds: Sequence[str], vocabulary: int, device: Device
) -> _ModelCosts:
    small_args = _small_model_arguments(args, kinds)
    config = build_transformer_config(small_args, device)
    bytes_before = _held_memory(device)
    state = build_state(small_args, config, vocabulary, device)
    config.grad_scale_func = state.optimizer.scale_loss
    model_runner = _SmallModelRunner(small_args, vocabulary, state, device)
    dist.barrier()
    after_seconds = model_runner.time_update()
    held_bytes = _held_memory(device) - bytes_before
    forward, backward, kept_bytes = model_runner.time_passes()
    embedding = model_runner.time_embedding()
    peak = device.accelerator.peak_memory(device.torch_device) or 0
    transient_bytes = max(peak - bytes_before - held_bytes - kept_bytes, 0.0)
    del model_runner, state
    _reset_router_state()
    gc.collect()
    device.accelerator.empty_cache()
    return _ModelCosts(
        PartCost(forward, backward, after_seconds, held_bytes, kept_bytes),
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


def _held_memory(device: Device) -> float:
    return float(device.accelerator.allocated_memory(device.torch_device) or 0)


class _SmallModelRunner:
    """Runs and times the passes of a small model."""

    def __init__(
        self, args: argparse.Namespace, vocabulary: int, state: TrainState, device: Device
    ) -> None:
        self._state, self._device = state, device
        (self._chunk,) = state.chunks
        spec = get_model_spec(args)
        self._batch = spec.trial(args, vocabulary)
        self._forward = ForwardStep(spec, device, per_token=args.calculate_per_token_loss)

    def time_update(self) -> float:
        """Return the seconds of gradient reduction and optimizer step."""
        self._run_passes()
        return self._first_quartile(
            lambda: (self._time(self._update_weights),), _SHORT_REPEAT_SECONDS
        )[0]

    def time_passes(self) -> tuple[float, ...]:
        """Return the seconds of forward and backward pass, and the bytes held between them."""
        self._run_passes()
        self._device.accelerator.reset_peak_memory(self._device.torch_device)
        if self._device.accelerator.is_host:
            return self._first_quartile(self._run_passes, _REPEAT_SECONDS)
        repeats = self._count_repeats(self._run_passes, _SETTLING_SECONDS + _REPEAT_SECONDS)
        timings = [self._run_passes() for _ in range(max(repeats, _MIN_REPEATS))]
        settling = _SETTLING_SECONDS / (_SETTLING_SECONDS + _REPEAT_SECONDS)
        settled = timings[int(len(timings) * settling) :]
        return tuple(map(fmean, zip(*settled, strict=True)))

    def time_embedding(self) -> PartCost:
        """Return the cost of the embedding's passes."""
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
                lambda: (self._time(forward), self._time(backward)), _SHORT_REPEAT_SECONDS
            )
        return PartCost(*timings)

    def _first_quartile(
        self, work: Callable[[], tuple[float, ...]], seconds: float
    ) -> tuple[float, ...]:
        """Return the first quartile of each number that ``work`` returns."""
        repeats = min(max(self._count_repeats(work, seconds), _MIN_REPEATS), _MAX_REPEATS)
        timings = [work() for _ in range(repeats)]
        return tuple(sorted(values)[len(values) // 4] for values in zip(*timings, strict=True))

    def _count_repeats(self, work: Callable[[], tuple[float, ...]], seconds: float) -> int:
        """Return how often the slowest rank can run ``work`` in ``seconds``; equal on all ranks."""
        work()
        begin = time.perf_counter()
        work()
        seconds_per_run = torch.tensor(
            [time.perf_counter() - begin], device=self._device.torch_device
        )
        dist.all_reduce(seconds_per_run, dist.ReduceOp.MAX)
        return int(seconds / seconds_per_run.item())

    def _run_passes(self) -> tuple[float, float, float]:
        scaled_losses: list[torch.Tensor] = []

        def forward() -> None:
            output, loss_of = self._forward(iter([self._batch]), self._chunk)
            total, count, _ = loss_of(output)
            scaled_losses[:] = [self._state.optimizer.scale_loss(total / count)]

        def backward() -> None:
            torch.autograd.backward(scaled_losses.pop())

        bytes_before = _held_memory(self._device)
        with self._chunk.no_sync():
            forward_seconds = self._time(forward)
            kept_bytes = _held_memory(self._device) - bytes_before
            return forward_seconds, self._time(backward), kept_bytes

    def _update_weights(self) -> None:
        finalize_model_grads([self._chunk], None, pg_collection=build_group_collection())
        self._state.optimizer.step()
        self._chunk.zero_grad_buffer()
        self._state.optimizer.zero_grad()

    def _time(self, work: Callable[[], None]) -> float:
        self._device.synchronize()
        begin = time.perf_counter()
        work()
        self._device.synchronize()
        return time.perf_counter() - begin
