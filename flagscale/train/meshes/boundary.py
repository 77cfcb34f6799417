"""What neighbouring stages send each other, planned once from their layouts.

The activations of a micro-batch are a tensor of ``[sequence, sequences of the micro-batch,
hidden]``, of which each rank of a stage holds a region: its data-parallel part of the batch, its
context-parallel pieces of the sequence, of these with sequence parallelism a tensor-parallel slice.
A move is what one rank's region has in common with another's. Without sequence parallelism
tensor-parallel ranks hold the same; then each sends and is sent its slice only, and the receivers
gather the rest among themselves, so that every element crosses between stages once.

Pure: plain numbers, no tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.arguments.meshes import Meshes, Stage


@dataclass(frozen=True)
class Span:
    """Consecutive tokens: the positions ``start`` to ``stop`` of the sequence, which lie at
    ``offset`` in the tensor that a rank holds."""

    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class Region:
    """What a rank sends or is sent of a micro-batch: ``spans`` of the sequences ``batch``. The
    tensor it holds has ``length`` tokens; the first of its own slice is ``first``, and it has
    ``own`` of them."""

    spans: tuple[Span, ...]
    batch: range
    length: int
    first: int
    own: int


@dataclass(frozen=True)
class Move:
    """A block that one rank sends another: ``length`` tokens of ``sequences`` sequences, from
    ``[source, source_batch]`` of the sender's tensor to ``[target, target_batch]`` of the
    receiver's."""

    sender: int
    receiver: int
    source: int
    target: int
    length: int
    source_batch: int
    target_batch: int
    sequences: int


def region(meshes: Meshes, stage: Stage, rank: int, sequence: int) -> Region:
    """The region of one of a stage's ranks. ``sequence``: tokens of a whole sequence."""
    parallel = meshes.sequence_parallel
    d, c, t = stage.place(rank)
    tp, cp = stage.mesh.tp, stage.mesh.cp
    pieces = [(0, sequence)]
    if cp > 1:  # one from the front and the one as far from the end, see model/context.py
        width = sequence // (2 * cp)
        pieces = [(k * width, (k + 1) * width) for k in (c, 2 * cp - 1 - c)]
    local = sequence // cp
    own = local // tp
    held = own if parallel else local
    spans, before = [], 0
    for start, stop in pieces:
        low = max(before, t * own)
        high = min(before + stop - start, (t + 1) * own)
        if low < high:
            offset = low - (t * own if parallel else 0)
            spans.append(Span(offset, start + low - before, start + high - before))
        before += stop - start
    batch = meshes.sequences_of(stage.mesh, d)
    return Region(tuple(spans), batch, held, 0 if parallel else t * own, own)


def moves(meshes: Meshes, source: Stage, target: Stage, sequence: int) -> tuple[Move, ...]:
    """Everything that crosses from one stage to another for one micro-batch, in an order that
    both sides share."""

    def regions(stage: Stage) -> dict[int, Region]:
        return {r: region(meshes, stage, r, sequence) for r in stage.ranks}

    made: list[Move] = []
    senders = regions(source)
    for receiver, wanted in regions(target).items():
        for sender, held in senders.items():
            low = max(held.batch.start, wanted.batch.start)
            high = min(held.batch.stop, wanted.batch.stop)
            if low >= high:
                continue
            for here, there, length in _common(held, wanted):
                made.append(
                    Move(
                        sender,
                        receiver,
                        here,
                        there,
                        length,
                        low - held.batch.start,
                        low - wanted.batch.start,
                        high - low,
                    )
                )
    return tuple(made)


def _common(held: Region, wanted: Region) -> Iterator[tuple[int, int, int]]:
    """Tokens that two regions share: where they lie here, there, and how many."""
    for a, b in itertools.product(held.spans, wanted.spans):
        low, high = max(a.start, b.start), min(a.stop, b.stop)
        if low < high:
            yield a.offset + low - a.start, b.offset + low - b.start, high - low
