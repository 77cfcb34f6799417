"""What a step takes of the ranks of each pipeline stage, by calculation."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from flagscale.config.arguments import recompute
from flagscale.config.arguments.meshes import Meshes
from flagscale.config.arguments.pipeline import layers_of_stages
from flagscale.config.arguments.recompute import AUTO
from flagscale.config.arguments.resolve import of_rank
from flagscale.estimate import arithmetic, memory
from flagscale.estimate.arithmetic import TRAINING
from flagscale.estimate.memory import Held, Memory
from flagscale.estimate.pipeline import Passes, play, warm_up


@dataclass(frozen=True)
class Stage:
    """Of one rank of a stage. ``name`` is for people; ``work``: floating-point operations of a
    micro-batch, both passes, a model chunk each; ``again``: those of recomputing, which no count of
    the model's work holds; ``recomputed``: how many layers of a chunk that is, where it is to be
    chosen."""

    name: str
    layers: int
    ranks: int
    memory: Memory
    work: tuple[float, ...]
    again: float
    recomputed: int = 0


@dataclass(frozen=True)
class Forecast:
    """Of all stages. ``work``: the model's floating-point operations of a step, over all ranks;
    ``eager``: the schedule is of the eager kind."""

    stages: tuple[Stage, ...]
    micro_batches: int
    work: float
    eager: bool = False

    def seconds(self, speed: Callable[[Stage], float]) -> float:
        """How long a step takes, where a rank of a stage does ``speed`` operations a second.
        Communication is taken to be hidden."""
        passes = []
        for stage in self.stages:
            forward = [work / TRAINING / speed(stage) for work in stage.work]
            again = stage.again / len(forward) / speed(stage)
            backward = [(TRAINING - 1) * seconds + again for seconds in forward]
            passes.append(Passes(tuple(forward), tuple(backward)))
        return play(passes, self.micro_batches, eager=self.eager).seconds

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each stage the share of the arithmetic that one of its ranks has, of the rank's that
        has most."""
        most = max(sum(stage.work) for stage in self.stages)
        return tuple(sum(stage.work) / most for stage in self.stages)


