"""Which stage should hold how many layers, when stages are not equally fast.

Every split is judged by playing a step of it. Where there are too many to play them all, the search
goes from good ones to better ones by taking layers from one stage to another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flagscale.config.arguments.meshes import Meshes, Stage
from flagscale.estimate.arithmetic import mixtures
from flagscale.estimate.costs import DENSE, MIXTURE, Cost, Costs
from flagscale.estimate.pipeline import Passes, play, warm_up
from flagscale.estimate.step_time import shown

_GIB = 2**30
_EXHAUSTIVE = 4000
"""As many splits are all judged."""

Layers = tuple[int, ...]
"""Of each stage."""

_Rank = Callable[[Layers], tuple[float, float]]


@dataclass(frozen=True)
class Step:
    """What a step of a split takes. ``memory``: bytes of a rank of each stage; ``over``: how many
    bytes the fullest of them has too much."""

    seconds: float
    busy: tuple[float, ...]
    memory: tuple[float, ...]
    over: float

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better: what does not fit is worse than whatever fits."""
        return self.over, self.seconds

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the step in which each stage waits."""
        return tuple(1.0 - busy / self.seconds for busy in self.busy)


@dataclass(frozen=True)
class Problem:
    """What is to be split.

    Args:
        meshes: all meshes; their layers do not matter.
        costs: of a rank of each mesh.
        kinds: the kind of each layer of the model, in order.
        micro_batches: of a step.
        empty_first: the first stage holds the embedding alone.
    """

    meshes: Meshes
    costs: tuple[Costs, ...]
    kinds: tuple[str, ...]
    micro_batches: int
    empty_first: bool = False

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.meshes.stages

    @cached_property
    def _counted(self) -> Mapping[str, Layers]:
        """How many layers of a kind come before each."""
        return {
            kind: tuple(itertools.accumulate((k == kind for k in self.kinds), initial=0))
            for kind in set(self.kinds)
        }

    def parts(self, layers: Layers) -> list[list[Cost]]:
        """What each model chunk of each stage costs."""
        made: list[list[Cost]] = [[] for _ in layers]
        first, chunks = 0, self.meshes.chunks
        for chunk, index in itertools.product(range(chunks), range(len(layers))):
            costs = self.costs[self.stages[index].mesh_index]
            last = first + layers[index] // chunks
            part = Cost()
            for kind, before in self._counted.items():
                part += costs.layers[kind].times(before[last] - before[first])
            if index == 0 and chunk == 0:
                part += costs.embedding
            if index == len(layers) - 1 and chunk == chunks - 1:
                part += costs.head
            made[index].append(part)
            first = last
        return made

    def step(self, layers: Layers) -> Step:
        """What a step of a split takes."""
        parts = self.parts(layers)
        passes = [
            Passes(tuple(p.forward for p in chunks), tuple(p.backward for p in chunks))
            for chunks in parts
        ]
        played = play(passes, self.micro_batches, eager=self.meshes.eager)
        after = [sum(part.after for part in chunks) for chunks in parts]
        memory = tuple(self._memory(index, chunks) for index, chunks in enumerate(parts))
        limits = [self.costs[stage.mesh_index].memory for stage in self.stages]
        over = max(
            (m - limit for m, limit in zip(memory, limits, strict=True) if limit is not None),
            default=0.0,
        )
        busy = tuple(b + a for b, a in zip(played.busy, after, strict=True))
        return Step(played.seconds + max(after), busy, memory, max(over, 0.0))

    def _memory(self, index: int, chunks: Sequence[Cost]) -> float:
        """Bytes of a rank: of its chunks, and of the micro-batches whose backward passes are to
        come when the most are."""
        count = self.meshes.chunks
        most = warm_up(len(self.stages), index, count, eager=self.meshes.eager) + 1
        under_way = min(most, self.micro_batches * count)
        held = sum(chunk.held for chunk in chunks)
        return held + under_way * sum(chunk.kept for chunk in chunks) / count

    def even(self) -> Layers:
        """As many layers in each stage, as far as they divide."""
        units = len(self.kinds) // self.meshes.chunks
        held = len(self.stages) - self.empty_first
        each, more = divmod(units, held)
        counts = [each + (i < more) for i in range(held)]
        return tuple(c * self.meshes.chunks for c in [0] * self.empty_first + counts)


def kinds_of(args: Any) -> tuple[str, ...]:
    """The kind of each layer of a model, from its resolved arguments."""
    return tuple(MIXTURE if mixture else DENSE for mixture in mixtures(args))


def reasons(problem: Problem, layers: Layers) -> Iterator[str]:
    """Why a split, in lines: what a step takes, and what it would with as many layers in each."""
    step, even = problem.step(layers), problem.even()
    text = f"layers {_text(layers)}: by measured times a step takes {shown(step.seconds)}"
    if even != layers:
        other = problem.step(even)
        more = other.seconds / step.seconds - 1
        text += f"; with {_text(even)} {shown(other.seconds)}, {more:+.0%}"
        text += " and more memory than there is" * (other.over > 0)
    yield text
    for stage, busy, idle, memory in zip(
        problem.stages, step.busy, step.idle, step.memory, strict=True
    ):
        costs = problem.costs[stage.mesh_index]
        each = ", ".join(
            f"{kind} {shown(cost.both)}" for kind, cost in sorted(costs.layers.items())
        )
        text = (
            f"stage {stage.index} ({stage.mesh.named()}): a layer takes a micro-batch {each}; "
            f"{layers[stage.index]} of them keep it busy for {shown(busy)}, idle {idle:.0%}"
        )
        if costs.memory is not None:
            text += f", {memory / _GIB:.1f} of {costs.memory / _GIB:.1f} GiB"
        yield text
    if step.over:
        yield (
            f"no split fits: this one takes {step.over / _GIB:.1f} GiB more than a device of one "
            "stage has"
        )


def _text(layers: Layers) -> str:
    return "+".join(map(str, layers))


def best(problem: Problem) -> Layers:
    """The split whose step is shortest of those that fit; of none that fits, the one that is over
    by the least."""
    judged: dict[Layers, tuple[float, float]] = {}

    def rank(layers: Layers) -> tuple[float, float]:
        if layers not in judged:
            judged[layers] = problem.step(layers).rank
        return judged[layers]

    held, units = len(problem.stages) - problem.empty_first, _units(problem)
    if math.comb(units - 1, held - 1) <= _EXHAUSTIVE:
        return min(_every(problem), key=rank)
    starts = {problem.even(), _proportional(problem)}
    return min((_improved(start, problem, rank) for start in starts), key=rank)


def _units(problem: Problem) -> int:
    """What is shared out: layers, or as many at once as a stage has chunks."""
    return len(problem.kinds) // problem.meshes.chunks


def _every(problem: Problem) -> Iterator[Layers]:
    units, held = _units(problem), len(problem.stages) - problem.empty_first
    for cuts in itertools.combinations(range(1, units), held - 1):
        edges = (0, *cuts, units)
        yield _layers(problem, [b - a for a, b in itertools.pairwise(edges)])


def _layers(problem: Problem, counts: Sequence[int]) -> Layers:
    full = [0] * problem.empty_first + list(counts)
    return tuple(count * problem.meshes.chunks for count in full)


def _proportional(problem: Problem) -> Layers:
    """One after another, units go where the stage is done first with one more."""
    first = int(problem.empty_first)
    stages = problem.stages[first:]
    kind = max(set(problem.kinds), key=problem.kinds.count)
    each = [problem.costs[stage.mesh_index].layers[kind].both for stage in stages]
    ends = [0.0] * len(stages)
    ends[0] += 0.0 if first else problem.costs[0].embedding.both
    ends[-1] += problem.costs[-1].head.both
    counts = [1] * len(stages)
    for _ in range(_units(problem) - len(stages)):
        done = [
            end + (count + 1) * one * problem.meshes.chunks
            for end, count, one in zip(ends, counts, each, strict=True)
        ]
        counts[done.index(min(done))] += 1
    return _layers(problem, counts)


def _improved(layers: Layers, problem: Problem, rank: _Rank) -> Layers:
    while True:
        nearer = min(_neighbours(layers, problem), key=rank, default=layers)
        if rank(nearer) >= rank(layers):
            return layers
        layers = nearer


def _neighbours(layers: Layers, problem: Problem) -> Iterator[Layers]:
    """A unit taken from one stage to another."""
    first, unit = int(problem.empty_first), problem.meshes.chunks
    for giver, taker in itertools.permutations(range(first, len(layers)), 2):
        if layers[giver] > unit:
            made = list(layers)
            made[giver] -= unit
            made[taker] += unit
            yield tuple(made)
