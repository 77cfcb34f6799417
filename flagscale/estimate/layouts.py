"""Which parallel sizes each mesh should have, of as many ranks as it has devices.

What is chosen: of each mesh the tensor, data and pipeline parallel sizes, how many sequences a
micro-batch has, and how many layers each stage. Every choice is judged by playing a step of its
best split of layers, with what a layer takes for each tensor parallel size and number of sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flagscale.config.arguments import layout
from flagscale.config.arguments.meshes import Mesh, Meshes, with_layers
from flagscale.config.arguments.precision import Values
from flagscale.estimate import split
from flagscale.estimate.costs import Cost, Costs
from flagscale.estimate.split import Problem, Step

_MOST_STAGES = 8
"""Pipeline stages inside a mesh: more of them seldom win, and are many to judge."""


@dataclass(frozen=True, order=True)
class Trial:
    """What is measured of a mesh: a layer with this tensor parallel size, of so many sequences."""

    tp: int
    sequences: int


Measured = Mapping[tuple[int, Trial], Costs]
"""Costs of a rank by the number of its mesh and what was tried."""


@dataclass(frozen=True)
class Chosen:
    """Meshes with sizes and layers, and what a step of theirs takes."""

    meshes: Meshes
    problem: Problem
    step: Step

    @property
    def layers(self) -> split.Layers:
        return tuple(stage.layers for stage in self.meshes.stages)


def trials(values: Values, mesh: Mesh, on_a_host: int) -> list[Trial]:
    """What is to be measured of a mesh whose hosts have ``on_a_host`` ranks each: tensor
    parallelism stays inside a host, and a rank takes at most ``micro_batch_size`` sequences."""
    sizes = [
        tp
        for tp in range(1, min(mesh.ranks, on_a_host) + 1)
        if mesh.ranks % tp == 0 and on_a_host % tp == 0 and layout.divides(values, tp)
    ]
    sequences = list(_doubled(values["micro_batch_size"]))
    return [Trial(tp, count) for tp in sizes for count in sequences]


def _doubled(most: int) -> Iterator[int]:
    """1, 2, 4 … below ``most``, and that."""
    yield from itertools.takewhile(lambda count: count < most, (2**n for n in range(64)))
    yield most


def every(values: Values, meshes: Meshes, tried: Sequence[Sequence[Trial]]) -> Iterator[Meshes]:
    """All sizes that the meshes may have, with layers shared out evenly.

    Args:
        values: arguments; ``global_batch_size`` is known.
        meshes: open ones.
        tried: what can be measured of each.
    """
    shapes = [list(_shapes(mesh, own)) for mesh, own in zip(meshes.meshes, tried, strict=True)]
    for several in itertools.product(*shapes):
        stages = sum(mesh.pp for mesh in several)
        if stages < 2 or stages * meshes.chunks > values["num_layers"]:
            continue
        for sequences in _sequences(values, meshes.chunks, several, tried):
            yield replace(meshes, meshes=several, sequences=sequences)


def _shapes(mesh: Mesh, tried: Sequence[Trial]) -> Iterator[Mesh]:
    for tp in sorted({trial.tp for trial in tried}):
        left = mesh.ranks // tp
        for pp in range(1, min(left, _MOST_STAGES) + 1):
            if left % pp == 0:
                yield Mesh(tp=tp, dp=left // pp, pp=pp, device_type=mesh.device_type)


def _sequences(
    values: Values, chunks: int, meshes: Sequence[Mesh], tried: Sequence[Sequence[Trial]]
) -> Iterator[int]:
    """How many sequences a micro-batch may have: the first mesh's replicas have all as many, the
    last one's too unless the loss is per token, and each mesh's a number that was tried."""
    batch, stages = values["global_batch_size"], sum(mesh.pp for mesh in meshes)
    for each in sorted({trial.sequences for trial in tried[0]}):
        count = each * meshes[0].dp
        if batch % count or (chunks > 1 and batch // count % stages):
            continue
        if count % meshes[-1].dp and not values["calculate_per_token_loss"]:
            continue
        if all(
            count >= mesh.dp and trial_of(mesh, count) in own
            for mesh, own in zip(meshes, tried, strict=True)
        ):
            yield count


def trial_of(mesh: Mesh, sequences: int) -> Trial:
    """What was to be measured of a mesh in a layout with so many sequences a micro-batch."""
    return Trial(mesh.tp, -(-sequences // mesh.dp))


def choose(
    values: Values,
    layouts: Sequence[Meshes],
    measured: Measured,
    kinds: tuple[str, ...],
) -> list[Chosen]:
    """All layouts with their best split of layers, the best first; what does not fit, last."""
    found = [_judged(values, meshes, measured, kinds) for meshes in layouts]
    return sorted(found, key=lambda chosen: (*chosen.step.rank, chosen.meshes.describe()))


def _judged(values: Values, meshes: Meshes, measured: Measured, kinds: tuple[str, ...]) -> Chosen:
    costs = tuple(
        _with_replicas(values, mesh, measured[index, trial_of(mesh, meshes.sequences)])
        for index, mesh in enumerate(meshes.meshes)
    )
    problem = Problem(meshes, costs, kinds, values["global_batch_size"] // meshes.sequences)
    layers = split.best(problem)
    chosen = replace(meshes, meshes=with_layers(meshes.meshes, layers))
    return Chosen(chosen, problem, problem.step(layers))


def _with_replicas(values: Values, mesh: Mesh, costs: Costs) -> Costs:
    """Costs that were measured with all ranks of the mesh in one stage, of the fewer replicas that
    stages leave: each has more of the optimizer's state, and of its work."""
    if mesh.pp == 1 or not values["use_distributed_optimizer"]:
        return costs
    short = bool(values["bf16"] or values["fp16"])
    model, state = (6.0, 12.0) if short else (8.0, 8.0)
    more = (model + state / mesh.dp) / (model + state / (mesh.dp * mesh.pp))

    def grown(cost: Cost) -> Cost:
        return replace(cost, held=cost.held * more, after=cost.after * mesh.pp)

    return Costs(
        {kind: grown(cost) for kind, cost in costs.layers.items()},
        grown(costs.embedding),
        grown(costs.head),
        costs.memory,
    )


SHOWN = 3
"""Of all layouts so many are told of."""


def reasons(found: Sequence[Chosen], count: int) -> Iterator[str]:
    """What was chosen of ``count`` layouts, the best of which are ``found``, and what is next."""
    best = found[0]
    yield (
        f"of {count} layouts: {best.meshes.describe()}, micro-batches of "
        f"{best.meshes.sequences} sequences"
    )
    for other in found[1:SHOWN]:
        more = other.step.seconds / best.step.seconds - 1
        fits = ", more memory than there is" if other.step.over else ""
        yield (
            f"next: {other.meshes.describe()}, of {other.meshes.sequences} sequences: {more:+.0%}"
            f"{fits}"
        )
    yield from split.reasons(best.problem, best.layers)
