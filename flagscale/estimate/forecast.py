"""What a step takes of the ranks of each pipeline stage, by calculation."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from flagscale.config.arguments import recompute
from flagscale.config.arguments.meshes import Meshes
from flagscale.config.arguments.pipeline import layers_of_stages
from flagscale.config.arguments.recompute import AUTO
from flagscale.config.arguments.resolve import of_rank
from flagscale.estimate import arithmetic, memory, op_times
from flagscale.estimate.arithmetic import Layer, training
from flagscale.estimate.memory import Held, Memory
from flagscale.estimate.op_times import Both, Chip, Load
from flagscale.estimate.pipeline import Passes, Played, play, warm_up


@dataclass(frozen=True)
class Stage:
    """Of one rank of a stage. ``name`` is for people; ``work``: floating-point operations of a
    micro-batch, both passes, a model chunk each, as the model's own work is counted; ``passes``:
    what these ask of its device, recomputing included; ``after``: what the end of a step asks;
    ``recomputed``: how many layers of a chunk are, where that is to be chosen."""

    name: str
    layers: int
    ranks: int
    memory: Memory
    work: tuple[float, ...]
    passes: tuple[Both, ...]
    after: Load
    recomputed: int = 0


@dataclass(frozen=True)
class Forecast:
    """Of all stages. ``work``: the model's floating-point operations of a step, over all ranks;
    ``eager``: the schedule is of that kind."""

    stages: tuple[Stage, ...]
    micro_batches: int
    work: float
    eager: bool = False

    def played(self, chips: Sequence[Chip]) -> Played:
        """A step on such devices, one for each stage. Communication is taken to be hidden."""
        passes = [
            Passes(
                tuple(both.forward.seconds(chip) for both in stage.passes),
                tuple(both.backward.seconds(chip) for both in stage.passes),
            )
            for stage, chip in zip(self.stages, chips, strict=True)
        ]
        found = play(passes, self.micro_batches, eager=self.eager)
        ends = [stage.after.seconds(chip) for stage, chip in zip(self.stages, chips, strict=True)]
        busy = tuple(own + end for own, end in zip(found.busy, ends, strict=True))
        return Played(found.seconds + max(ends), busy)

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
    kinds = arithmetic.layers(args)
    tokens = float(args.global_batch_size * args.seq_length)
    flops = tokens * arithmetic.flops_per_token(args, vocabulary)
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
        return Forecast(tuple(made), own.num_microbatches, flops)
    chunks = meshes.chunks
    counts = [(stage.layers // chunks,) * chunks for stage in meshes.stages]
    found = []
    for stage in meshes.stages:
        own, mesh = of_rank(args, stage.first_rank), stage.mesh
        name = f"stage {stage.index}, mesh {stage.mesh_index} ({mesh.named()})"
        place = _Place(vocabulary, kinds, counts, stage.index, name, mesh.dp, meshes.eager)
        found.append(_fitted(place, own, next(rooms)))
    return Forecast(tuple(found), args.num_microbatches, flops, meshes.eager)


@dataclass(frozen=True)
class _Place:
    """A stage among all. ``kinds``: the model's layers; ``counts``: how many each stage's chunks
    have."""

    vocabulary: int
    kinds: Sequence[Layer]
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
    each = training(own) * memory.tokens_of(own) / tp
    done = [each * sum(arithmetic.layer_flops(own, one) for one in chunk) for chunk in chunks]
    passes = [_passes(own, chunk) for chunk in chunks]
    if last:
        done[-1] += each * arithmetic.head_flops(own, place.vocabulary)
        done[-1] += each * arithmetic.further_flops(own, place.vocabulary)
        passes[-1] += op_times.head(own, place.vocabulary) + op_times.further(own, place.vocabulary)
    ranks = tp * own.context_parallel_size * place.replicas
    taken = memory.of_rank(own, place.vocabulary, held)
    after = op_times.after(own, place.vocabulary, held)
    layers = len(held.layers)
    return Stage(place.name, layers, ranks, taken, tuple(done), tuple(passes), after)


def _passes(own: Namespace, chunk: Sequence[Layer]) -> Both:
    """Of a chunk's layers."""
    each = [op_times.layer(own, one) for one in chunk]
    again = [one.forward for one in each[: _recomputed(own, len(chunk))]]
    return sum(each, Both()) + Both(backward=sum(again, Load()))


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
    kinds: Sequence[Layer], counts: Sequence[tuple[int, ...]], index: int, chunk: int
) -> Sequence[Layer]:
    """The layers of one chunk of a stage: chunks lie one after another over all stages."""
    before = sum(sum(stage[:chunk]) for stage in counts)
    before += sum(stage[chunk] for stage in counts[:index])
    return kinds[before : before + counts[index][chunk]]
