"""Plans of the transfers between pipeline stages with different layouts, for random layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.hetero.meshes import Mesh, Meshes, Stage
from flagscale.train.meshes.transfer_plan import compute_region, plan_transfers

SEQUENCE_LENGTH = 288  # divisible by the slices of all layouts below

sizes = st.builds(
    Mesh,
    tp=st.sampled_from([1, 2, 3, 4]),
    cp=st.sampled_from([1, 2, 3]),
    dp=st.integers(1, 3),
    layers=st.just((1,)),
)


def iter_elements(meshes: Meshes, stage: Stage) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yield where each element of a stage's activations is, and which element it is.

    Yields:
        (rank, token index in the rank's tensor, sequence index in it), and the element as (position
        in the sequence, sequence index in the micro-batch).
    """
    for rank in stage.ranks:
        region = compute_region(meshes, stage, rank, SEQUENCE_LENGTH)
        for span in region.spans:
            for s, b in itertools.product(range(span.stop - span.start), range(len(region.batch))):
                yield (rank, span.offset + s, b), (span.start + s, region.batch.start + b)


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, st.integers(3, 7), st.booleans(), st.booleans())
def test_every_element_is_sent_once_to_the_rank_that_needs_it(
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
    for transfer in plan_transfers(meshes, source, target, SEQUENCE_LENGTH):
        for s, q in itertools.product(range(transfer.length), range(transfer.sequences)):
            element = source_elements[
                transfer.sender, transfer.source_token + s, transfer.source_sequence + q
            ]
            target_position = (
                transfer.receiver,
                transfer.target_token + s,
                transfer.target_sequence + q,
            )
            assert target_position not in received
            received[target_position] = element
            sent.append(element)
    assert received == target_elements
    # No element is sent more than once, although tensor-parallel ranks hold copies.
    assert sorted(sent) == sorted(itertools.product(range(SEQUENCE_LENGTH), range(sequences)))


@pytest.mark.parametrize(
    "sequence_parallel",
    [False, True],
    ids=["without_sequence_parallelism", "with_sequence_parallelism"],
)
def test_region_is_the_tensor_parallel_slice(sequence_parallel: bool) -> None:
    meshes = Meshes(
        (Mesh(tp=2, layers=(1,)), Mesh(layers=(1,))), 2, sequence_parallel=sequence_parallel
    )
    # Tensor-parallel rank 1 of 2 sends the second half of 8 tokens.
    region = compute_region(meshes, meshes.stages[0], 1, 8)
    assert (region.length, region.slice_start, region.slice_length) == (
        (4, 0, 4) if sequence_parallel else (8, 4, 4)
    )
    assert [(s.offset, s.start, s.stop) for s in region.spans] == [
        (0 if sequence_parallel else 4, 4, 8)
    ]
