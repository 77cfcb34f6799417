"""Calculated load and memory of the ranks of each pipeline stage, without measurements."""

from __future__ import annotations

import math
from argparse import Namespace
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import Any, NamedTuple

from flagscale.config.arguments.derive import rank_arguments
from flagscale.config.arguments.hetero.meshes import Meshes
from flagscale.config.arguments.layout import tokens_per_sample
from flagscale.config.arguments.rules.parallel_layout import layers_of_stages
from flagscale.config.arguments.rules.recompute import (
    NO_MODULES,
    ModuleChoice,
    module_choice,
    recompute_plan,
)
from flagscale.config.arguments.spec.system_arguments import RECOMPUTE_AUTO
from flagscale.estimate import arithmetic, memory, module_recompute, op_times
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
    number of recomputed layers per chunk and ``recomputed_modules`` the choice of modules in the
    other layers, if they were chosen here. ``weights`` is the number of
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
    recomputed_modules: ModuleChoice = NO_MODULES

    def describe_recomputation(self) -> list[str]:
        """Return what recomputation was chosen here, such as ``["3 layers", "mlp of 5"]``."""
        chunks = len(self.flops)
        layers = self.layers // chunks
        modules = self.recomputed_modules
        parts = [f"{self.recomputed_layers} layers"] if self.recomputed_layers else []
        first = layers if modules.layers is None else modules.layers
        for names, count in (
            (modules.modules, first - self.recomputed_layers),
            (modules.other_modules, layers - first),
        ):
            if names and count > 0:
                parts.append(f"{'+'.join(names)} of {count}")
        return parts


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
            the cheapest recomputation is used that fits into them; if nothing fits, the one with
            the least memory. None means unlimited.
    """
    limits = repeat(math.inf) if memory_limits is None else iter(memory_limits)
    meshes: Meshes | None = args.meshes
    layer_kinds = arithmetic.list_layer_kinds(args)
    tokens = float(args.global_batch_size * tokens_per_sample(vars(args)))
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
    return tuple(
        memory.estimate_rank_memory(rank_args, vocabulary_size, _model_part(position, rank_args)[0])
        for position, rank_args in _iter_stages(args, vocabulary_size, stage_indices)
    )


def _iter_stages(
    args: Namespace, vocabulary_size: int, stage_indices: Sequence[int]
) -> Iterator[tuple[_StagePosition, Namespace]]:
    """Yield some stages of a homogeneous job with the arguments of their ranks."""
    counts, kinds = layers_of_stages(vars(args)), arithmetic.list_layer_kinds(args)
    for index in stage_indices:
        yield (
            _StagePosition(
                vocabulary_size, kinds, counts, index, f"stage {index}", args.data_parallel_size
            ),
            _unify_recomputation(args, index, len(counts)),
        )


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

    def forecast(choice: _Choice) -> StageForecast:
        changed_args = with_recomputed_layers(rank_args, choice.layers, choice.modules)
        return replace(
            _forecast_stage(position, changed_args),
            recomputed_layers=choice.layers,
            recomputed_modules=choice.modules,
        )

    smallest = None
    for choices in _recompute_choices(position, rank_args):
        strongest = forecast(choices[-1])
        if strongest.memory.total <= limit_bytes:
            return _first_fitting(choices, forecast, limit_bytes)
        if smallest is None or strongest.memory.total < smallest.memory.total:
            smallest = strongest
    assert smallest is not None
    return smallest


def _first_fitting(
    choices: Sequence[_Choice], forecast: Callable[[_Choice], StageForecast], limit_bytes: float
) -> StageForecast:
    """Return the stage with the first choice that fits, if each takes less memory than the one
    before and the last one fits.
    """
    stages: dict[int, StageForecast] = {}

    def fits(index: int) -> bool:
        stages[index] = forecast(choices[index])
        return stages[index].memory.total <= limit_bytes

    index = bisect_left(range(len(choices) - 1), True, key=fits)
    return stages[index] if index in stages else forecast(choices[index])


class _Choice(NamedTuple):
    """Number of layers of each chunk to recompute whole, and modules of the other layers."""

    layers: int
    modules: ModuleChoice


def _recompute_choices(
    position: _StagePosition, rank_args: Namespace
) -> Iterator[Sequence[_Choice]]:
    """Yield choices of recomputation, from the cheapest to those with the least memory.

    They go through a list of levels, from nothing over more and more modules to whole layers, and
    raise one more layer of a chunk at a time. The choices of a level are yielded together.
    """
    layers = max(position.layer_counts[position.stage_index])
    first = sum(sum(counts) for counts in position.layer_counts[: position.stage_index])
    kind = position.layer_kinds[min(first + layers, len(position.layer_kinds)) - 1]
    levels = _order_modules(rank_args, kind)
    counts = range(1, layers + 1)
    yield [_Choice(0, NO_MODULES)]
    for lower, upper in pairwise(levels):
        yield [
            _Choice(0, ModuleChoice(upper, None if count == layers else count, lower))
            for count in counts
        ]
    yield [_Choice(count, ModuleChoice(levels[-1])) for count in counts]


_NOMINAL_DEVICE = DevicePeaks(989e12, 3.35e12)
"""Device on which costs of recomputation are compared, if the actual one is not known: an H100."""


_MAX_RELATIVE_COST = 0.9
"""Cost of recomputing a module, relative to that of whole layers, up to which it is worthwhile."""


def _order_modules(rank_args: Namespace, kind: LayerKind) -> list[tuple[str, ...]]:
    """Return sets of modules to recompute, each of which contains the previous ones.

    Modules are ordered by their cost: seconds of recomputation per byte that is not kept. Modules
    that cost more than whole layers are left out.
    """

    def cost(load: Workload, saved_bytes: float) -> float:
        # Launches overlap with the rest of the layer.
        seconds = replace(load, launches=0.0).duration(_NOMINAL_DEVICE)
        return seconds / saved_bytes if saved_bytes else math.inf

    whole_cost = cost(
        op_times.layer_load(rank_args, kind).forward, memory.whole_layer_saving(rank_args, kind)
    )
    costs = {
        module: cost(
            op_times.module_recompute_load(rank_args, kind, [module]),
            memory.discarded_bytes(rank_args, kind, [module]),
        )
        for module in module_recompute.candidate_modules(rank_args, [kind])
    }
    cheap_modules = [
        module
        for module in sorted(costs, key=costs.__getitem__)
        if costs[module] < _MAX_RELATIVE_COST * whole_cost
    ]
    return [tuple(cheap_modules[:count]) for count in range(len(cheap_modules) + 1)]


def list_module_levels(args: Namespace) -> list[tuple[str, ...]]:
    """Return sets of modules that cost less to recompute than whole layers, per byte that is not
    kept. Each contains the previous one; the first is empty.

    The kind of the model's last layer decides.
    """
    return _order_modules(args, arithmetic.list_layer_kinds(args)[-1])


def count_hidden_offloads(args: Namespace) -> int:
    """Return how many layers of each model chunk can be copied to the host and back while the chunk
    computes. The smallest chunk decides.
    """
    counts = [count for stage in layers_of_stages(vars(args)) for count in stage if count]
    return max(min(int(min(counts) * hidden_offload_fraction(args)), min(counts) - 1), 0)


def hidden_offload_fraction(args: Namespace) -> float:
    """Return the time of a layer's forward pass relative to that of copying its activations.

    The kind of the model's last layer decides.
    """
    kind = arithmetic.list_layer_kinds(args)[-1]
    trial = copy(args)
    trial.cpu_offloading_num_layers = 1
    layer_bytes = memory.offloaded_bytes(trial, [kind, kind])[0]
    forward = op_times.layer_load(args, kind).forward.duration(_NOMINAL_DEVICE)
    return forward / Workload(copied_bytes=layer_bytes).duration(_NOMINAL_DEVICE)


def with_recomputed_layers(
    args: Namespace, layers: int, modules: ModuleChoice = NO_MODULES
) -> Namespace:
    """Return arguments that recompute the first ``layers`` layers of each model chunk, and
    ``modules`` of the others.
    """
    new_args = copy(args)
    rest = "selective" if modules else None
    new_args.recompute_granularity = "full" if layers else rest
    new_args.recompute_method = "block" if layers else None
    new_args.recompute_num_layers = layers or None
    new_args.recomputed_modules = modules
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
        tuple(len(chunk) for chunk in chunks),
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
    return tuple(
        _stage_loads(position, rank_args, *_model_part(position, rank_args))
        for position, rank_args in _iter_stages(args, vocabulary_size, stage_indices)
    )


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
    loads_of_kind = {kind: op_times.layer_load(rank_args, kind) for kind in set(chunk)}
    whole_layers, choice = _count_recomputed(rank_args, len(chunk)), module_choice(rank_args)
    total = PassLoads()
    for kind, count in Counter(chunk).items():
        total += loads_of_kind[kind].scale(count)
    recomputed = Workload()
    for kind, count in Counter(chunk[:whole_layers]).items():
        recomputed += loads_of_kind[kind].forward.scale(count)
    if choice:
        parts = [(kind, choice.of_layer(index)) for index, kind in enumerate(chunk)]
        for (kind, modules), count in Counter(parts[whole_layers:]).items():
            recomputed += op_times.module_recompute_load(rank_args, kind, modules).scale(count)
    copies = Workload(copied_bytes=sum(memory.offloaded_bytes(rank_args, chunk)))
    return total + PassLoads(copies, recomputed + copies)


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
