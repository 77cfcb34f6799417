"""Transfer plans between pipeline stages, for random layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.hetero.meshes import Mesh, Meshes, Stage
from flagscale.train.meshes.transfer_plan import compute_region, plan_transfers

SEQUENCE = 288  # divisible by the slices of all layouts below

sizes = st.builds(
    Mesh,
    tp=st.sampled_from([1, 2, 3, 4]),
    cp=st.sampled_from([1, 2, 3]),
    dp=st.integers(1, 3),
    layers=st.just((1,)),
)


def iter_elements(meshes: Meshes, stage: Stage) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yield each position in a rank's slice with its element: a position of the sequence and a
    sequence.
    """
    for rank in stage.ranks:
        region = compute_region(meshes, stage, rank, SEQUENCE)
        for span in region.spans:
            for s, b in itertools.product(range(span.stop - span.start), range(len(region.batch))):
                yield (rank, span.offset + s, b), (span.start + s, region.batch.start + b)


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, st.integers(3, 7), st.booleans(), st.booleans())
def test_every_element_is_sent_once_to_its_place(
    a: Mesh, b: Mesh, sequences: int, sequence_parallel: bool, reverse: bool
) -> None:
    meshes = Meshes((a, b), sequences, sequence_parallel=sequence_parallel)
    source, target = meshes.stages[::-1] if reverse else meshes.stages
    source_elements, target_elements = (
        dict(iter_elements(meshes, source)),
        dict(iter_elements(meshes, target)),
    )
    received: dict[tuple[int, ...], tuple] = {}
    sent: list[tuple] = []
    for transfer in plan_transfers(meshes, source, target, SEQUENCE):
        for s, q in itertools.product(range(transfer.length), range(transfer.sequences)):
            element = source_elements[
                transfer.sender, transfer.source + s, transfer.source_batch + q
            ]
            target_position = (transfer.receiver, transfer.target + s, transfer.target_batch + q)
            assert target_position not in received
            received[target_position] = element
            sent.append(element)
    assert received == target_elements
    # The lower bound: no element crosses more than once.
    assert sorted(sent) == sorted(itertools.product(range(SEQUENCE), range(sequences)))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slice"])
def test_a_rank_sends_its_slice(sequence_parallel: bool) -> None:
    meshes = Meshes(
        (Mesh(tp=2, layers=(1,)), Mesh(layers=(1,))), 2, sequence_parallel=sequence_parallel
    )
    region = compute_region(meshes, meshes.stages[0], 1, 8)
    assert (region.length, region.slice_start, region.slice_length) == (
        (4, 0, 4) if sequence_parallel else (8, 4, 4)
    )
    assert [(s.offset, s.start, s.stop) for s in region.spans] == [
        (0 if sequence_parallel else 4, 4, 8)
    ]