def forecast(args: Namespace, vocabulary: int, room: Sequence[float] | None = None) -> Forecast:
    """What resolved arguments of a whole job come to.

    Args:
        args: as :func:`flagscale.config.arguments.resolve.resolve` makes them.
        vocabulary: the padded vocabulary.
        room: bytes that a rank of each stage may take, by which ``recompute_granularity: auto``
            recomputes as few layers as fit; where none do, what takes least. Without it there is
            room for everything.
    """
    rooms = repeat(math.inf) if room is None else iter(room)
    meshes: Meshes | None = args.meshes
    kinds = arithmetic.mixtures(args)
    tokens = float(args.global_batch_size * args.seq_length)
    work = tokens * arithmetic.flops_per_token(args, vocabulary)
    if meshes is None:
        counts = layers_of_stages(vars(args))
        own = of_rank(args, 0)
        if args.shares is not None:  # of unlike replicas the one with the largest micro-batches
            own.micro_batch_size = max(share.size for share in args.shares)
        dp = own.data_parallel_size
        made = [
            _fitted(
                _Place(vocabulary, kinds, counts, index, f"stage {index}", dp), own, next(rooms)
            )
            for index in range(len(counts))
        ]
        return Forecast(tuple(made), own.num_microbatches, work)
    chunks = meshes.chunks
    counts = [(stage.layers // chunks,) * chunks for stage in meshes.stages]
    found = []
    for stage in meshes.stages:
        own, mesh = of_rank(args, stage.first_rank), stage.mesh
        name = f"stage {stage.index}, mesh {stage.mesh_index} ({mesh.named()})"
        place = _Place(vocabulary, kinds, counts, stage.index, name, mesh.dp, meshes.eager)
        found.append(_fitted(place, own, next(rooms)))
    return Forecast(tuple(found), args.num_microbatches, work, meshes.eager)


@dataclass(frozen=True)
class _Place:
    """A stage among all. ``kinds``: whether each layer of the model is a mixture; ``counts``:
    layers of each stage's chunks."""

    vocabulary: int
    kinds: Sequence[bool]
    counts: Sequence[tuple[int, ...]]
    index: int
    name: str
    replicas: int
    eager: bool = False


def _fitted(place: _Place, own: Namespace, room: float) -> Stage:
    """A stage whose ranks have the arguments ``own`` and ``room`` bytes."""
    own = _as_recomputed(own, place.index, len(place.counts))
    if own.recompute_granularity != AUTO:
        return _stage(place, own)
    ways = [
        replace(_stage(place, recomputing(own, layers)), recomputed=layers)
        for layers in range(max(place.counts[place.index]) + 1)
    ]
    least = min(ways, key=lambda way: way.memory.all)
    return next((way for way in ways if way.memory.all <= room), least)


def recomputing(args: Namespace, layers: int) -> Namespace:
    """The arguments with that many layers of each model chunk recomputed, the first ones."""
    made = copy(args)
    made.recompute_granularity = "full" if layers else None
    made.recompute_method = "block" if layers else None
    made.recompute_num_layers = layers or None
    return made


def _stage(place: _Place, own: Namespace) -> Stage:
    kinds, counts, index = place.kinds, place.counts, place.index
    chunks = [_own_kinds(kinds, counts, index, chunk) for chunk in range(len(counts[index]))]
    first, last = index == 0, index == len(counts) - 1
    most = warm_up(len(counts), index, len(chunks), eager=place.eager) + 1
    under_way = min(most, own.num_microbatches * len(chunks))
    held = Held(
        tuple(kind for chunk in chunks for kind in chunk), first, last, under_way / len(chunks)
    )
    tp = own.tensor_model_parallel_size
    each = memory.tokens_of(own) / tp
    layers = [[each * arithmetic.layer_flops(own, mixture=m) for m in chunk] for chunk in chunks]
    work = [TRAINING * sum(flops) for flops in layers]
    if last:
        work[-1] += TRAINING * each * arithmetic.head_flops(own, place.vocabulary)
    again = sum(sum(flops[: _recomputed(own, len(flops))]) for flops in layers)
    ranks = tp * own.context_parallel_size * place.replicas
    taken = memory.of_rank(own, place.vocabulary, held)
    return Stage(place.name, len(held.layers), ranks, taken, tuple(work), again)


def _recomputed(args: Any, layers: int) -> int:
    """How many of a chunk's layers are computed again for the backward pass."""
    if args.recompute_granularity != "full":
        return 0
    return (
        min(args.recompute_num_layers or 1, layers) if args.recompute_method == "block" else layers
    )


def _as_recomputed(own: Namespace, index: int, stages: int) -> Namespace:
    """The arguments with one choice of recomputation for all of a stage's micro-batches: where they
    differ, the one that keeps most."""
    chosen = recompute.plan(vars(own), own.num_microbatches)
    if chosen is None:
        return own
    choices = [choice for chunk in chosen[index::stages] for choice in chunk]
    recomputing = [choice for choice in choices if choice is not None]
    made = copy(own)
    if len(recomputing) < len(choices):
        made.recompute_granularity = None
    else:
        least = min(recomputing, key=lambda choice: choice.layers)
        made.recompute_method, made.recompute_num_layers = least.method, least.layers
    return made


def _own_kinds(
    kinds: Sequence[bool], counts: Sequence[tuple[int, ...]], index: int, chunk: int
) -> Sequence[bool]:
    """The layers of one chunk of a stage: chunks lie one after another over all stages."""
    before = sum(sum(stage[:chunk]) for stage in counts)
    before += sum(stage[chunk] for stage in counts[:index])
    return kinds[before : before + counts[index][chunk]]
