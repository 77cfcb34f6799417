"""Calculated load and memory of the ranks of each pipeline stage, without measurements."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from flagscale.config.arguments.derive import rank_arguments
from flagscale.config.arguments.hetero.meshes import Meshes
from flagscale.config.arguments.rules.parallel_layout import layers_of_stages
from flagscale.config.arguments.rules.recompute import recompute_plan
from flagscale.config.arguments.spec.system_arguments import RECOMPUTE_AUTO
from flagscale.estimate import arithmetic, memory, op_times
from flagscale.estimate.arithmetic import LayerKind, training_factor
from flagscale.estimate.memory import MemoryEstimate, ModelPart
from flagscale.estimate.op_times import DevicePeaks, PassLoads, Workload
from flagscale.estimate.pipeline import (
    SimulatedStep,
    StagePassTimes,
    count_warmup_passes,
    simulate_step,
)


@dataclass(frozen=True)
class StageForecast:
    """Load and memory of one rank of a stage.

    ``name`` is for messages. ``flops`` are the model's FLOP per micro-batch in both passes, by
    model chunk. ``passes`` is the load on the rank's device by model chunk, including
    recomputation. ``optimizer_load`` is the load at the end of a step. ``recomputed_layers`` is the
    number of recomputed layers per chunk, if it was chosen here. ``weights`` is the number of
    weights of a rank, without adapters.
    """

    name: str
    layers: int
    ranks: int
    memory: MemoryEstimate
    flops: tuple[float, ...]
    passes: tuple[PassLoads, ...]
    optimizer_load: Workload
    recomputed_layers: int = 0
    weights: int = 0


@dataclass(frozen=True)
class Forecast:
    """Load and memory of all stages.

    ``flops_per_step`` are the model's FLOP per step over all ranks. ``eager`` selects the eager
    variant of the pipeline schedule, see :mod:`.pipeline`.
    """

    stages: tuple[StageForecast, ...]
    micro_batches: int
    flops_per_step: float
    eager: bool = False

    def simulate(self, devices: Sequence[DevicePeaks]) -> SimulatedStep:
        """Simulate a step on the given devices, one per stage. Communication is assumed to be
        hidden.
        """
        passes = [
            StagePassTimes(
                tuple(loads.forward.duration(device) for loads in stage.passes),
                tuple(loads.backward.duration(device) for loads in stage.passes),
            )
            for stage, device in zip(self.stages, devices, strict=True)
        ]
        simulated = simulate_step(passes, self.micro_batches, eager=self.eager)
        optimizer_seconds = [
            stage.optimizer_load.duration(device)
            for stage, device in zip(self.stages, devices, strict=True)
        ]
        busy_seconds = tuple(
            a + b for a, b in zip(simulated.busy_seconds, optimizer_seconds, strict=True)
        )
        return SimulatedStep(simulated.seconds + max(optimizer_seconds), busy_seconds)

    @property
    def relative_flops(self) -> tuple[float, ...]:
        """FLOP of one rank of each stage, relative to a rank of the stage that has the most."""
        max_flops = max(sum(stage.flops) for stage in self.stages)
        return tuple(sum(stage.flops) / max_flops for stage in self.stages)


def forecast_step(
    args: Namespace,
    vocabulary_size: int,
    memory_limits: Sequence[float] | None = None,
) -> Forecast:
    """Calculate load and memory for the resolved arguments of a whole job.

    Args:
        args: result of :func:`flagscale.config.arguments.derive.derive_arguments`.
        vocabulary_size: the padded vocabulary size.
        memory_limits: bytes that a rank of each stage may use. With ``recompute_granularity: auto``
            as few layers are recomputed as fit into them; if nothing fits, the choice with the
            least memory is used. None means unlimited.
    """
    limits = repeat(math.inf) if memory_limits is None else iter(memory_limits)
    meshes: Meshes | None = args.meshes
    layer_kinds = arithmetic.list_layer_kinds(args)
    tokens = float(args.global_batch_size * args.seq_length)
    flops = tokens * arithmetic.flops_per_token(args, vocabulary_size)
    if meshes is None:
        counts = layers_of_stages(vars(args))
        rank_args = rank_arguments(args, 0)
        if args.shares is not None:  # the replica with the largest micro-batches
            rank_args.micro_batch_size = max(share.size for share in args.shares)
        dp = rank_args.data_parallel_size
        stages = [
            _forecast_fitting_stage(
                _StagePosition(vocabulary_size, layer_kinds, counts, index, f"stage {index}", dp),
                rank_args,
                next(limits),
            )
            for index in range(len(counts))
        ]
        return Forecast(tuple(stages), rank_args.num_microbatches, flops)
    chunks = meshes.chunks
    counts = [(stage.layers // chunks,) * chunks for stage in meshes.stages]
    mesh_stages = []
    for stage in meshes.stages:
        rank_args, mesh = rank_arguments(args, stage.first_rank), stage.mesh
        name = f"stage {stage.index}, mesh {stage.mesh_index} ({mesh.format()})"
        position = _StagePosition(
            vocabulary_size, layer_kinds, counts, stage.index, name, mesh.dp, meshes.eager
        )
        mesh_stages.append(_forecast_fitting_stage(position, rank_args, next(limits)))
    return Forecast(tuple(mesh_stages), args.num_microbatches, flops, meshes.eager)


def find_distinct_stages(args: Namespace) -> dict[int, int]:
    """Return the stages of a homogeneous job that differ, with the number of stages like each.

    Of stages with the same layers, none of which is the first or the last one, the first takes the
    most memory, and stands for all.
    """
    counts, kinds = layers_of_stages(vars(args)), arithmetic.list_layer_kinds(args)
    stages: dict[Any, list[int]] = {}
    for index, stage_counts in enumerate(counts):
        is_end = index in (0, len(counts) - 1)
        layers: Any = stage_counts
        if len(set(kinds)) > 1:
            layers = tuple(
                tuple(kinds[number] for number in _chunk_layers(counts, index, chunk))
                for chunk in range(len(stage_counts))
            )
        stages.setdefault((index if is_end else None, layers), []).append(index)
    return {indices[0]: len(indices) for indices in stages.values()}


def forecast_memory(
    args: Namespace, vocabulary_size: int, stage_indices: Sequence[int]
) -> tuple[MemoryEstimate, ...]:
    """Return the memory of a rank of some stages of a homogeneous job, as :func:`forecast_step`
    does. The arguments must state which layers are recomputed.
    """
    counts, kinds = layers_of_stages(vars(args)), arithmetic.list_layer_kinds(args)
    estimates = []
    for index in stage_indices:
        rank_args = _unify_recomputation(args, index, len(counts))
        position = _StagePosition(
            vocabulary_size, kinds, counts, index, f"stage {index}", args.data_parallel_size
        )
        part, _ = _model_part(position, rank_args)
        estimates.append(memory.estimate_rank_memory(rank_args, vocabulary_size, part))
    return tuple(estimates)


@dataclass(frozen=True)
class _StagePosition:
    """Position of a stage in the pipeline.

    ``layer_kinds`` are the model's layers; ``layer_counts`` is the number of layers of each stage
    by chunk; ``stage_index`` is the stage's own index.
    """

    vocabulary: int
    layer_kinds: Sequence[LayerKind]
    layer_counts: Sequence[tuple[int, ...]]
    stage_index: int
    name: str
    replicas: int
    eager: bool = False


def _forecast_fitting_stage(
    position: _StagePosition, rank_args: Namespace, limit_bytes: float
) -> StageForecast:
    """Return a stage whose ranks have ``rank_args`` and may use ``limit_bytes`` each."""
    rank_args = _unify_recomputation(rank_args, position.stage_index, len(position.layer_counts))
    if rank_args.recompute_granularity != RECOMPUTE_AUTO:
        return _forecast_stage(position, rank_args)
    candidates = [
        replace(
            _forecast_stage(position, with_recomputed_layers(rank_args, layers)),
            recomputed_layers=layers,
        )
        for layers in range(max(position.layer_counts[position.stage_index]) + 1)
    ]
    smallest = min(candidates, key=lambda way: way.memory.total)
    return next((way for way in candidates if way.memory.total <= limit_bytes), smallest)


def with_recomputed_layers(args: Namespace, layers: int) -> Namespace:
    """Return arguments that recompute the first ``layers`` layers of each model chunk."""
    new_args = copy(args)
    new_args.recompute_granularity = "full" if layers else None
    new_args.recompute_method = "block" if layers else None
    new_args.recompute_num_layers = layers or None
    return new_args


def _model_part(
    position: _StagePosition, rank_args: Namespace
) -> tuple[ModelPart, list[list[LayerKind]]]:
    """Return the part of the model that a rank of a stage holds, and the layers of its chunks."""
    counts, index = position.layer_counts, position.stage_index
    numbers = [_chunk_layers(counts, index, chunk) for chunk in range(len(counts[index]))]
    chunks = [[position.layer_kinds[number] for number in chunk] for chunk in numbers]
    max_in_flight = count_warmup_passes(len(counts), index, len(chunks), eager=position.eager) + 1
    in_flight = min(max_in_flight, rank_args.num_microbatches * len(chunks))
    part = ModelPart(
        tuple(kind for chunk in chunks for kind in chunk),
        index == 0,
        index == len(counts) - 1,
        in_flight / len(chunks),
        tuple(number for chunk in numbers for number in chunk),
    )
    return part, chunks


@dataclass(frozen=True)
class StageLoads:
    """Load of one rank of a stage, see :class:`StageForecast`. ``trained`` is the number of weights
    that it trains.
    """

    layers: int
    ranks: int
    flops: tuple[float, ...]
    passes: tuple[PassLoads, ...]
    optimizer_load: Workload
    trained: int


def forecast_loads(
    args: Namespace, vocabulary_size: int, stage_indices: Sequence[int]
) -> tuple[StageLoads, ...]:
    """Return the load of some stages of a homogeneous job, as :func:`forecast_step` does."""
    counts, kinds = layers_of_stages(vars(args)), arithmetic.list_layer_kinds(args)
    loads = []
    for index in stage_indices:
        rank_args = _unify_recomputation(args, index, len(counts))
        position = _StagePosition(
            vocabulary_size, kinds, counts, index, f"stage {index}", args.data_parallel_size
        )
        loads.append(_stage_loads(position, rank_args, *_model_part(position, rank_args)))
    return tuple(loads)


def _stage_loads(
    position: _StagePosition,
    rank_args: Namespace,
    part: ModelPart,
    chunks: Sequence[Sequence[LayerKind]],
) -> StageLoads:
    tp, vocabulary = rank_args.tensor_model_parallel_size, position.vocabulary
    flops_factor = training_factor(rank_args) * memory.count_microbatch_tokens(rank_args) / tp
    kind_flops = {kind: arithmetic.layer_flops(rank_args, kind) for kind in set(part.layers)}
    flops = [flops_factor * sum(kind_flops[kind] for kind in chunk) for chunk in chunks]
    load_by_chunk = {chunk: _chunk_load(rank_args, chunk) for chunk in set(map(tuple, chunks))}
    passes = [load_by_chunk[tuple(chunk)] for chunk in chunks]
    if part.has_head:
        flops[-1] += flops_factor * arithmetic.head_flops(rank_args, vocabulary)
        flops[-1] += flops_factor * arithmetic.mtp_flops(rank_args, vocabulary)
        passes[-1] += op_times.head_load(rank_args, vocabulary)
        passes[-1] += op_times.mtp_load(rank_args, vocabulary)
    return StageLoads(
        len(part.layers),
        tp * rank_args.context_parallel_size * position.replicas,
        tuple(flops),
        tuple(passes),
        op_times.optimizer_load(rank_args, vocabulary, part),
        memory.count_trainable_weights(rank_args, vocabulary, part).all,
    )


def _forecast_stage(position: _StagePosition, rank_args: Namespace) -> StageForecast:
    part, chunks = _model_part(position, rank_args)
    loads = _stage_loads(position, rank_args, part, chunks)
    return StageForecast(
        position.name,
        loads.layers,
        loads.ranks,
        memory.estimate_rank_memory(rank_args, position.vocabulary, part),
        loads.flops,
        loads.passes,
        loads.optimizer_load,
        weights=memory.count_weights(rank_args, position.vocabulary, part).all,
    )


def _chunk_load(rank_args: Namespace, chunk: Sequence[LayerKind]) -> PassLoads:
    """Return the load of a chunk's layers."""
    load_by_kind = {kind: op_times.layer_load(rank_args, kind) for kind in set(chunk)}
    total = PassLoads()
    for kind, count in Counter(chunk).items():
        total += load_by_kind[kind].scale(count)
    for kind, count in Counter(chunk[: _count_recomputed(rank_args, len(chunk))]).items():
        total += PassLoads(backward=load_by_kind[kind].forward.scale(count))
    return total


