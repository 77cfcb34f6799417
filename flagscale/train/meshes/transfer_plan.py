"""Plan of the transfers between adjacent pipeline stages with different parallel layouts.

The activations of a micro-batch form a tensor [s, b, h], of which each rank of a stage holds a
region: its data-parallel part of the batch, its context-parallel chunks of the sequence, and with
sequence parallelism a tensor-parallel slice of these. A transfer is the intersection of two ranks'
regions. Without sequence parallelism, tensor-parallel ranks hold the same data. Then each sends and
receives only its slice, and the receivers all-gather, so that every element crosses the boundary
once.

This module handles plain numbers and no tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.arguments.hetero.meshes import Meshes, Stage


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens at positions ``start`` to ``stop`` of the sequence.

    They are at ``offset`` in the tensor that a rank holds.
    """

    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class StageRegion:
    """Part of a micro-batch that a rank sends or receives.

    Attributes:
        spans: tokens of each sequence.
        batch: sequences of the micro-batch.
        length: number of tokens in the tensor that the rank holds.
        slice_start: first token of the rank's slice in that tensor.
        slice_length: number of tokens of the slice.
    """

    spans: tuple[TokenSpan, ...]
    batch: range
    length: int
    slice_start: int
    slice_length: int


@dataclass(frozen=True)
class BlockTransfer:
    """Block of ``length`` tokens of ``sequences`` sequences that one rank sends to another.

    It is at [source, source_batch] in the sender's tensor and at [target, target_batch] in the
    receiver's.
    """

    sender: int
    receiver: int
    source: int
    target: int
    length: int
    source_batch: int
    target_batch: int
    sequences: int


def compute_region(meshes: Meshes, stage: Stage, rank: int, sequence: int) -> StageRegion:
    """Return the region of a rank of a stage, for sequences of ``sequence`` tokens."""
    sequence_parallel = meshes.sequence_parallel
    d, c, t = stage.place(rank)
    tp, cp = stage.mesh.tp, stage.mesh.cp
    chunks = [(0, sequence)]
    if cp > 1:  # chunks c and 2·cp - 1 - c, see models/context_parallel.py
        width = sequence // (2 * cp)
        chunks = [(k * width, (k + 1) * width) for k in (c, 2 * cp - 1 - c)]
    local_length = sequence // cp
    slice_length = local_length // tp
    spans, chunk_offset = [], 0
    for start, stop in chunks:
        low = max(chunk_offset, t * slice_length)
        high = min(chunk_offset + stop - start, (t + 1) * slice_length)
        if low < high:
            offset = low - (t * slice_length if sequence_parallel else 0)
            spans.append(TokenSpan(offset, start + low - chunk_offset, start + high - chunk_offset))
        chunk_offset += stop - start
    return StageRegion(
        spans=tuple(spans),
        batch=meshes.sequences_of(stage.mesh, d),
        length=slice_length if sequence_parallel else local_length,
        slice_start=0 if sequence_parallel else t * slice_length,
        slice_length=slice_length,
    )


def plan_transfers(
    meshes: Meshes, source: Stage, target: Stage, sequence: int
) -> tuple[BlockTransfer, ...]:
    """Return all transfers of a micro-batch from one stage to another, in a common order."""

    transfers: list[BlockTransfer] = []
    source_regions = {rank: compute_region(meshes, source, rank, sequence) for rank in source.ranks}
    for receiver in target.ranks:
        target_region = compute_region(meshes, target, receiver, sequence)
        for sender, source_region in source_regions.items():
            low = max(source_region.batch.start, target_region.batch.start)
            high = min(source_region.batch.stop, target_region.batch.stop)
            if low >= high:
                continue
            transfers += [
                BlockTransfer(
                    sender=sender,
                    receiver=receiver,
                    source=source_offset,
                    target=target_offset,
                    length=length,
                    source_batch=low - source_region.batch.start,
                    target_batch=low - target_region.batch.start,
                    sequences=high - low,
                )
                for source_offset, target_offset, length in _intersect_spans(
                    source_region, target_region
                )
            ]
    return tuple(transfers)


def _intersect_spans(source: StageRegion, target: StageRegion) -> Iterator[tuple[int, int, int]]:
    """Yield the offset in ``source``, the offset in ``target`` and the length of common spans."""
    for a, b in itertools.product(source.spans, target.spans):
        low, high = max(a.start, b.start), min(a.stop, b.stop)
        if low < high:
            yield a.offset + low - a.start, b.offset + low - b.start, high - low
