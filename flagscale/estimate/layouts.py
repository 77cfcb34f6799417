"""Search for the parallel sizes of each mesh, given the number of its devices.

The search selects the tensor, data and pipeline parallel size of each mesh, the number of
sequences per micro-batch, and the number of layers per stage. Each candidate is evaluated by
simulating a step of its best split of layers, with measured costs of a layer for each tensor
parallel size and number of sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flagscale.config.arguments.hetero.meshes import Mesh, Meshes, with_layers
from flagscale.config.arguments.rules.parallel_layout import can_split_tensors
from flagscale.config.arguments.spec.argument import Values
from flagscale.estimate import split
from flagscale.estimate.costs import PartCost, RankCosts
from flagscale.estimate.split import SplitProblem, SplitStep

_MAX_STAGES = 8
"""Maximum number of pipeline stages within a mesh: more are rarely faster, and expensive to
evaluate.
"""


@dataclass(frozen=True, order=True)
class LayerTrial:
    """Measurement of one layer on a mesh, with a tensor parallel size and a number of sequences per
    rank and micro-batch.
    """

    tp: int
    sequences: int


MeasuredCosts = Mapping[tuple[int, LayerTrial], RankCosts]
"""Costs of a rank by the index of its mesh and the measurement."""


@dataclass(frozen=True)
class LayoutCandidate:
    """Meshes with parallel sizes and layers, and the simulated step."""

    meshes: Meshes
    problem: SplitProblem
    step: SplitStep

    @property
    def layers(self) -> split.LayerCounts:
        return tuple(stage.layers for stage in self.meshes.stages)


def list_trials(values: Values, mesh: Mesh, ranks_per_host: int) -> list[LayerTrial]:
    """Return the measurements of a mesh whose hosts have ``ranks_per_host`` ranks each.

    Tensor parallelism stays within a host, and a rank has at most ``micro_batch_size``
    sequences.
    """
    sizes = [
        tp
        for tp in range(1, min(mesh.ranks, ranks_per_host) + 1)
        if mesh.ranks % tp == 0 and ranks_per_host % tp == 0 and can_split_tensors(values, tp)
    ]
    sequences = list(_powers_of_two(values["micro_batch_size"]))
    return [LayerTrial(tp, count) for tp in sizes for count in sequences]


def _powers_of_two(maximum: int) -> Iterator[int]:
    """Yield the powers of two below ``maximum``, then ``maximum``."""
    yield from itertools.takewhile(lambda count: count < maximum, (2**n for n in range(64)))
    yield maximum


def enumerate_layouts(
    values: Values, meshes: Meshes, trials: Sequence[Sequence[LayerTrial]]
) -> Iterator[Meshes]:
    """Yield all layouts of the meshes, with layers distributed evenly.

    Args:
        values: arguments, with ``global_batch_size`` set.
        meshes: meshes without sizes.
        trials: possible measurements of each mesh.
    """
    shapes = [
        list(_enumerate_shapes(mesh, mesh_trials))
        for mesh, mesh_trials in zip(meshes.meshes, trials, strict=True)
    ]
    for sized_meshes in itertools.product(*shapes):
        stages = sum(mesh.pp for mesh in sized_meshes)
        if stages < 2 or stages * meshes.chunks > values["num_layers"]:
            continue
        for sequences in _microbatch_sizes(values, meshes.chunks, sized_meshes, trials):
            yield replace(meshes, meshes=sized_meshes, sequences=sequences)


def _enumerate_shapes(mesh: Mesh, trials: Sequence[LayerTrial]) -> Iterator[Mesh]:
    for tp in sorted({trial.tp for trial in trials}):
        ranks_per_tp = mesh.ranks // tp
        for pp in range(1, min(ranks_per_tp, _MAX_STAGES) + 1):
            if ranks_per_tp % pp == 0:
                yield Mesh(tp=tp, dp=ranks_per_tp // pp, pp=pp, device_type=mesh.device_type)


def _microbatch_sizes(
    values: Values, chunks: int, meshes: Sequence[Mesh], trials: Sequence[Sequence[LayerTrial]]
) -> Iterator[int]:
    """Yield the possible numbers of sequences per micro-batch.

    All replicas of the first mesh have the same number, and those of the last mesh unless the
    loss is per token. Each mesh's number must have been measured.
    """
    batch, stages = values["global_batch_size"], sum(mesh.pp for mesh in meshes)
    for per_replica in sorted({trial.sequences for trial in trials[0]}):
        sequences = per_replica * meshes[0].dp
        if batch % sequences or (chunks > 1 and batch // sequences % stages):
            continue
        if sequences % meshes[-1].dp and not values["calculate_per_token_loss"]:
            continue
        if all(
            sequences >= mesh.dp and trial_for(mesh, sequences) in mesh_trials
            for mesh, mesh_trials in zip(meshes, trials, strict=True)
        ):
            yield sequences


def trial_for(mesh: Mesh, sequences: int) -> LayerTrial:
    """Return the measurement of a mesh for a layout with that many sequences per micro-batch."""
    return LayerTrial(mesh.tp, -(-sequences // mesh.dp))


def rank_layouts(
    values: Values,
    layouts: Sequence[Meshes],
    measured_costs: MeasuredCosts,
    kinds: tuple[str, ...],
) -> list[LayoutCandidate]:
    """Return all layouts with their best split of layers, best first; layouts that do not fit are
    last.

    ``kinds`` is the kind of each layer of the model, in order.
    """
    candidates = [_evaluate_layout(values, meshes, measured_costs, kinds) for meshes in layouts]
    return sorted(candidates, key=lambda chosen: (*chosen.step.sort_key, chosen.meshes.describe()))


def _evaluate_layout(
    values: Values, meshes: Meshes, measured_costs: MeasuredCosts, kinds: tuple[str, ...]
) -> LayoutCandidate:
    costs = tuple(
        _adjust_replicas(values, mesh, measured_costs[index, trial_for(mesh, meshes.sequences)])
        for index, mesh in enumerate(meshes.meshes)
    )
    problem = SplitProblem(meshes, costs, kinds, values["global_batch_size"] // meshes.sequences)
    layers = split.find_best_split(problem)
    split_meshes = replace(meshes, meshes=with_layers(meshes.meshes, layers))
    return LayoutCandidate(split_meshes, problem, problem.simulate_step(layers))


def _adjust_replicas(values: Values, mesh: Mesh, costs: RankCosts) -> RankCosts:
    """Adjust costs that were measured with all ranks of the mesh in a single stage.

    Several stages leave fewer replicas per stage, so each has a larger shard of the optimizer's
    state and more of its work.
    """
    if mesh.pp == 1 or not values["use_distributed_optimizer"]:
        return costs
    is_16bit = bool(values["bf16"] or values["fp16"])
    model_bytes, state_bytes = (6.0, 12.0) if is_16bit else (8.0, 8.0)
    static_factor = (model_bytes + state_bytes / mesh.dp) / (
        model_bytes + state_bytes / (mesh.dp * mesh.pp)
    )

    def adjust(cost: PartCost) -> PartCost:
        return replace(
            cost,
            static_bytes=cost.static_bytes * static_factor,
            step_seconds=cost.step_seconds * mesh.pp,
        )

    return RankCosts(
        {kind: adjust(cost) for kind, cost in costs.layers.items()},
        adjust(costs.embedding),
        adjust(costs.head),
        costs.memory_limit_bytes,
    )


MAX_REPORTED_LAYOUTS = 3
"""Maximum number of layouts that are described."""


def explain_layout(candidates: Sequence[LayoutCandidate], count: int) -> Iterator[str]:
    """Describe the best of ``count`` layouts, and the next ones. ``candidates`` is sorted, best
    first."""
    best = candidates[0]
    yield (
        f"of {count} layouts: {best.meshes.describe()}, micro-batches of "
        f"{best.meshes.sequences} sequences"
    )
    for candidate in candidates[1:MAX_REPORTED_LAYOUTS]:
        relative_excess = candidate.step.seconds / best.step.seconds - 1
        excess_note = ", more memory than there is" if candidate.step.excess_bytes else ""
        yield (
            f"next: {candidate.meshes.describe()}, of {candidate.meshes.sequences} sequences: "
            f"{relative_excess:+.0%}{excess_note}"
        )
    yield from split.explain_split(best.problem, best.layers)
