"""The plan of what stages send each other, for random layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.meshes import Mesh, Meshes, Stage
from flagscale.train.meshes.boundary import moves, region

SEQUENCE = 288  # of which every layout below cuts whole slices

sizes = st.builds(
    Mesh,
    tp=st.sampled_from([1, 2, 3, 4]),
    cp=st.sampled_from([1, 2, 3]),
    dp=st.integers(1, 3),
    layers=st.just((1,)),
)


def cells(meshes: Meshes, stage: Stage) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Each place in a rank's tensor that it is sent, or sends, with the element that belongs there:
    a position of the sequence and a sequence."""
    for rank in stage.ranks:
        own = region(meshes, stage, rank, SEQUENCE)
        for span in own.spans:
            for s, b in itertools.product(range(span.stop - span.start), range(len(own.batch))):
                yield (rank, span.offset + s, b), (span.start + s, own.batch.start + b)


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, st.integers(3, 7), st.booleans(), st.booleans())
def test_every_element_is_sent_once_to_its_place(
    a: Mesh, b: Mesh, sequences: int, parallel: bool, back: bool
) -> None:
    meshes = Meshes((a, b), sequences, sequence_parallel=parallel)
    source, target = meshes.stages[::-1] if back else meshes.stages
    have, want = dict(cells(meshes, source)), dict(cells(meshes, target))
    got: dict[tuple[int, ...], tuple] = {}
    sent: list[tuple] = []
    for m in moves(meshes, source, target, SEQUENCE):
        for s, q in itertools.product(range(m.length), range(m.sequences)):
            element = have[m.sender, m.source + s, m.source_batch + q]
            place = (m.receiver, m.target + s, m.target_batch + q)
            assert place not in got
            got[place] = element
            sent.append(element)
    assert got == want
    # The lower bound: no element crosses more than once.
    assert sorted(sent) == sorted(itertools.product(range(SEQUENCE), range(sequences)))


@pytest.mark.parametrize("parallel", [False, True], ids=["whole", "slice"])
def test_a_rank_sends_its_slice_of_what_it_holds(parallel: bool) -> None:
    meshes = Meshes((Mesh(tp=2, layers=(1,)), Mesh(layers=(1,))), 2, sequence_parallel=parallel)
    found = region(meshes, meshes.stages[0], 1, 8)
    assert (found.length, found.first, found.own) == ((4, 0, 4) if parallel else (8, 4, 4))
    assert [(s.offset, s.start, s.stop) for s in found.spans] == [(0 if parallel else 4, 4, 8)]