def _count_recomputed(args: Any, layers: int) -> int:
    """Return the number of a chunk's layers that are recomputed in the backward pass."""
    if args.recompute_granularity != "full":
        return 0
    return (
        min(args.recompute_num_layers or 1, layers) if args.recompute_method == "block" else layers
    )


def _unify_recomputation(rank_args: Namespace, stage_index: int, stages: int) -> Namespace:
    """Return arguments with one choice of recomputation for all micro-batches of a stage.

    If the choices differ, the one that keeps the most activations is used.
    """
    schedule = recompute_plan(vars(rank_args), rank_args.num_microbatches)
    if schedule is None:
        return rank_args
    choices = [choice for chunk in schedule[stage_index::stages] for choice in chunk]
    recomputed = [choice for choice in choices if choice is not None]
    new_args = copy(rank_args)
    if len(recomputed) < len(choices):
        new_args.recompute_granularity = None
    else:
        smallest_choice = min(recomputed, key=lambda choice: choice.layers)
        new_args.recompute_method, new_args.recompute_num_layers = (
            smallest_choice.method,
            smallest_choice.layers,
        )
    return new_args


def _chunk_layers(counts: Sequence[tuple[int, ...]], index: int, chunk: int) -> range:
    """Return the numbers of the layers of one chunk of a stage. A chunk of all stages precedes the
    next chunk of any.
    """
    offset = sum(sum(stage[:chunk]) for stage in counts)
    offset += sum(stage[chunk] for stage in counts[:index])
    return range(offset, offset + counts[index][chunk])
