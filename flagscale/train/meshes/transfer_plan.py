"""Plan of the transfers between adjacent pipeline stages with different parallel layouts.

The activations of a micro-batch form a tensor [s, b, h], of which each rank of a stage holds a
region: its data-parallel part of the batch, its context-parallel chunks of the sequence, and with
sequence parallelism a tensor-parallel slice of these. A transfer is the intersection of two ranks'
regions. Without sequence parallelism, tensor-parallel ranks hold the same data. Then each sends and
receives only its slice, and the receivers all-gather, so that every element is sent from one stage
to the other only once.

This module computes indices only; :mod:`.p2p_communicator` sends the tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.arguments.hetero.meshes import Meshes, Stage


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens at positions ``start`` to ``stop`` (exclusive) of the sequence.

    ``offset`` is the index of the first one in the tensor that a rank holds.
    """

    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class StageRegion:
    """Part of a micro-batch that a rank sends or receives.

    Attributes:
        spans: tokens of each sequence.
        batch: indices of the sequences in the micro-batch.
        length: number of tokens per sequence in the tensor that the rank holds.
        slice_start: index in that tensor of the first token of the slice that the rank sends or
            receives.
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

    Its first element is at [source_token, source_sequence] in the sender's tensor and at
    [target_token, target_sequence] in the receiver's.
    """

    sender: int
    receiver: int
    source_token: int
    target_token: int
    length: int
    source_sequence: int
    target_sequence: int
    sequences: int


def compute_region(meshes: Meshes, stage: Stage, rank: int, sequence_length: int) -> StageRegion:
    """Return the region of a rank of a stage, for sequences of ``sequence_length`` tokens."""
    sequence_parallel = meshes.sequence_parallel
    # Data-, context- and tensor-parallel index of the rank.
    d, c, t = stage.position_of(rank)
    tp, cp = stage.mesh.tp, stage.mesh.cp
    chunks = [(0, sequence_length)]
    if cp > 1:  # chunks c and 2·cp - 1 - c, see models/context_parallel.py
        width = sequence_length // (2 * cp)
        chunks = [(k * width, (k + 1) * width) for k in (c, 2 * cp - 1 - c)]
    local_length = sequence_length // cp
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
    meshes: Meshes, source: Stage, target: Stage, sequence_length: int
) -> tuple[BlockTransfer, ...]:
    """Return all transfers of a micro-batch from one stage to another.

    The order is the same on all ranks, so that sends and receives of two ranks match.
    """
    transfers: list[BlockTransfer] = []
    source_regions = {
        rank: compute_region(meshes, source, rank, sequence_length) for rank in source.ranks
    }
    for receiver in target.ranks:
        target_region = compute_region(meshes, target, receiver, sequence_length)
        for sender, source_region in source_regions.items():
            low = max(source_region.batch.start, target_region.batch.start)
            high = min(source_region.batch.stop, target_region.batch.stop)
            if low >= high:
                continue
            transfers += [
                BlockTransfer(
                    sender=sender,
                    receiver=receiver,
                    source_token=source_offset,
                    target_token=target_offset,
                    length=length,
                    source_sequence=low - source_region.batch.start,
                    target_sequence=low - target_region.batch.start,
                    sequences=high - low,
                )
                for source_offset, target_offset, length in _intersect_spans(
                    source_region, target_region
                )
            ]
    return tuple(transfers)


def _intersect_spans(source: StageRegion, target: StageRegion) -> Iterator[tuple[int, int, int]]:
    """Yield the offset in ``source``, the offset in ``target`` and the length of common spans."""
    for sent, received in itertools.product(source.spans, target.spans):
        low, high = max(sent.start, received.start), min(sent.stop, received.stop)
        if low < high:
            yield sent.offset + low - sent.start, received.offset + low - received.start, high - low
