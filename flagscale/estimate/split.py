"""Search for the number of layers of each pipeline stage if stages are not equally fast.

Each split is evaluated by simulating a step. If there are too many splits, a local search moves
layers between stages. Layers are distributed in units: a unit is one layer in each model chunk of
a stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flagscale.config.arguments.hetero.meshes import Meshes, Stage
from flagscale.estimate.arithmetic import moe_layer_flags
from flagscale.estimate.costs import DENSE, MIXTURE, PartCost, RankCosts
from flagscale.estimate.pipeline import StagePassTimes, count_warmup_passes, simulate_step
from flagscale.estimate.step_time import format_seconds

_GIB = 2**30
_MAX_EXHAUSTIVE_SPLITS = 4000
"""Maximum number of splits for an exhaustive search."""

LayerCounts = tuple[int, ...]
"""Number of layers of each stage."""

_SortKey = Callable[[LayerCounts], tuple[float, float]]


@dataclass(frozen=True)
class SplitStep:
    """Simulated step of a split.

    ``busy_seconds`` is the time in which each stage computes, ``memory_bytes`` the memory of a rank
    of each stage, and ``excess_bytes`` the largest excess over a device's memory.
    """

    seconds: float
    busy_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    excess_bytes: float

    @property
    def sort_key(self) -> tuple[float, float]:
        """Sort key, lower is better: any split that fits precedes those that do not."""
        return self.excess_bytes, self.seconds

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """Fraction of the step in which each stage waits."""
        return tuple(1.0 - busy / self.seconds for busy in self.busy_seconds)


@dataclass(frozen=True)
class SplitProblem:
    """Parameters of the search.

    Args:
        meshes: all meshes; their numbers of layers are ignored.
        costs: costs of a rank of each mesh.
        kinds: the kind of each layer of the model, in order.
        micro_batches: number per step.
        has_empty_first_stage: True if the first stage contains only the embedding.
    """

    meshes: Meshes
    costs: tuple[RankCosts, ...]
    kinds: tuple[str, ...]
    micro_batches: int
    has_empty_first_stage: bool = False

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.meshes.stages

    @cached_property
    def _preceding_counts(self) -> Mapping[str, LayerCounts]:
        """Number of layers of a kind that precede each layer."""
        return {
            kind: tuple(itertools.accumulate((k == kind for k in self.kinds), initial=0))
            for kind in set(self.kinds)
        }

    def chunk_costs(self, layers: LayerCounts) -> list[list[PartCost]]:
        """Return the cost of each model chunk of each stage."""
        chunk_costs: list[list[PartCost]] = [[] for _ in layers]
        first, chunks = 0, self.meshes.chunks
        for chunk, index in itertools.product(range(chunks), range(len(layers))):
            costs = self.costs[self.stages[index].mesh_index]
            last = first + layers[index] // chunks
            cost = PartCost()
            for kind, preceding in self._preceding_counts.items():
                cost += costs.layers[kind].scale(preceding[last] - preceding[first])
            if index == 0 and chunk == 0:
                cost += costs.embedding
            if index == len(layers) - 1 and chunk == chunks - 1:
                cost += costs.head
            chunk_costs[index].append(cost)
            first = last
        return chunk_costs

    def simulate_step(self, layers: LayerCounts) -> SplitStep:
        """Simulate a step of a split."""
        chunk_costs = self.chunk_costs(layers)
        passes = [
            StagePassTimes(
                tuple(p.forward_seconds for p in chunks), tuple(p.backward_seconds for p in chunks)
            )
            for chunks in chunk_costs
        ]
        simulated = simulate_step(passes, self.micro_batches, eager=self.meshes.eager)
        optimizer_seconds = [sum(part.step_seconds for part in chunks) for chunks in chunk_costs]
        memory_bytes = tuple(
            self._rank_memory(index, chunks) for index, chunks in enumerate(chunk_costs)
        )
        limits_bytes = [self.costs[stage.mesh_index].memory_limit_bytes for stage in self.stages]
        excess_bytes = max(
            (
                m - limit
                for m, limit in zip(memory_bytes, limits_bytes, strict=True)
                if limit is not None
            ),
            default=0.0,
        )
        busy_seconds = tuple(
            b + a for b, a in zip(simulated.busy_seconds, optimizer_seconds, strict=True)
        )
        return SplitStep(
            simulated.seconds + max(optimizer_seconds),
            busy_seconds,
            memory_bytes,
            max(excess_bytes, 0.0),
        )

    def _rank_memory(self, index: int, chunks: Sequence[PartCost]) -> float:
        """Return the bytes of a rank: static memory of its chunks, and activations of micro-batches
        in flight.
        """
        count = self.meshes.chunks
        max_in_flight = (
            count_warmup_passes(len(self.stages), index, count, eager=self.meshes.eager) + 1
        )
        in_flight = min(max_in_flight, self.micro_batches * count)
        static = sum(chunk.static_bytes for chunk in chunks)
        return static + in_flight * sum(chunk.activation_bytes for chunk in chunks) / count

    def even_split(self) -> LayerCounts:
        """Return the split with the same number of layers in each stage, up to one unit."""
        units = len(self.kinds) // self.meshes.chunks
        stages = len(self.stages) - self.has_empty_first_stage
        each, remainder = divmod(units, stages)
        counts = [each + (i < remainder) for i in range(stages)]
        return tuple(c * self.meshes.chunks for c in [0] * self.has_empty_first_stage + counts)


def layer_kinds(args: Any) -> tuple[str, ...]:
    """Return the kind of each layer of a model from its resolved arguments."""
    return tuple(MIXTURE if is_moe else DENSE for is_moe in moe_layer_flags(args))


def explain_split(problem: SplitProblem, layers: LayerCounts) -> Iterator[str]:
    """Describe a split: the step's duration, compared with an even split, and each stage's part of
    it.
    """
    step, even_layers = problem.simulate_step(layers), problem.even_split()
    text = f"layers {_format_layers(layers)}: by measured times a step takes "
    text += format_seconds(step.seconds)
    if even_layers != layers:
        even_step = problem.simulate_step(even_layers)
        excess = even_step.seconds / step.seconds - 1
        duration = format_seconds(even_step.seconds)
        text += f"; with {_format_layers(even_layers)} {duration}, {excess:+.0%}"
        text += " and more memory than there is" * (even_step.excess_bytes > 0)
    yield text
    for stage, busy, idle, memory in zip(
        problem.stages, step.busy_seconds, step.idle_fractions, step.memory_bytes, strict=True
    ):
        costs = problem.costs[stage.mesh_index]
        layer_times = ", ".join(
            f"{kind} {format_seconds(cost.pass_seconds)}"
            for kind, cost in sorted(costs.layers.items())
        )
        text = (
            f"stage {stage.index} ({stage.mesh.format()}): a layer takes a micro-batch "
            f"{layer_times}; {layers[stage.index]} of them keep it busy for "
            f"{format_seconds(busy)}, idle {idle:.0%}"
        )
        if costs.memory_limit_bytes is not None:
            text += f", {memory / _GIB:.1f} of {costs.memory_limit_bytes / _GIB:.1f} GiB"
        yield text
    if step.excess_bytes:
        yield (
            f"no split fits: this one takes {step.excess_bytes / _GIB:.1f} GiB more than a device "
            "of one stage has"
        )


def _format_layers(layers: LayerCounts) -> str:
    return "+".join(map(str, layers))


def find_best_split(problem: SplitProblem) -> LayerCounts:
    """Return the split with the shortest step among those that fit, or else the one with the least
    excess.
    """
    sort_keys: dict[LayerCounts, tuple[float, float]] = {}

    def sort_key(layers: LayerCounts) -> tuple[float, float]:
        if layers not in sort_keys:
            sort_keys[layers] = problem.simulate_step(layers).sort_key
        return sort_keys[layers]

    stages, units = len(problem.stages) - problem.has_empty_first_stage, _count_units(problem)
    if math.comb(units - 1, stages - 1) <= _MAX_EXHAUSTIVE_SPLITS:
        return min(_enumerate_splits(problem), key=sort_key)
    starts = {problem.even_split(), _proportional_split(problem)}
    return min((_improve_split(start, problem, sort_key) for start in starts), key=sort_key)


def _count_units(problem: SplitProblem) -> int:
    """Return the number of units to distribute: one layer per chunk of a stage each."""
    return len(problem.kinds) // problem.meshes.chunks


def _enumerate_splits(problem: SplitProblem) -> Iterator[LayerCounts]:
    units, stages = _count_units(problem), len(problem.stages) - problem.has_empty_first_stage
    for cuts in itertools.combinations(range(1, units), stages - 1):
        edges = (0, *cuts, units)
        yield _to_layer_counts(problem, [b - a for a, b in itertools.pairwise(edges)])


def _to_layer_counts(problem: SplitProblem, counts: Sequence[int]) -> LayerCounts:
    units = [0] * problem.has_empty_first_stage + list(counts)
    return tuple(count * problem.meshes.chunks for count in units)


def _proportional_split(problem: SplitProblem) -> LayerCounts:
    """Return the split that assigns each unit to the stage that would finish it first."""
    first_stage = int(problem.has_empty_first_stage)
    stages = problem.stages[first_stage:]
    kind = max(set(problem.kinds), key=problem.kinds.count)
    seconds_per_unit = [
        problem.costs[stage.mesh_index].layers[kind].pass_seconds for stage in stages
    ]
    fixed_seconds = [0.0] * len(stages)
    fixed_seconds[0] += 0.0 if first_stage else problem.costs[0].embedding.pass_seconds
    fixed_seconds[-1] += problem.costs[-1].head.pass_seconds
    counts = [1] * len(stages)
    for _ in range(_count_units(problem) - len(stages)):
        finish_times = [
            end + (count + 1) * seconds * problem.meshes.chunks
            for end, count, seconds in zip(fixed_seconds, counts, seconds_per_unit, strict=True)
        ]
        counts[finish_times.index(min(finish_times))] += 1
    return _to_layer_counts(problem, counts)


def _improve_split(layers: LayerCounts, problem: SplitProblem, sort_key: _SortKey) -> LayerCounts:
    while True:
        candidate = min(_neighbouring_splits(layers, problem), key=sort_key, default=layers)
        if sort_key(candidate) >= sort_key(layers):
            return layers
        layers = candidate


def _neighbouring_splits(layers: LayerCounts, problem: SplitProblem) -> Iterator[LayerCounts]:
    """Yield the splits that differ by one unit moved from one stage to another."""
    first, unit = int(problem.has_empty_first_stage), problem.meshes.chunks
    for source, target in itertools.permutations(range(first, len(layers)), 2):
        if layers[source] > unit:
            neighbour = list(layers)
            neighbour[source] -= unit
            neighbour[target] += unit
            yield tuple(neighbour)
